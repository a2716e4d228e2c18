"""The folder of a comparison: begun once, gone on with only under the same settings.

Store: the folder of a comparison; every file in it is there whole or not at all.

::

    config.json, plan.json     what was asked for
    data/                      the Dataset, where the source was a log
    seeds/0/pretrain/          the model that every search of a seed begins with, and cost.json
    searches/                  what each search found; a ranking once for all K
    trained/                   a set of fields trained from scratch: JSON, and its scores on the test rows
    labels.npy                 the test rows' labels
    results/                   one JSON a method, K and seed
    claims/, work/             what is being done just now

The truth of a simulated log, where there is one: which fields matter, which are copies, pairs or noise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.compare.locks import LockedError, WorkLocks
from lpfs.compare.plan import ComparisonPlan, RunSpec, file_safe_name
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError, LpfsError
from lpfs.pipeline.settings import CONFIG, Settings
from lpfs.pipeline.tell import Console

Record = dict[str, Any]
ScoreArray = npt.NDArray[np.float32]


class ResultStore:
    """Reads and writes the files of a comparison."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels = folder / "labels.npy"

    def seed(self, seed: int) -> Path:
        """Return the folder of a seed's pretrained model."""
        return self.folder / "seeds" / str(seed)

    def work(self, name: str) -> Path:
        """Return the folder of something that is being trained."""
        return self.folder / "work" / name

    def result(self, job: RunSpec) -> Path:
        """Return the file of a result."""
        return self.folder / "results" / f"{job.name}.json"

    def search(self, method: str, options: Mapping[str, Any], seed: int, keep: int | None) -> Path:
        """Return the file of a search; without ``keep``, of a ranking that serves every K."""
        size = "" if keep is None else f"-k{keep}"
        return self.folder / "searches" / f"{search_name(method, options)}-s{seed}{size}.json"

    def trained(self, fields: Iterable[str], seed: int) -> Path:
        """Return the file of a set of fields trained from scratch; its scores are beside it as ``.npy``."""
        return self.folder / "trained" / f"{digest(sorted(fields))}-s{seed}.json"

    def results(self) -> list[Record]:
        """Return every result there is."""
        found = [read(path) for path in sorted((self.folder / "results").glob("*.json"))]
        return [each for each in found if each is not None]


def search_name(method: str, options: Mapping[str, Any]) -> str:
    """Return what the files of a method's search are called; settings other than its defaults are marked."""
    return file_safe_name(method) + (f"-{digest(dict(options))[:8]}" if options else "")


def digest(values: Any) -> str:
    """Return a short name that no other values have."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read(path: Path) -> Record | None:
    """Return what a JSON file holds; None where it is not there."""
    try:
        found: Record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    return found


def put_text(path: Path, text: str) -> None:
    """Write a file aside, under a name of its own, then put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def put(path: Path, values: Record) -> None:
    """Write JSON; a number that is none is an error."""
    put_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False, default=_plain) + "\n")


def put_scores(path: Path, values: ScoreArray) -> None:
    """Write an array of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with aside.open("wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


TRUTH_FILE = "truth.json"
TRUE_KINDS = ("main", "pair")  # the click depends on these
# in the order of the tables
KINDS = {
    "main": "true, by itself",
    "pair": "true, only with its partner",
    "copy": "noisy copy of a true one",
    "correlated": "shares a cause with a true one",
    "noise": "noise",
}


def copy_truth(folder: Path, dataset: Dataset, given: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the kind of every field, and keep it with the comparison; empty where the truth is not known."""
    place = folder / TRUTH_FILE
    if given is not None:
        try:
            values = json.loads(Path(given).read_text("utf-8"))
            put(place, {each["name"]: each["role"] for each in values["fields"]})
        except OSError as error:
            raise InputError(f"the truth {os.fspath(given)} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{os.fspath(given)} is not the truth.json of a simulated log") from None
    elif not place.exists():
        try:
            values = dataset.attached(TRUTH_FILE)
        except InputError:
            return {}
        put(place, {each["name"]: each["role"] for each in values["fields"]})
    kinds = read(place) or {}
    order = list(KINDS)
    return dict(sorted(kinds.items(), key=lambda each: order.index(each[1]) if each[1] in order else len(order)))


