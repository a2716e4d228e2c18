"""Console: headings, messages, warnings, tables and progress on standard error.

::

    console = Console(quiet=quiet, stages=7)           # pass quiet=True on every rank but the leader
    console.heading("search: keep exactly 20 fields")  # [1/7] search: …
    with console.progress("simulating") as update:
        update(done, total)
    bar = console.step_bar(total=10_000)               # training; total=None if it is unknown
    bar.update(step, lambda: f"{alive} gates alive {sparkline(history, total)}, loss 0.41, 3 s left")
    bar.close()

On a terminal rich draws bars and bold text, and messages appear above an active bar. Elsewhere, and on a dumb
terminal, every output is a plain line. A task that takes less than a second shows nothing. rich is imported on first
use.

This is the only module that prints. Every line is one argument: unprintable characters in it, line breaks included,
are escaped, because names come from data, and characters that the stream cannot encode are replaced.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from lpfs._text import escape_json, escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

LINE_SECONDS = 5.0  # between two plain lines
REFRESH_SECONDS = 0.1  # between two updates of a bar
QUICK_SECONDS = 1.0  # a shorter task shows nothing
PLAIN_WIDTH = 140  # of a table of text where there is no terminal
BLOCKS = "▁▂▃▄▅▆▇█"
REPLACEMENTS = str.maketrans({**dict(zip(BLOCKS, "_..--==#", strict=True)), "…": "...", "–": "-", "−": "-"})


class Console:
    """Headings, messages, tables and progress. ``stages`` is the number of headings; with 0 they are not numbered."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, stages: int = 0) -> None:
        self.quiet, self.stages, self.stage = quiet, stages, 0
        self.stream = unescaped_stream(sys.stderr if stream is None else stream)
        self.is_terminal = (
            self.stream.isatty() and os.environ.get("TERM") != "dumb" and find_spec("rich.console") is not None
        )
        self._active: Progress | None = None  # the bar that is on the screen
        self._rich_console: RichConsole | None = None

    def heading(self, text: str) -> None:
        """Print the heading of the next stage, as ``[2/7] search``."""
        self.stage += 1
        self._print(f"[{self.stage}/{self.stages}] {text}" if self.stages else text, "bold")

    def message(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            self._print(line)

    def warning(self, text: str) -> None:
        """Print text after ``warning:``."""
        self._print(f"warning: {text}", "yellow")

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = True) -> None:
        """Print a table; if ``numeric``, columns after the first are aligned right, otherwise long text is wrapped."""
        if self.quiet:
            return
        from rich.box import HEAVY_HEAD
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        boxed = not numeric and self.is_terminal
        padding = (0, 1) if boxed else (0, 2, 0, 0)
        box, style = HEAVY_HEAD if boxed else None, self._style("bold")
        table = Table(box=box, padding=padding, pad_edge=boxed, header_style=style)
        for number, name in enumerate(header):
            align = "right" if numeric and number else "left"
            table.add_column(Text(self._safe(name)), justify=align, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*(Text(self._safe(cell)) for cell in row))
        self._print(title, "bold")
        padded = Padding(table, (0, 0, 0, 0 if boxed else 2), expand=False)
        if self.is_terminal:
            self._rich().print(padded)
            return
        console = self._rich(width=10_000 if numeric else PLAIN_WIDTH)
        with console.capture() as capture:
            console.print(padded)
        for line in capture.get().splitlines():
            self._write(line.rstrip())

    @contextmanager
    def progress(self, description: str, unit: str = "rows") -> Iterator[Callable[..., None]]:
        """Yield ``update(done, total, count=done)``, which shows the count, its rate and the remaining time."""
        meter = _Meter(self, description, unit)
        try:
            yield meter.update
            meter.finish()
        finally:
            self._stop_bar(meter.bar)

    def step_bar(self, total: int | None = None, *, completed: int = 0, description: str = "train") -> StepBar:
        """Return the progress of training steps, which must be closed."""
        return StepBar(self, total, completed, description)

    def _print(self, text: str, style: str = "") -> None:
        """Print one line, in a style of rich on a terminal."""
        if self.quiet:
            return
        text, style = self._safe(text), self._style(style)
        if self._active is None and not style:
            self._write(text)
        else:
            from rich.text import Text

            self._rich().print(Text(text, style=style), soft_wrap=True)

    def _write(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def _safe(self, text: str) -> str:
        return safe_line(text, self.stream)

    def _style(self, style: str) -> str:
        return style if self.is_terminal and "NO_COLOR" not in os.environ else ""

    def _rich(self, width: int | None = None) -> RichConsole:
        """Return the console of rich: a new one of this width, or one as wide as the terminal."""
        if self._rich_console is None or width is not None:
            from rich.console import Console as RichConsole

            options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "width": width}
            self._rich_console = RichConsole(file=self.stream, force_terminal=self.is_terminal, **options)
        return self._rich_console

    def _start_bar(self, *columns: Any) -> Progress | None:
        """Show a bar; return None if another one is on the screen, because rich shows one at a time."""
        if self._active is not None:
            return None
        from rich.progress import Progress

        bar = Progress(*columns, console=self._rich())
        bar.start()
        self._active = bar
        return bar

    def _stop_bar(self, bar: Progress | None) -> None:
        if bar is not None:
            bar.stop()
            self._active = None


