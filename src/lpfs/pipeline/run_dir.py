"""The directory of a run: locked, started once, resumed only with the same settings. The MLflow run of ``select``."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lpfs._fileio import is_run, read_json, remove_temporary_files, remove_tree, write_json_atomic
from lpfs._locks import FileLock
from lpfs.errors import InputError, LockedError
from lpfs.pipeline.settings import CONFIG_FILE, FORMAT, Settings
from lpfs.train.distributed.group import current_group
from lpfs.train.loggers import flatten_numbers, metric_name, need_mlflow, to_parameters

FILES_BEFORE_TRAINING = {CONFIG_FILE, "data"}  # a run that failed its checks leaves these and can be started again
LOCK_FILE = ".lock"
# The older run while it is replaced. Only renames lead from one state to the next, so a killed process leaves one of:
MOVING_DIR = ".moving"  # a part of its files; the others are beside it, and no file is new
STASH_DIR = ".replaced"  # all of its files; those beside it are new and incomplete
REMOVED_DIR = ".removed"  # files that are no longer needed: the new run has passed its checks
# Files and directories of a run, besides those such as search-3 and search-fleet; only these are ever removed.
RUN_FILES = (
    *("config.json", "data", "pretrain", "search", "all_fields", "curve", "retrained", "hot_start", "model"),
    *("early", "train", "all"),
    *("selection.json", "kept_fields.txt", "history.parquet", "report.html", "log.txt"),
)
NUMBERED_DIR = re.compile(r"(pretrain|search|try)-\d+|(pretrain|search)-fleet")
LOGGED_FILES = (CONFIG_FILE, "selection.json", "kept_fields.txt", "history.parquet", "report.html")
METRIC_GROUPS = {"metrics": "test", "validation": "validation", "savings": "savings"}  # of a record: MLflow name


@contextmanager
def locked_run(run_dir: Path, message: Callable[[str], None]) -> Iterator[None]:
    """Lock a run directory while the block runs, and restore a run whose replacement was killed.

    Raise :class:`LockedError` if another process writes to the directory.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir} exists and is not a directory; choose another path")
    with FileLock(run_dir / LOCK_FILE, run_dir):
        remove_temporary_files(run_dir)
        if _restore(run_dir):
            message(f"{run_dir}: a command was killed while it replaced this run; the older run is restored")
        yield


def recover_run(run_dir: Path, message: Callable[[str], None]) -> None:
    """Restore a run whose replacement was killed, unless another process is replacing it now."""
    if _is_directory(run_dir / MOVING_DIR) or _is_directory(run_dir / STASH_DIR):
        with suppress(LockedError), locked_run(run_dir, message):
            pass


def is_empty(run_dir: Path) -> bool:
    """Return whether a directory does not exist or contains nothing besides its lock."""
    return not run_dir.exists() or (run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= {LOCK_FILE})


@contextmanager
def starting_run(
    run_dir: Path, settings: Settings, *, resume: bool, replace: bool, inputs: Sequence[str | Path] = ()
) -> Iterator[None]:
    """Save the settings in a directory that is new, empty or a run; if the block fails, restore a replaced run.

    A run is resumed only with the same settings, and on as many CPU threads, because the last bits depend on them.
    ``inputs`` are paths that the run reads besides its source; they must not be inside a replaced run.
    """
    resume, is_replaced = resume and (run_dir / CONFIG_FILE).exists(), False
    if resume:
        _check_same_settings(run_dir, settings)
        torch.set_num_threads(
            read_json(run_dir / CONFIG_FILE, {"threads?": int}).get("threads", torch.get_num_threads())
        )
    elif not is_empty(run_dir):
        if not is_run(run_dir):
            raise InputError(f"{run_dir} is not empty and is not a run; choose another directory")
        visible = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
        is_replaced = replace
        if not replace and not visible <= FILES_BEFORE_TRAINING:
            raise InputError(f"{run_dir} contains a run; continue it with --resume, or replace it with --replace")
    with replacing_run(run_dir, (*settings.source, *inputs)) if is_replaced else nullcontext():
        if not resume:
            values = {"format": FORMAT, **settings.to_json(), "threads": torch.get_num_threads()}
            write_json_atomic(run_dir / CONFIG_FILE, values)
        yield


@contextmanager
def replacing_run(run_dir: Path, inputs: Sequence[str | Path]) -> Iterator[None]:
    """Remove the files of an older run when the block ends; restore them if it fails or is killed.

    Raise InputError if one of ``inputs`` is inside the directory. Other files in it stay.
    """
    for path in inputs:
        if Path(path).resolve().is_relative_to(run_dir.resolve()):
            raise InputError(f"{path} is inside {run_dir}, which would be replaced; choose another directory")
    try:
        (run_dir / MOVING_DIR).mkdir()
        for file in _run_files(run_dir):
            file.rename(run_dir / MOVING_DIR / file.name)
        (run_dir / MOVING_DIR).rename(run_dir / STASH_DIR)
        yield
    except BaseException:
        _restore(run_dir)
        raise
    (run_dir / STASH_DIR).rename(run_dir / REMOVED_DIR)
    remove_tree(run_dir / REMOVED_DIR)


def _restore(run_dir: Path) -> bool:
    """Restore an older run that was not replaced completely; return whether there was one."""
    moving, stash = run_dir / MOVING_DIR, run_dir / STASH_DIR
    remove_tree(run_dir / REMOVED_DIR)
    if _is_directory(stash):
        for path in (*_run_files(run_dir), *run_dir.glob(".data.lpfs-*")):  # the new run, and its data in preparation
            remove_tree(path)
        stash.rename(moving)
    if not _is_directory(moving):
        return False
    for path in moving.iterdir():
        path.rename(run_dir / path.name)
    moving.rmdir()
    return True


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check_same_settings(run_dir: Path, settings: Settings) -> None:
    saved = Settings.load(run_dir).to_json()
    for name, value in json.loads(json.dumps(settings.to_json())).items():
        if saved[name] != value:
            raise InputError(
                f"the run in {run_dir} was started with {name}={saved[name]!r} and cannot be resumed with "
                f"{value!r}; use the same settings, or another directory"
            )


def _run_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.name in RUN_FILES or NUMBERED_DIR.fullmatch(path.name)]


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