FORMAT, PLAN = "lpfs-compare", "plan.json"
MAY_DIFFER = ("source", "device")  # may differ between machines
MUST_MATCH = ("tune", "options")  # of the plan: results made under others cannot stand beside each other


def open_comparison_dir(folder: Path, wanted: Settings, plan: ComparisonPlan, tables_only: bool = False) -> Path:
    """Return a folder that is new or holds a comparison; refuse one that holds something else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        config = _config(folder)
        names = {each.name for each in folder.iterdir() if not each.name.startswith(".")}
        preparing = names <= {"claims", "data", TRUTH_FILE}  # by another process, or by one that was stopped
        if not (preparing or (config and config.get("format") == FORMAT)):
            raise InputError(f"{folder} is not empty and holds no comparison; choose another folder")
    elif tables_only:
        raise InputError(f"there is no comparison in {folder} to make tables of")
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other(folder, wanted, plan)
    return folder


def check_same(folder: Path, wanted: Settings, plan: ComparisonPlan, dataset: Dataset) -> None:
    """Refuse what differs from what was compared before; sizes, methods and seeds may be added."""
    _refuse_other(folder, wanted, plan)
    saved = read(folder / PLAN)
    made = dataset.settings.get("options", {})
    for name in ("label", "time", "split") if saved is None and dataset.path.parent == folder else ():
        asked = getattr(wanted, name)
        if asked is not None and made.get(name) != asked:
            raise InputError(
                f"{dataset.path} was prepared with {name}={made.get(name)!r}, not {asked!r}; remove it, or choose "
                "another folder"
            )
    if saved is not None and saved["fingerprint"] != dataset.fingerprint:
        raise InputError(
            f"the comparison in {folder} was begun on other data (fingerprint {saved['fingerprint']}, found "
            f"{dataset.fingerprint}); choose another folder"
        )


def write_plan(folder: Path, wanted: Settings, plan: ComparisonPlan, dataset: Dataset) -> None:
    """Write down what is compared, when nothing can be refused any more."""
    if read(folder / PLAN) is None:
        put(folder / CONFIG, {"format": FORMAT, **wanted.to_json()})
    put(folder / PLAN, {"fingerprint": dataset.fingerprint, **plan.to_json()})


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of the comparison in a folder; None where there is none."""
    found = read(folder / PLAN)
    return None if found is None else {name: value for name, value in found.items() if name != "fingerprint"}


@contextmanager
def remove_data_on_error(data: Path) -> Iterator[None]:
    """Within this block a log is prepared and checked; what is refused leaves no data that was not there."""
    there = data.exists()
    try:
        yield
    except LpfsError:
        if not there:
            shutil.rmtree(data, ignore_errors=True)
        raise


@contextmanager
def wait_for_lock(claims: WorkLocks, name: str, tell: Console, pause: float = 0.5) -> Iterator[None]:
    """Within this block nobody else does it; wait for a process that does."""
    said = False
    while True:
        try:
            with claims.acquire(name):
                yield
            return
        except LockedError as error:
            if error.args != (name,):
                raise
        if not said:
            tell.message("another process is preparing the data: waiting")
            said = True
        time.sleep(pause)


def _refuse_other(folder: Path, wanted: Settings, plan: ComparisonPlan) -> None:
    config, saved = _config(folder), read_plan(folder)
    if config is None or saved is None:
        return
    pairs = [(name, config.get(name), value) for name, value in wanted.to_json().items() if name not in MAY_DIFFER]
    pairs += [(name, saved[name], value) for name, value in plan.to_json().items() if name in MUST_MATCH]
    if (folder / "data").exists():  # where the files are may differ between machines, which files they are may not
        was, now = ([Path(each).name for each in of] for of in (config["source"], wanted.source))
        pairs.append(("source", was, now))
    for name, old, new in pairs:
        if old != json.loads(json.dumps(new)):
            raise InputError(
                f"the comparison in {folder} was begun with {name}={old!r} and cannot go on with {new!r}; "
                "use the same settings, or another folder"
            )


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = read(folder / CONFIG)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
