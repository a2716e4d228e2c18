"""What prepare says while it works: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from lpfs.data.sources.base import Chunk

EVERY = 5.0  # seconds between plain lines
QUICK = 1.0  # seconds; what takes less is not told


class Reporter:
    """Messages and progress, on standard error unless told otherwise."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stderr

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            print(text, file=self.stream, flush=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        if self.quiet:
            return
        rows = [[printable(cell) for cell in row] for row in rows]
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            for row in (header, *rows):
                self.say("  ".join(row))
            return
        table = Table(title=title, title_justify="left", header_style="bold")
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console = Console(file=self.stream, highlight=False)
        if not console.is_terminal:
            console.width = 140
        console.print(table)

    def track(self, chunks: Iterator[Chunk], what: str, total: int) -> Iterator[Chunk]:
        """Pass chunks through, showing rows, rows a second and the time left; ``total`` is in bytes."""
        if self.quiet:
            return chunks
        if self.stream.isatty():
            try:
                return self._bar(chunks, what, total)
            except ImportError:
                pass
        return self._lines(chunks, what, total)

    @contextmanager
    def counting(self, what: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
        """Give a function that is told how much is done and how much there is, and shows it."""
        start = last = time.monotonic()
        bar: Any = None
        if not self.quiet and self.stream.isatty():
            with suppress(ImportError):
                bar = self._progress(unit)
        task: Any = None

        def told(done: int, total: int) -> None:
            nonlocal last, task
            now = time.monotonic()
            speed = done / max(now - start, 1e-6)
            if bar is not None and now - start >= QUICK:
                if task is None:
                    bar.start()
                    task = bar.add_task(what, total=total, rows=0, speed=0.0)
                bar.update(task, completed=done, rows=done, speed=speed)
            elif bar is None and now - last >= EVERY:
                last = now
                left = (total - done) / max(speed, 1e-6)
                self.say(f"{what}: {done:,} {unit}, {speed:,.0f} {unit}/s, {left:,.0f} s left")

        try:
            yield told
        finally:
            if task is not None:
                bar.stop()

    def _lines(self, chunks: Iterator[Chunk], what: str, total: int) -> Iterator[Chunk]:
        start = last = time.monotonic()
        rows = done = 0
        for chunk in chunks:
            yield chunk
            rows += chunk.frame.height
            done += chunk.consumed
            now = time.monotonic()
            if now - last >= EVERY:
                last = now
                left = (now - start) * max(0.0, total / max(1, done) - 1.0)
                self.say(f"{what}: {rows:,} rows, {rows / (now - start):,.0f} rows/s, {left:,.0f} s left")
        spent = max(time.monotonic() - start, 1e-6)
        if spent >= QUICK:
            self.say(f"{what}: {rows:,} rows in {spent:,.1f} s, {rows / spent:,.0f} rows/s")

    def _bar(self, chunks: Iterator[Chunk], what: str, total: int) -> Iterator[Chunk]:
        progress = self._progress()

        def run() -> Iterator[Chunk]:
            start, rows = time.monotonic(), 0
            with progress:
                task = progress.add_task(what, total=total, rows=0, speed=0.0)
                for chunk in chunks:
                    yield chunk
                    rows += chunk.frame.height
                    speed = rows / max(time.monotonic() - start, 1e-6)
                    progress.update(task, advance=chunk.consumed, rows=rows, speed=speed)
                progress.update(task, completed=total)

        return run()

    def _progress(self, unit: str = "rows") -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        counts = (
            f"{{task.percentage:>3.0f}} %  {{task.fields[rows]:,}} {unit}  {{task.fields[speed]:,.0f}} {unit}/s"
        )
        return Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TextColumn(counts),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self.stream),
        )


def printable(text: str) -> str:
    """Return text without characters that would move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
