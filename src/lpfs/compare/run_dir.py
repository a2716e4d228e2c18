"""The folder of a comparison: begun once, gone on with only under the same settings."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lpfs.compare.locks import BusyError, Claims
from lpfs.compare.plan import Plan
from lpfs.compare.store import put, read
from lpfs.compare.truth import NAME as TRUTH
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError, LpfsError
from lpfs.pipeline.settings import CONFIG, Settings
from lpfs.pipeline.tell import Teller

FORMAT, PLAN = "lpfs-compare", "plan.json"
FREE = ("source", "device")  # may differ between machines
FIXED = ("tune", "options")  # of the plan: results made under others cannot stand beside each other


def begin(folder: Path, wanted: Settings, plan: Plan, tables_only: bool = False) -> Path:
    """Return a folder that is new or holds a comparison; refuse one that holds something else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        config = _config(folder)
        names = {each.name for each in folder.iterdir() if not each.name.startswith(".")}
        preparing = names <= {"claims", "data", TRUTH}  # by another process, or by one that was stopped
        if not (preparing or (config and config.get("format") == FORMAT)):
            raise InputError(f"{folder} is not empty and holds no comparison; choose another folder")
    elif tables_only:
        raise InputError(f"there is no comparison in {folder} to make tables of")
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other(folder, wanted, plan)
    return folder


def check_same(folder: Path, wanted: Settings, plan: Plan, dataset: Dataset) -> None:
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


def write_plan(folder: Path, wanted: Settings, plan: Plan, dataset: Dataset) -> None:
    """Write down what is compared, when nothing can be refused any more."""
    if read(folder / PLAN) is None:
        put(folder / CONFIG, {"format": FORMAT, **wanted.to_json()})
    put(folder / PLAN, {"fingerprint": dataset.fingerprint, **plan.to_json()})


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of the comparison in a folder; None where there is none."""
    found = read(folder / PLAN)
    return None if found is None else {name: value for name, value in found.items() if name != "fingerprint"}


@contextmanager
def unless_refused(data: Path) -> Iterator[None]:
    """Within this block a log is prepared and checked; what is refused leaves no data that was not there."""
    there = data.exists()
    try:
        yield
    except LpfsError:
        if not there:
            shutil.rmtree(data, ignore_errors=True)
        raise


@contextmanager
def wait_for(claims: Claims, name: str, tell: Teller, pause: float = 0.5) -> Iterator[None]:
    """Within this block nobody else does it; wait for a process that does."""
    said = False
    while True:
        try:
            with claims.take(name):
                yield
            return
        except BusyError as error:
            if error.args != (name,):
                raise
        if not said:
            tell.say("another process is preparing the data: waiting")
            said = True
        time.sleep(pause)


def _refuse_other(folder: Path, wanted: Settings, plan: Plan) -> None:
    config, saved = _config(folder), read_plan(folder)
    if config is None or saved is None:
        return
    pairs = [(name, config.get(name), value) for name, value in wanted.to_json().items() if name not in FREE]
    pairs += [(name, saved[name], value) for name, value in plan.to_json().items() if name in FIXED]
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
