"""What training shows: a bar on a terminal, plain lines elsewhere, nothing when quiet.

Where people already look: TensorBoard and MLflow, each by one flag; neither can stop training.

What a run writes down: ``metrics.jsonl``, and any logger of yours; none can stop training.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TextIO, TypeAlias

from lpfs.errors import MissingPackageError
from lpfs.train.callbacks import State

LONGEST = 500  # characters of a parameter of MLflow
HISTOGRAM_KEY = "values"  # key of a record: name -> many numbers at once, which become a histogram


class TensorBoardLogger:
    """The numbers of each record as scalars, its ``values`` as histograms, the settings as hyper-parameters.

    What is after ``step``, of a run that was killed, is dropped.
    """

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any] | None = None) -> None:
        need_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self.settings = dict(settings or {})
        self.last: dict[str, float] = {}
        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def __call__(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record, nested ones by their path."""
        found = flatten_numbers(record["kind"], record)
        for name, value in found:
            self.writer.add_scalar(name, value, record["step"])
        if record["kind"] == "evaluate":
            self.last = dict(found)
        if HISTOGRAM_KEY in record:
            import numpy

            for name, values in record[HISTOGRAM_KEY].items():
                self.writer.add_histogram(f"{record['kind']}/{name}", numpy.asarray(values), record["step"])

    def close(self) -> None:
        """Write the hyper-parameters beside the last evaluation, and what is left."""
        from torch.utils.tensorboard.summary import hparams

        for each in hparams(to_parameters(self.settings), self.last):
            self.writer.file_writer.add_summary(each)
        self.writer.close()


class MLflowLogger:
    """A run of MLflow, inside of the active one: settings as parameters, the numbers of records as metrics."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.mlflow = need_mlflow()
        self.run = self.mlflow.start_run(run_name=name, nested=True).info.run_id
        self.mlflow.log_params(to_parameters(settings or {}))

    def __call__(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, nested ones by their path."""
        found = {metric_name(name): value for name, value in flatten_numbers(record["kind"], record)}
        self.mlflow.log_metrics(found, step=record["step"], run_id=self.run)

    def close(self) -> None:
        """End the run: as failed where an error is on its way."""
        self.mlflow.end_run("FAILED" if sys.exc_info()[0] is not None else "FINISHED")


def need_tensorboard() -> None:
    """Refuse to begin without TensorBoard."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "tensorboard=True needs the tensorboard package; install it with: pip install 'lpfs[tensorboard]'"
        ) from error


def need_mlflow() -> ModuleType:
    """Return MLflow, or refuse to begin without it."""
    try:
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise MissingPackageError(
            "mlflow=True needs the mlflow package; install it with: pip install 'lpfs[mlflow]'"
        ) from error


def flatten_numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers in nested values, each with its path.

    >>> numbers("evaluate", {"step": 1, "tasks": {"click": {"auc": 0.7, "entropy": None}}})
    [('evaluate/tasks/click/auc', 0.7)]
    """
    if isinstance(value, dict):
        inner = [(key, each) for key, each in value.items() if key not in ("step", "kind", HISTOGRAM_KEY)]
        return [found for key, each in inner for found in flatten_numbers(f"{name}/{key}", each)]
    return [(name, value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def to_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as parameters: numbers and words, anything else as text; what is not set is left out.

    >>> plain({"lr": 0.1, "hidden": [8, 4], "clip": None})
    {'lr': 0.1, 'hidden': '[8, 4]'}
    """
    return {
        name: value if isinstance(value, bool | int | float) else str(value)[:LONGEST]
        for name, value in settings.items()
        if value is not None
    }


def metric_name(name: str) -> str:
    """Return a name that MLflow takes, and that is no way out of its folder.

    >>> metric_name("evaluate/tasks/../<b>/auc")
    'evaluate/tasks/__/_b_/auc'
    """
    safe = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)
    return "/".join(part if part.strip(".") else "_" * len(part) for part in safe.split("/") if part)


Logger: TypeAlias = Callable[[dict[str, Any]], None]
TIMING_KEYS = ("rows_per_second",)  # the only values that two equal runs do not share


class JsonLinesLogger:
    """``metrics.jsonl``: one JSON object a line.

    ``position`` puts the lines on the disk and returns how long they are; a run that goes on cuts off what was
    written after its checkpoint, so that every line is there once.
    """

    def __init__(self, path: Path, position: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = path.open("ab")
        if position is not None and self.file.tell() > position:
            self.file.truncate(position)

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a line, and hand it to the system at once; many numbers at once are left to other loggers."""
        line = {key: value for key, value in record.items() if key != HISTOGRAM_KEY}
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def position(self) -> int:
        """Put the lines on the disk and return their length in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class LoggerList:
    """Hands every record to all loggers; one that fails is left out from then on, with a warning."""

    def __init__(self, loggers: Sequence[Logger], lines: JsonLinesLogger | None = None) -> None:
        self.lines = lines
        self.loggers: list[Logger] = [*([] if lines is None else [lines]), *loggers]

    def write(self, record: dict[str, Any]) -> None:
        """Hand out a record."""
        for each in list(self.loggers):
            self._try(each, lambda each=each: each(record))  # type: ignore[misc]

    def position(self) -> int | None:
        """Return how long ``metrics.jsonl`` is; None without one."""
        found: list[int] = []
        if self.lines is not None and self.lines in self.loggers:
            lines = self.lines
            self._try(lines, lambda: found.append(lines.position()))
        return found[0] if found else None

    def close(self) -> None:
        """Close those that can be closed."""
        for each in list(self.loggers):
            close = getattr(each, "close", None)
            if close is not None:
                self._try(each, close)

    def _try(self, logger: Logger, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a logger does wrong, training goes on
            self.loggers.remove(logger)
            name = type(logger).__name__
            warnings.warn(f"logger {name} failed and is left out from now on: {error!r}", stacklevel=3)


EVERY = 5.0  # seconds between plain lines
REFRESH = 0.1  # seconds between two updates of the bar
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_..--==#"  # where a terminal cannot show the first, the second stand for them


class ProgressBar:
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
            self._bar.update(self._task, completed=state.step, text=fit_to_width(text, self._room(state)))
        else:
            where = f"step {state.step:,}{'' if state.steps is None else f' of {state.steps:,}'}"
            self.message(f"{where}: {text}" if text else where)

    def _room(self, state: State) -> int:
        """Return how many characters are left beside the bar and the count of steps."""
        width: int = self._bar.console.width
        return width - len("train   ") - bar_width(width) - 2 * len(str(state.steps or state.step)) - 1

    def describe(self, state: State) -> str:
        """Return loss, AUC, rows a second and the time left in words."""
        told = "" if self.more is None else encodable(self.more(state), self.stream)
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

    def message(self, text: str) -> None:
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
        self.message(f"trained {state.step:,} steps, {state.rows:,} rows: {text}")

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


def fit_to_width(text: str, room: int) -> str:
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


def encodable(text: str, stream: TextIO) -> str:
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
