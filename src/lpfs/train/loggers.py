"""What training shows: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from lpfs.train.callbacks import State

EVERY = 5.0  # seconds between plain lines
REFRESH = 0.1  # seconds between two updates of the bar
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_..--==#"  # where a terminal cannot show the first, the second stand for them


class Progress:
    """Loss, AUC, rows a second and the time left, on standard error unless told otherwise.

    ``more`` says what else there is to tell, as how many gates are alive.
    """

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, more: Callable[[State], str] | None = None
    ) -> None:
        self.quiet, self.more = quiet, more
        self.stream = stream if stream is not None else sys.stderr
        self.loss: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def begin(self, state: State) -> None:
        """Start the clock, and the bar where there is a terminal."""
        self.last = time.monotonic()
        self.began = self.first = (state.step, state.rows, self.last)
        self._warm = False
        if not self.quiet and self.stream.isatty():
            try:
                self._bar = make_bar(self.stream)
            except ImportError:
                return
            self._bar.start()
            self._task = self._bar.add_task("train", total=state.steps, completed=state.step, text="")

    def update(self, state: State) -> None:
        """Show where training stands, now and then."""
        now = time.monotonic()
        if not self._warm:  # the first step compiles and fills caches: it says nothing of those to come
            self._warm, self.first = True, (state.step, state.rows, now)
        if self.quiet or now - self.last < (EVERY if self._bar is None else REFRESH):
            return
        self.last = now
        text = self.describe(state)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.step, text=fitting(text, self._room(state)))
        else:
            where = f"step {state.step:,}{'' if state.steps is None else f' of {state.steps:,}'}"
            self.say(f"{where}: {text}" if text else where)

    def _room(self, state: State) -> int:
        """Return how many characters are left beside the bar and the count of steps."""
        width: int = self._bar.console.width
        return width - len("train   ") - bar_width(width) - 2 * len(str(state.steps or state.step)) - 1

    def describe(self, state: State) -> str:
        """Return loss, AUC, rows a second and the time left in words."""
        told = "" if self.more is None else shown(self.more(state), self.stream)
        parts = [told] if told else []
        parts += [] if self.loss is None else [f"loss {self.loss:.5f}"]
        if state.metrics is not None:
            parts.append("auc -" if state.metrics.auc is None else f"auc {state.metrics.auc:.5f}")
        done = state.step - self.first[0]
        if done:
            parts.append(f"{self.rate(state):,.0f} rows/s")
            if state.steps is not None:
                left = (time.monotonic() - self.first[2]) / done * (state.steps - state.step)
                parts.append(f"{left:,.0f} s left")
        return ", ".join(parts)

    def rate(self, state: State) -> float:
        """Return rows a second since the first step; of that step where there was no other."""
        _, rows, since = self.first if state.step > self.first[0] else self.began
        return (state.rows - rows) / max(time.monotonic() - since, 1e-9)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def end(self, state: State) -> None:
        """Take the bar away and say how it went."""
        text = self.describe(state)
        self.close()
        self.say(f"trained {state.step:,} steps, {state.rows:,} rows: {text}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def sparkline(values: Sequence[float], most: float, width: int = 16) -> str:
    """Return the course of some values from 0 to ``most`` as a line of blocks, thinned to its width.

    >>> sparkline([8, 7, 4, 1, 1], 8)
    '█▇▄▁▁'
    """
    if len(values) > width:
        values = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)]
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[max(0, min(top, round(value / max(most, 1e-9) * len(BLOCKS)) - 1))] for value in values)


def fitting(text: str, room: int) -> str:
    """Return text without its last parts where there is no room for them.

    >>> fitting("loss 0.5, 1,000 rows/s, 3 s left", 24)
    'loss 0.5, 1,000 rows/s'
    """
    while len(text) > room and ", " in text:
        text = text.rpartition(", ")[0]
    return text


def bar_width(width: int) -> int:
    """Return how wide a bar is on a terminal of this width."""
    return 40 if width >= 140 else 12


def shown(text: str, stream: TextIO) -> str:
    """Return text as a stream can show it."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(str.maketrans(BLOCKS, PLAIN))
    return text


def make_bar(stream: TextIO) -> Any:
    """Return a rich bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(file=stream)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width(console.width)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    return Bar(*columns, console=console)