class _Meter:
    """Progress of one task: a bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, console: Console, description: str, unit: str) -> None:
        self.console, self.description, self.unit = console, description, unit
        self.start = self.last_line = time.monotonic()
        self.count = self.total = 0
        self.bar: Progress | None = None

    def update(self, done: int, total: int, count: int | None = None) -> None:
        """Show that ``done`` of ``total`` is done; ``count`` is the number that is shown."""
        if self.console.quiet:
            return
        now = time.monotonic()
        seconds = max(now - self.start, 1e-6)
        count = done if count is None else count
        self.count, self.total = count, total
        if self.console.is_terminal:
            if self.bar is None and seconds >= QUICK_SECONDS:
                self._start()
            if self.bar is not None:
                rate = count / seconds
                self.bar.update(self.bar.task_ids[0], completed=done, total=total, count=count, rate=rate)
        elif now - self.last_line >= LINE_SECONDS:
            self.last_line = now
            remaining = seconds * max(0.0, total / max(1, done) - 1.0)
            speed = f"{count / seconds:,.0f} {self.unit}/s"
            self.console.message(f"{self.description}: {count:,} {self.unit}, {speed}, {remaining:,.0f} s left")

    def _start(self) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        counts = "{task.percentage:>3.0f} %  {task.fields[count]:,} UNIT  {task.fields[rate]:,.0f} UNIT/s"
        self.bar = self.console._start_bar(
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(),
            TextColumn(counts.replace("UNIT", self.unit), markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        if self.bar is not None:
            self.bar.add_task(self.console._safe(self.description), total=None, count=0, rate=0.0)
            self.bar.tasks[0].start_time = self.start  # the elapsed time includes the time before the bar

    def finish(self) -> None:
        """Complete the bar, or print the total where there is no terminal."""
        seconds = max(time.monotonic() - self.start, 1e-6)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.total)
        elif not self.console.is_terminal and self.total and seconds >= QUICK_SECONDS:
            rate = f"{self.count / seconds:,.0f} {self.unit}/s"
            self.console.message(f"{self.description}: {self.count:,} {self.unit} in {seconds:,.1f} s, {rate}")


class StepBar:
    """Progress of training: step, total and a text; made by :meth:`Console.step_bar`."""

    def __init__(self, console: Console, total: int | None, completed: int, description: str) -> None:
        self.console, self.total = console, total
        self.last = time.monotonic()
        self.bar: Progress | None = None
        if not console.quiet and console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

            self._bar_width = 40 if console._rich().width >= 140 else 12
            self._room = console._rich().width - len(description) - self._bar_width - 4
            self.bar = console._start_bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(self._bar_width),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            if self.bar is not None:
                self._task = self.bar.add_task(console._safe(description), total=total, completed=completed, text="")

    def update(self, step: int, text: Callable[[], str]) -> None:
        """Show the step and the comma-separated parts of a text that fit; ``text`` is called only when it is shown."""
        now = time.monotonic()
        if self.console.quiet or now - self.last < (LINE_SECONDS if self.bar is None else REFRESH_SECONDS):
            return
        self.last = now
        if self.bar is not None:
            room = self._room - 2 * len(str(self.total or step))
            line = fit_to_width(self.console._safe(text()), room)
            self.bar.update(self._task, completed=step, text=line, refresh=True)
        else:
            position = f"step {step:,}{'' if self.total is None else f' of {self.total:,}'}"
            line = text()
            self.console.message(f"{position}: {line}" if line else position)

    def close(self) -> None:
        """Remove the bar; later messages are plain lines."""
        self.console._stop_bar(self.bar)
        self.bar = None


def sparkline(values: Sequence[float], maximum: float, width: int = 16) -> str:
    """Return values from 0 to ``maximum`` as a line of blocks, thinned to ``width`` characters.

    >>> sparkline([8, 7, 4, 1, 1], 8)
    '█▇▄▁▁'
    """
    if len(values) > width:
        values = [values[round(number * (len(values) - 1) / (width - 1))] for number in range(width)]
    levels = [round(value / max(maximum, 1e-9) * len(BLOCKS)) - 1 for value in values]
    return "".join(BLOCKS[max(0, min(len(BLOCKS) - 1, level))] for level in levels)


def fit_to_width(text: str, width: int) -> str:
    """Return text without the last of its comma-separated parts that do not fit.

    >>> fit_to_width("loss 0.5, 1,000 rows/s, 3 s left", 24)
    'loss 0.5, 1,000 rows/s'
    """
    while len(text) > width and ", " in text:
        text = text.rpartition(", ")[0]
    return text


def safe_line(text: str, stream: TextIO) -> str:
    """Return text as one line that cannot control a terminal and that a stream can encode."""
    return encodable(escape_unprintable(text), stream)


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines, by default on standard output."""
    stream = unescaped_stream(sys.stdout if stream is None else stream)
    for line in lines:
        print(safe_line(line, stream), file=stream, flush=True)


