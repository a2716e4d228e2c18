"""A run of ``select`` as a run of MLflow: its settings, what it is worth, the files it leaves, the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lpfs.pipeline.settings import CONFIG, Settings
from lpfs.train.boards import metric_name, need_mlflow, numbers, plain
from lpfs.train.distributed.group import current

FILES = (CONFIG, "selection.json", "kept_fields.txt", "history.parquet", "report.html")
WORTH = {"metrics": "test", "validation": "validation", "savings": "savings"}


@contextmanager
def tracked(wanted: Settings, folder: Path) -> Iterator[None]:
    """Within this block trainings are logged inside of one run of MLflow, where that is wanted.

    The run is complete without it: when something goes wrong at the end, it is told and no more.
    """
    if not wanted.mlflow or not current().leads:
        yield
        return
    mlflow = need_mlflow()
    with mlflow.start_run(run_name=folder.resolve().name, nested=True):
        mlflow.log_params(plain(wanted.to_json()))
        yield
        try:
            log_run(mlflow, folder)
        except Exception as error:
            warnings.warn(f"the run is complete, but MLflow did not take it: {error}", stacklevel=3)


def log_run(mlflow: ModuleType, folder: Path) -> None:
    """Log what a run is worth and what it left."""
    said = json.loads((folder / "selection.json").read_text("utf-8"))
    found = [each for key, name in WORTH.items() for each in numbers(name, said.get(key, {}))]
    found += [("fields/kept", len(said["kept"])), ("fields/dropped", len(said["dropped"]))]
    mlflow.log_metrics({metric_name(name): float(value) for name, value in found})
    for name in FILES:
        if (folder / name).exists():
            mlflow.log_artifact(str(folder / name))
    mlflow.log_artifacts(str(folder / "model"), "model")
