"""The directory of a run: started once, resumed only with the same settings. The MLflow run of ``select``."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lpfs._fileio import write_json_atomic
from lpfs.errors import InputError
from lpfs.pipeline.settings import CONFIG_FILE, FORMAT, Settings
from lpfs.train.distributed.group import current_group
from lpfs.train.loggers import flatten_numbers, metric_name, need_mlflow, to_parameters

FILES_BEFORE_TRAINING = (CONFIG_FILE, "data")  # a run that failed its checks leaves these and can be started again
STASH_DIR = ".replaced"
# Files and directories of a run, besides numbered ones such as search-3; only these are ever removed.
RUN_FILES = (
    *("config.json", "data", "pretrain", "search", "all_fields", "retrained", "hot_start", "model"),
    *("early", "train", "all"),
    *("selection.json", "kept_fields.txt", "history.parquet", "report.html", "log.txt"),
)
NUMBERED_DIR = re.compile(r"(pretrain|search)-\d+")
LOGGED_FILES = (CONFIG_FILE, "selection.json", "kept_fields.txt", "history.parquet", "report.html")
METRIC_GROUPS = {"metrics": "test", "validation": "validation", "savings": "savings"}  # of a record: MLflow name


class PreviousRun:
    """An older run in the same directory, stashed until the new run has passed its checks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.stash_dir = run_dir, run_dir / STASH_DIR

    def stash(self) -> None:
        """Move the files of the run into the stash; other files stay."""
        shutil.rmtree(self.stash_dir, ignore_errors=True)
        self.stash_dir.mkdir()
        for path in _run_files(self.run_dir):
            path.rename(self.stash_dir / path.name)

    def restore(self) -> None:
        """Remove the files of the new run and move the old ones back."""
        if self.stash_dir.is_dir():
            for path in _run_files(self.run_dir):
                _remove(path)
            for path in list(self.stash_dir.iterdir()):
                path.rename(self.run_dir / path.name)
            self.stash_dir.rmdir()

    def delete(self) -> None:
        """Delete the stash."""
        shutil.rmtree(self.stash_dir, ignore_errors=True)


@contextmanager
def starting_run(
    run_dir: Path, settings: Settings, *, resume: bool, replace: bool, inputs: Sequence[str | Path] = ()
) -> Iterator[None]:
    """Open a run directory; if the block raises an error, restore the older run that was to be replaced.

    Args:
        run_dir: directory of the run.
        settings: saved there; a run is resumed only with the same settings.
        resume: continue the run in the directory.
        replace: replace an older run.
        inputs: paths that the run reads besides ``settings.source``; they must not be inside a replaced run.
    """
    previous = open_run_dir(run_dir, settings, resume=resume, replace=replace, inputs=inputs)
    try:
        yield
    except BaseException:
        previous.restore()
        raise
    previous.delete()


def open_run_dir(
    run_dir: Path, settings: Settings, *, resume: bool, replace: bool, inputs: Sequence[str | Path] = ()
) -> PreviousRun:
    """Save the settings in a directory that is new, empty or a run; return the run that was there, stashed."""
    config, previous = run_dir / CONFIG_FILE, PreviousRun(run_dir)
    if config.exists() and resume:
        saved = Settings.load(config).to_json()
        for name, value in json.loads(json.dumps(settings.to_json())).items():
            if saved[name] != value:
                raise InputError(
                    f"the run in {run_dir} was started with {name}={saved[name]!r} and cannot be resumed with "
                    f"{value!r}; use the same settings, or another directory"
                )
        return previous
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        if not is_run(run_dir):
            raise InputError(f"{run_dir} is not empty and is not a run; choose another directory")
        visible = [path.name for path in run_dir.iterdir() if not path.name.startswith(".")]
        if replace:
            for path in (*settings.source, *inputs):
                if Path(path).resolve().is_relative_to(run_dir.resolve()):
                    raise InputError(f"{path} is inside {run_dir}, which would be replaced; choose another directory")
            previous.stash()
        elif any(name not in FILES_BEFORE_TRAINING for name in visible):
            raise InputError(f"{run_dir} contains a run; continue it with --resume, or replace it with --replace")
    write_json_atomic(config, {"format": FORMAT, **settings.to_json()})
    return previous


def is_run(run_dir: Path) -> bool:
    """Return whether a directory is a run, by its configuration."""
    try:
        values = json.loads((run_dir / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def _run_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.name in RUN_FILES or NUMBERED_DIR.fullmatch(path.name)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def mlflow_run(settings: Settings, run_dir: Path) -> Iterator[ModuleType | None]:
    """Start an MLflow run while the block runs and yield mlflow; yield None if it is off, or on other ranks."""
    if not settings.mlflow or not current_group().is_leader:
        yield None
        return
    mlflow = need_mlflow()
    with mlflow.start_run(run_name=run_dir.resolve().name, nested=True):
        mlflow.log_params(to_parameters(settings.to_json()))
        yield mlflow


def log_run(mlflow: ModuleType, run_dir: Path, record: Mapping[str, Any]) -> None:
    """Log the metrics, the files and the model of a finished run; an error becomes a warning."""
    try:
        values = [value for key, name in METRIC_GROUPS.items() for value in flatten_numbers(name, record.get(key, {}))]
        values += [("fields/kept", len(record["kept"])), ("fields/dropped", len(record["dropped"]))]
        mlflow.log_metrics({metric_name(name): float(value) for name, value in values})
        for file in LOGGED_FILES:
            if (run_dir / file).exists():
                mlflow.log_artifact(str(run_dir / file))
        mlflow.log_artifacts(str(run_dir / "model"), "model")
    except Exception as error:
        warnings.warn(f"the run is complete, but logging it to MLflow failed: {error}", stacklevel=3)
