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

FILES_BEFORE_TRAINING = {CONFIG_FILE, "data"}  # a run that failed its checks leaves these and can be started again
STASH_DIR = ".replaced"  # of an older run, until the new one has passed its checks
# Files and directories of a run, besides numbered ones such as search-3; only these are ever removed.
RUN_FILES = (
    *("config.json", "data", "pretrain", "search", "all_fields", "retrained", "hot_start", "model"),
    *("early", "train", "all"),
    *("selection.json", "kept_fields.txt", "history.parquet", "report.html", "log.txt"),
)
NUMBERED_DIR = re.compile(r"(pretrain|search)-\d+")
LOGGED_FILES = (CONFIG_FILE, "selection.json", "kept_fields.txt", "history.parquet", "report.html")
METRIC_GROUPS = {"metrics": "test", "validation": "validation", "savings": "savings"}  # of a record: MLflow name


@contextmanager
def starting_run(
    run_dir: Path, settings: Settings, *, resume: bool, replace: bool, inputs: Sequence[str | Path] = ()
) -> Iterator[None]:
    """Save the settings in a directory that is new, empty or a run; if the block fails, restore a replaced run.

    A run is resumed only with the same settings. ``inputs`` are paths that the run reads besides its source; they must
    not be inside a replaced run.
    """
    resume = resume and (run_dir / CONFIG_FILE).exists()
    if resume:
        _check_same_settings(run_dir, settings)
    elif run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        if not is_run(run_dir):
            raise InputError(f"{run_dir} is not empty and is not a run; choose another directory")
        visible = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
        if replace:
            for path in (*settings.source, *inputs):
                if Path(path).resolve().is_relative_to(run_dir.resolve()):
                    raise InputError(f"{path} is inside {run_dir}, which would be replaced; choose another directory")
            _stash(run_dir)
        elif not visible <= FILES_BEFORE_TRAINING:
            raise InputError(f"{run_dir} contains a run; continue it with --resume, or replace it with --replace")
    if not resume:
        write_json_atomic(run_dir / CONFIG_FILE, {"format": FORMAT, **settings.to_json()})
    try:
        yield
    except BaseException:
        _restore(run_dir)
        raise
    shutil.rmtree(run_dir / STASH_DIR, ignore_errors=True)


def _check_same_settings(run_dir: Path, settings: Settings) -> None:
    saved = Settings.load(run_dir).to_json()
    for name, value in json.loads(json.dumps(settings.to_json())).items():
        if saved[name] != value:
            raise InputError(
                f"the run in {run_dir} was started with {name}={saved[name]!r} and cannot be resumed with "
                f"{value!r}; use the same settings, or another directory"
            )


def is_run(run_dir: Path) -> bool:
    """Return whether a directory is a run, by its configuration."""
    try:
        values = json.loads((run_dir / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def _run_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.name in RUN_FILES or NUMBERED_DIR.fullmatch(path.name)]


def _stash(run_dir: Path) -> None:
    """Move the files of an older run into the stash; other files stay."""
    shutil.rmtree(run_dir / STASH_DIR, ignore_errors=True)
    (run_dir / STASH_DIR).mkdir()
    for path in _run_files(run_dir):
        path.rename(run_dir / STASH_DIR / path.name)


def _restore(run_dir: Path) -> None:
    """Replace the files of the new run by those of the stash, if there is one."""
    if (run_dir / STASH_DIR).is_dir():
        for path in _run_files(run_dir):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in list((run_dir / STASH_DIR).iterdir()):
            path.rename(run_dir / path.name)
        (run_dir / STASH_DIR).rmdir()


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
