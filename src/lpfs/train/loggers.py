"""Loggers of a training run: ``metrics.jsonl``, TensorBoard, MLflow and the progress display.

A logger is a function of one record. A logger that fails is dropped with a warning; it never stops training.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TextIO, TypeAlias, TypeVar, cast

import numpy as np

from lpfs._console import Console, StepBar
from lpfs._imports import import_optional
from lpfs.train.callbacks import State

MAX_PARAMETER_LENGTH = 500  # characters of an MLflow parameter
HISTOGRAM_KEY = "values"  # key of a record with arrays by name, which become histograms
TIMING_KEYS = ("rows_per_second",)  # keys of a record that differ between two identical runs

Logger: TypeAlias = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class TensorBoardLogger:
    """Logs the numbers of a record as scalars, its ``values`` as histograms, the settings as hyperparameters.

    Events after ``step``, from a killed run, are purged.
    """

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any] | None = None) -> None:
        need_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self.settings = dict(settings or {})
        self.last: dict[str, float] = {}
        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def __call__(self, record: dict[str, Any]) -> None:
        numbers = flatten_numbers(record["kind"], record)
        for name, value in numbers:
            self.writer.add_scalar(name, value, record["step"])
        if record["kind"] == "evaluate":
            self.last = dict(numbers)
        for name, values in record.get(HISTOGRAM_KEY, {}).items():
            self.writer.add_histogram(f"{record['kind']}/{name}", np.asarray(values), record["step"])

    def close(self) -> None:
        """Write the hyperparameters with the last evaluation, and close the file."""
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(to_parameters(self.settings), self.last):
            self.writer.file_writer.add_summary(summary)
        self.writer.close()


class MLflowLogger:
    """Logs settings as parameters and numbers as metrics to an MLflow run, a child of the active one."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.mlflow = need_mlflow()
        self.run = self.mlflow.start_run(run_name=name, nested=True).info.run_id
        self.mlflow.log_params(to_parameters(settings or {}))

    def __call__(self, record: dict[str, Any]) -> None:
        metrics = {metric_name(name): value for name, value in flatten_numbers(record["kind"], record)}
        self.mlflow.log_metrics(metrics, step=record["step"], run_id=self.run)

    def close(self) -> None:
        """End the run, as failed if an exception is being handled."""
        self.mlflow.end_run("FAILED" if sys.exc_info()[0] is not None else "FINISHED")


def need_tensorboard() -> None:
    """Raise MissingPackageError if TensorBoard is not installed."""
    import_optional("tensorboard", "tensorboard", "tensorboard=True")


def need_mlflow() -> ModuleType:
    """Return the mlflow module; raise MissingPackageError if it is not installed."""
    return cast(ModuleType, import_optional("mlflow", "mlflow", "mlflow=True"))


def flatten_numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers in a nested value with their paths.

    >>> flatten_numbers("evaluate", {"step": 1, "tasks": {"click": {"auc": 0.7, "entropy": None}}})
    [('evaluate/tasks/click/auc', 0.7)]
    """
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if key not in ("step", "kind", HISTOGRAM_KEY)]
        return [number for key, item in items for number in flatten_numbers(f"{name}/{key}", item)]
    return [(name, value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def to_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as logger parameters: numbers and bools unchanged, others as text, None left out.

    >>> to_parameters({"lr": 0.1, "hidden": [8, 4], "clip": None})
    {'lr': 0.1, 'hidden': '[8, 4]'}
    """
    return {
        name: value if isinstance(value, bool | int | float) else str(value)[:MAX_PARAMETER_LENGTH]
        for name, value in settings.items()
        if value is not None
    }


def metric_name(name: str) -> str:
    """Return a valid MLflow name, without path components such as ``..``.

    >>> metric_name("evaluate/tasks/../<b>/auc")
    'evaluate/tasks/__/_b_/auc'
    """
    safe = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)
    return "/".join(part if part.strip(".") else "_" * len(part) for part in safe.split("/") if part)


