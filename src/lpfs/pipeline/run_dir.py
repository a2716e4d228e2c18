"""The folder of a run: begun once, gone on with only under the same settings.

A run of ``select`` as a run of MLflow: its settings, what it is worth, the files it leaves, the model.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lpfs.errors import InputError
from lpfs.pipeline.settings import CONFIG, FORMAT, Settings
from lpfs.train.distributed.group import current_group
from lpfs.train.loggers import flatten_numbers, metric_name, need_mlflow, to_parameters

ALLOWED_BEFORE = (
    CONFIG,
    "data",
)  # what is there before anything is trained: a run that was refused can be begun again
STASH_DIR = ".replaced"
# what a run puts into its folder, beside numbered ones such as search-3: only this is ever removed
RUN_FILES = (
    *("config.json", "data", "pretrain", "search", "all_fields", "retrained", "hot_start", "model"),
    *("early", "train", "all"),
    *("selection.json", "kept_fields.txt", "history.parquet", "report.html", "log.txt"),
)


def open_run_dir(
    folder: Path, wanted: Settings, *, resume: bool, replace: bool, sources: Sequence[str | Path] = ()
) -> PreviousRun:
    """Save the settings in a folder, new or ours; refuse one that holds something else.

    An older run that is replaced is put aside: ``forget`` it once the new one is known to begin, else ``restore``.
    """
    config = folder / CONFIG
    if config.exists() and resume:
        saved = Settings.load(config).to_json()
        for name, value in json.loads(json.dumps(wanted.to_json())).items():
            if saved[name] != value:
                raise InputError(
                    f"the run in {folder} was begun with {name}={saved[name]!r} and cannot go on with {value!r}; "
                    "use the same settings, or another folder"
                )
        return PreviousRun(folder)
    old = PreviousRun(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not is_run(folder):
            raise InputError(f"{folder} is not empty and holds no run; choose another folder")
        if replace:
            inside = [each for each in sources if Path(each).resolve().is_relative_to(folder.resolve())]
            if inside:
                raise InputError(f"{inside[0]} is inside {folder}, which is to be replaced; choose another folder")
            old.put_aside()
        elif any(each.name not in ALLOWED_BEFORE and not each.name.startswith(".") for each in folder.iterdir()):
            raise InputError(
                f"{folder} holds a run already; go on with --resume, or put a new one there with --replace"
            )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **wanted.to_json()}, indent=1, ensure_ascii=False) + "\n"
    aside = folder / (CONFIG + ".new")
    aside.write_text(text, "utf-8")
    aside.replace(config)
    return old


@contextmanager
def starting_run(
    folder: Path, wanted: Settings, *, resume: bool, replace: bool, sources: Sequence[str | Path] = ()
) -> Iterator[None]:
    """Within this block a run begins: if it fails, an older one that it should replace is put back."""
    old = open_run_dir(folder, wanted, resume=resume, replace=replace, sources=sources)
    try:
        yield
    except BaseException:
        old.restore()
        raise
    old.forget()


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run: its configuration says so."""
    try:
        values = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


class PreviousRun:
    """An older run in the same folder, put aside until the new one is known to begin."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.aside = folder, folder / STASH_DIR

    def put_aside(self) -> None:
        """Move what a run leaves out of the way; anything else stays where it is."""
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir()
        for each in _ours(self.folder):
            each.rename(self.aside / each.name)

    def restore(self) -> None:
        """Take away what the new run has made, and put the old one back."""
        if self.aside.is_dir():
            for each in _ours(self.folder):
                _remove(each)
            for each in list(self.aside.iterdir()):
                each.rename(self.folder / each.name)
            self.aside.rmdir()

    def forget(self) -> None:
        """Delete the old run."""
        shutil.rmtree(self.aside, ignore_errors=True)


def _ours(folder: Path) -> list[Path]:
    numbered = re.compile(r"(pretrain|search)-\d+")
    return [each for each in folder.iterdir() if each.name in RUN_FILES or numbered.fullmatch(each.name)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


FILES = (CONFIG, "selection.json", "kept_fields.txt", "history.parquet", "report.html")
METRIC_GROUPS = {"metrics": "test", "validation": "validation", "savings": "savings"}


@contextmanager
def mlflow_run(wanted: Settings, folder: Path) -> Iterator[None]:
    """Within this block trainings are logged inside of one run of MLflow, where that is wanted.

    The run is complete without it: when something goes wrong at the end, it is told and no more.
    """
    if not wanted.mlflow or not current_group().is_leader:
        yield
        return
    mlflow = need_mlflow()
    with mlflow.start_run(run_name=folder.resolve().name, nested=True):
        mlflow.log_params(to_parameters(wanted.to_json()))
        yield
        try:
            log_run(mlflow, folder)
        except Exception as error:
            warnings.warn(f"the run is complete, but MLflow did not take it: {error}", stacklevel=3)


def log_run(mlflow: ModuleType, folder: Path) -> None:
    """Log what a run is worth and what it left."""
    said = json.loads((folder / "selection.json").read_text("utf-8"))
    found = [each for key, name in METRIC_GROUPS.items() for each in flatten_numbers(name, said.get(key, {}))]
    found += [("fields/kept", len(said["kept"])), ("fields/dropped", len(said["dropped"]))]
    mlflow.log_metrics({metric_name(name): float(value) for name, value in found})
    for name in FILES:
        if (folder / name).exists():
            mlflow.log_artifact(str(folder / name))
    mlflow.log_artifacts(str(folder / "model"), "model")
