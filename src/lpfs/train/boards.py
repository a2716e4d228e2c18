"""Where people already look: TensorBoard and MLflow, each by one flag; neither can stop training."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lpfs.errors import MissingPackageError

LONGEST = 500  # characters of a parameter of MLflow
VALUES = "values"  # key of a record: name -> many numbers at once, which become a histogram


class TensorBoard:
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
        found = numbers(record["kind"], record)
        for name, value in found:
            self.writer.add_scalar(name, value, record["step"])
        if record["kind"] == "evaluate":
            self.last = dict(found)
        if VALUES in record:
            import numpy

            for name, values in record[VALUES].items():
                self.writer.add_histogram(f"{record['kind']}/{name}", numpy.asarray(values), record["step"])

    def close(self) -> None:
        """Write the hyper-parameters beside the last evaluation, and what is left."""
        from torch.utils.tensorboard.summary import hparams

        for each in hparams(plain(self.settings), self.last):
            self.writer.file_writer.add_summary(each)
        self.writer.close()


class MLflow:
    """A run of MLflow, inside of the active one: settings as parameters, the numbers of records as metrics."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.mlflow = need_mlflow()
        self.run = self.mlflow.start_run(run_name=name, nested=True).info.run_id
        self.mlflow.log_params(plain(settings or {}))

    def __call__(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, nested ones by their path."""
        found = {metric_name(name): value for name, value in numbers(record["kind"], record)}
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


def numbers(name: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers in nested values, each with its path.

    >>> numbers("evaluate", {"step": 1, "tasks": {"click": {"auc": 0.7, "entropy": None}}})
    [('evaluate/tasks/click/auc', 0.7)]
    """
    if isinstance(value, dict):
        inner = [(key, each) for key, each in value.items() if key not in ("step", "kind", VALUES)]
        return [found for key, each in inner for found in numbers(f"{name}/{key}", each)]
    return [(name, value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
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