class JsonLinesLogger:
    """Writes ``metrics.jsonl``, one JSON object per line, without histograms.

    ``position`` is the length of the file at a checkpoint; a resumed run truncates the file to it, so that no
    record is duplicated.
    """

    def __init__(self, path: Path, position: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = path.open("ab")
        if position is not None and self.file.tell() > position:
            self.file.truncate(position)

    def __call__(self, record: dict[str, Any]) -> None:
        line = {key: value for key, value in record.items() if key != HISTOGRAM_KEY}
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def position(self) -> int:
        """Flush the file to disk and return its length in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class LoggerList:
    """Passes every record to all loggers; a logger that fails is removed with a warning."""

    def __init__(self, loggers: Sequence[Logger], lines: JsonLinesLogger | None = None) -> None:
        self.lines = lines
        self.loggers: list[Logger] = [*([] if lines is None else [lines]), *loggers]

    def write(self, record: dict[str, Any]) -> None:
        """Pass a record to all loggers."""
        for logger in list(self.loggers):
            self._try(logger, partial(logger, record))

    def position(self) -> int | None:
        """Return the length of ``metrics.jsonl``; None without one."""
        if self.lines is None or self.lines not in self.loggers:
            return None
        return self._try(self.lines, self.lines.position)

    def close(self) -> None:
        """Close the loggers that have a ``close`` method."""
        for logger in list(self.loggers):
            if hasattr(logger, "close"):
                self._try(logger, logger.close)

    def _try(self, logger: Logger, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # an error of a logger must not stop training
            self.loggers.remove(logger)
            warnings.warn(f"logger {type(logger).__name__} failed and is no longer used: {error!r}", stacklevel=3)
            return None


class ProgressBar:
    """Shows loss, AUC, rows per second and the remaining time: a bar on a terminal, else plain lines.

    ``extra_text`` returns additional text, such as the number of non-zero gates.
    """

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, extra_text: Callable[[State], str] | None = None
    ) -> None:
        self.console = Console(quiet=quiet, stream=stream)
        self.extra_text = extra_text
        self.loss: float | None = None
        self._bar: StepBar | None = None

    def start(self, state: State) -> None:
        """Start the clock, and the bar on a terminal."""
        self.started = self.first = (state.step, state.rows, time.monotonic())  # at the start, after the first step
        self._bar = self.console.step_bar(state.steps, completed=state.step)

    def update(self, state: State) -> None:
        """Update the display, if enough time has passed."""
        if self.first is self.started:  # the first step compiles and fills caches, so it is not timed
            self.first = (state.step, state.rows, time.monotonic())
        if self._bar is not None:
            self._bar.update(state.step, lambda: self.describe(state))

    def describe(self, state: State) -> str:
        """Return loss, AUC, rows per second and the remaining time as text."""
        parts = ["" if self.extra_text is None else self.extra_text(state)]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.5f}")
        if state.metrics is not None:
            parts.append("auc -" if state.metrics.auc is None else f"auc {state.metrics.auc:.5f}")
        done = state.step - self.first[0]
        if done:
            parts.append(f"{self.rate(state):,.0f} rows/s")
            if state.steps is not None:
                left = (time.monotonic() - self.first[2]) / done * (state.steps - state.step)
                parts.append(f"{left:,.0f} s left")
        return ", ".join(filter(None, parts))

    def rate(self, state: State) -> float:
        """Return rows per second since the first step; those of the first step if it is the only one."""
        _, rows, since = self.first if state.step > self.first[0] else self.started
        return (state.rows - rows) / max(time.monotonic() - since, 1e-9)

    def end(self, state: State) -> None:
        """Remove the bar and print a summary."""
        text = self.describe(state)
        self.close()
        self.console.message(f"trained {state.step:,} steps, {state.rows:,} rows" + f": {text}" * bool(text))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