def print_json(values: Any, default: Callable[[Any], Any]) -> None:
    """Print values as JSON on standard output; unprintable characters are escapes."""
    stream = unescaped_stream(sys.stdout)
    text = json.dumps(values, indent=1, ensure_ascii=False, default=default)
    if encodable(text, stream) != text:
        text = json.dumps(values, indent=1, default=default)
    print(escape_json(text), file=stream, flush=True)


def print_error(start: str, message: str) -> None:
    """Print an error as one line on standard error; its start is red on a terminal unless NO_COLOR is set."""
    stream = unescaped_stream(sys.stderr)
    use_color = stream.isatty() and "NO_COLOR" not in os.environ
    text = safe_line(join_lines(message), stream)
    print(f"\x1b[31m{start}\x1b[0m {text}" if use_color else f"{start} {text}", file=stream, flush=True)


def join_lines(text: str) -> str:
    """Return the lines of a text as one line."""
    return " ".join(line.strip() for line in text.split("\n") if line.strip())


class EscapedStream:
    """A text stream that escapes what other code prints; it is not a terminal, so libraries write no styles."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)

    def isatty(self) -> bool:
        """Return False."""
        return False

    def write(self, text: str) -> int:
        """Write text; its line breaks stay."""
        self.unescaped.write("\n".join(safe_line(line, self.unescaped) for line in text.split("\n")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        self.write("".join(lines))


def unescaped_stream(stream: TextIO) -> TextIO:
    """Return the stream below an EscapedStream."""
    return getattr(stream, "unescaped", stream)


def escape_all_output() -> None:
    """Escape everything that this process prints: also warnings, log records, tracebacks and other packages."""
    sys.stdout, sys.stderr = EscapedStream(sys.stdout), EscapedStream(sys.stderr)
    # the default would color a traceback on a terminal
    sys.excepthook = lambda *error: print("".join(traceback.format_exception(*error)), end="", file=sys.stderr)
    warnings.showwarning = lambda message, category, *_, **__: print_lines(
        f"lpfs: warning: {join_lines(str(message))} ({category.__name__})", stream=sys.stderr
    )


def encodable(text: str, stream: TextIO) -> str:
    """Return text that a stream can encode: blocks become ASCII, other characters escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(REPLACEMENTS).encode(encoding, "backslashreplace").decode(encoding)
    return text
