"""The directory of a comparison: its files, and the checks before one is continued.

::

    config.json, plan.json     settings and plan; a comparison is continued only with the same settings
    data/                      the Dataset, if the source was a log
    seeds/0/pretrain/          the model that every search of a seed starts from, and cost.json
    seeds/0/judges-4-500/      networks that judge exchanges after its searches: their number, and that of steps
    searches/                  the result of each search; one ranking may serve all K
    trained/                   fields trained from scratch: metrics as JSON, logits on the test rows as .npy
    labels.npy                 labels of the test rows
    results/                   one JSON file per method, K and seed
    truth.json                 kind of every field of a simulated log
    locks/, work/              work in progress

Every file is written atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from lpfs._fileio import read_json, write_json_atomic
from lpfs._locks import FileLock
from lpfs._validation import check_json
from lpfs.compare.plan import ComparisonPlan, RunSpec, file_safe_name
from lpfs.data.dataset import Dataset
from lpfs.errors import CheckpointError, InputError, LockedError
from lpfs.methods.baselines import TRUTH_SCHEMA
from lpfs.pipeline.data import DATA_DIR
from lpfs.pipeline.settings import CONFIG_FILE, Settings

FORMAT, PLAN_FILE, TRUTH_FILE, LOCKS_DIR = "lpfs-compare", "plan.json", "truth.json", "locks"
SEARCHES_DIR = "searches"
MEMBERS_FILE = "members.json"  # of a fleet
MAY_DIFFER = ("source", "device", "fleet")  # settings that may differ between machines
MUST_MATCH = ("tune", "options")  # of the plan: results of other values cannot be compared with each other
TRUE_KINDS = ("main", "pair")  # the label depends on fields of these kinds
# kinds of the fields of a simulated log, in the order of the tables
KINDS = {
    "main": "affects the label",
    "pair": "affects the label only together with its partner",
    "copy": "noisy copy of a true field",
    "correlated": "shares a cause with a true field",
    "coarse": "group of the values of a true field",
    "sum": "sum of two numbers",
    "noise": "noise",
}

METRICS = {"auc": float, "logloss": float}
COST = {"seconds?": float, "memory?": float, "first_in_process": bool}
# types of the files of a comparison, see read_json; a finished run has the keys of its training
TRAINED_SCHEMA = {
    **{"trained": str, "test": METRICS, "validation": METRICS, "train_seconds": float, "code?": str},
    **{"labels": str, "files": dict[str, str]},  # checksums of labels.npy and of the logits
}
SEARCH_SCHEMA = {"kept": list[str], "scores?": dict[str, float], "code?": str, **COST}
RESULT_SCHEMA = {"method": str, "keep": int, "seed": int, "status": Literal["done", "failed"], "reason?": str}
DONE_SCHEMA = {
    **{**RESULT_SCHEMA, **TRAINED_SCHEMA, "kept": list[str], "trials?": [dict], "options?": dict},
    "search?": {**COST, "shared_by_all_k": bool, "code?": str},
}
COST_SCHEMA = {"passes": float, **COST}
PLAN_SCHEMA = {
    **{"fingerprint": str, "methods": list[str], "keep": list[int], "seeds": int, "tune": int},
    "options": {"*": dict},
}

Record = dict[str, Any]


class ResultStore:
    """Paths of the files of a comparison, and the locks on them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.labels = directory, directory / "labels.npy"
        (directory / LOCKS_DIR).mkdir(parents=True, exist_ok=True)

    def lock(self, name: str, on_wait: Callable[[], None] | None = None) -> FileLock:
        """Return the lock of a piece of work, which this process holds; see :class:`FileLock`."""
        return FileLock(self.directory / LOCKS_DIR / f"{name}.lock", name, on_wait)

    def remove_leftovers(self) -> None:
        """Remove the locks and the work of killed processes, unless a process works; call it when nothing is left."""
        with suppress(LockedError), ExitStack() as locks:
            for path in sorted((self.directory / LOCKS_DIR).glob("*.lock")):
                locks.enter_context(FileLock(path, path.stem))
            for path in (self.directory / "work").glob("*"):
                shutil.rmtree(path, ignore_errors=True)

    def seed(self, seed: int) -> Path:
        """Return the directory of the pretrained model of a seed."""
        return self.directory / "seeds" / str(seed)

    def work(self, name: str) -> Path:
        """Return the directory of a training in progress."""
        return self.directory / "work" / name

    def open_fleet(self, members: Sequence[str]) -> Path:
        """Return the directory of a fleet, in which its members are written: stems of the files of their results."""
        directory = self.work(f"fleet-{digest(list(members))}")
        directory.mkdir(parents=True, exist_ok=True)
        write_json_atomic(directory / MEMBERS_FILE, {"members": list(members)})
        return directory

    def killed_fleets(self) -> list[list[str]]:
        """Return the members of every fleet in progress, of this process or of a killed one; the largest first."""
        paths = (self.directory / "work").glob(f"fleet-*/{MEMBERS_FILE}")
        fleets = [read_json(path, {"members": list[str]}, missing_ok=True) for path in sorted(paths)]
        return sorted((fleet["members"] for fleet in fleets if fleet is not None), key=len, reverse=True)

    def result(self, spec: RunSpec) -> Path:
        """Return the file of a result."""
        return self.directory / "results" / f"{spec.name}.json"

    def search(self, method: str, options: Mapping[str, Any], seed: int, keep: int | None) -> Path:
        """Return the file of a search; without ``keep``, of a ranking that serves every K."""
        size = "" if keep is None else f"-k{keep}"
        suffix = f"-{digest(dict(options))[:8]}" if options else ""
        return self.directory / SEARCHES_DIR / f"{file_safe_name(method)}{suffix}-s{seed}{size}.json"

    def trained(self, fields: Iterable[str], seed: int) -> Path:
        """Return the file of fields trained from scratch; their logits are beside it as ``.npy``."""
        return self.directory / "trained" / f"{digest(sorted(fields))}-s{seed}.json"

    def results(self) -> list[Record]:
        """Return all results."""
        paths = sorted((self.directory / "results").glob("*.json"))
        return [read_result(path, DONE_SCHEMA if read_result(path)["status"] == "done" else {}) for path in paths]


def read_result(path: Path, schema: Any = RESULT_SCHEMA) -> Any:
    """Return the values of a file that a comparison wrote; None if it does not exist; CheckpointError if damaged."""
    try:
        advice = "remove it and continue the comparison"
        return read_json(path, schema, missing_ok=True, verify="required", advice=advice)
    except InputError as error:  # not InputError, which would be recorded as a failure of the method
        raise CheckpointError(str(error)) from None


def digest(values: Any) -> str:
    """Return a short digest of JSON values, for file names."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def copy_truth(run_dir: Path, dataset: Dataset, truth: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the kind of every field, and write it to the comparison; empty if the truth is unknown.

    Without ``truth`` it is that of the comparison or of a simulated Dataset.
    """
    path = run_dir / TRUTH_FILE
    if truth is not None:
        write_json_atomic(path, {"kinds": read_kinds(Path(truth))})
    elif not path.exists():
        try:
            values = dataset.attached(TRUTH_FILE)
        except InputError:
            return {}
        write_json_atomic(path, {"kinds": field_kinds(values)})
    kinds: dict[str, str] = read_json(path, {"kinds": dict[str, str]})["kinds"]
    order = {kind: number for number, kind in enumerate(KINDS)}
    return dict(sorted(kinds.items(), key=lambda item: order.get(item[1], len(order))))


def field_kinds(truth: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of every field from the values of ``truth.json``."""
    check_json(truth, TRUTH_SCHEMA, TRUTH_FILE)
    return {field["name"]: field["role"] for field in truth["fields"]}


def read_kinds(path: Path) -> dict[str, str]:
    """Return the kind of every field from the ``truth.json`` of a simulated log."""
    advice = "give the truth.json that lpfs simulate writes"
    try:
        return field_kinds(read_json(path, TRUTH_SCHEMA, advice=advice))
    except FileNotFoundError:
        raise InputError(f"there is no truth {path}; {advice}") from None


def open_comparison_dir(run_dir: Path, settings: Settings, plan: ComparisonPlan, *, tables_only: bool = False) -> None:
    """Make the directory of a comparison; raise InputError if it contains other files or another comparison."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        config = _read_config(run_dir)
        names = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
        # by another process, or by one that was stopped; or with the searches of another comparison of the same data
        preparing = names <= {LOCKS_DIR, DATA_DIR, TRUTH_FILE, SEARCHES_DIR}
        if not (preparing or (config and config.get("format") == FORMAT)):
            raise InputError(f"{run_dir} is not empty and contains no comparison; choose another directory")
    elif tables_only:
        raise InputError(f"no comparison in {run_dir}; run it first, without --tables-only")
    run_dir.mkdir(parents=True, exist_ok=True)
    _check_same_settings(run_dir, settings, plan)


def check_same(run_dir: Path, settings: Settings, plan: ComparisonPlan, dataset: Dataset) -> None:
    """Raise InputError if settings or data differ from earlier runs; sizes, methods and seeds may be added."""
    _check_same_settings(run_dir, settings, plan)
    saved = read_json(run_dir / PLAN_FILE, PLAN_SCHEMA, missing_ok=True)
    options = dataset.settings.get("options", {})
    for name in ("label", "time", "split") if saved is None and dataset.path.parent == run_dir else ():
        value = getattr(settings, name)
        if value is not None and options.get(name) != value:
            raise InputError(
                f"{dataset.path} was prepared with {name}={options.get(name)!r}, not {value!r}; remove it, or "
                "choose another directory"
            )
    if saved is not None and saved["fingerprint"] != dataset.fingerprint:
        raise InputError(
            f"the comparison in {run_dir} was started with other data (fingerprint {saved['fingerprint']}, found "
            f"{dataset.fingerprint}); choose another directory"
        )


def _check_same_settings(run_dir: Path, settings: Settings, plan: ComparisonPlan) -> None:
    config, saved = _read_config(run_dir), read_plan(run_dir)
    if config is None or saved is None:
        return
    pairs = [(name, config.get(name), value) for name, value in settings.to_json().items() if name not in MAY_DIFFER]
    pairs += [(name, saved[name], value) for name, value in plan.to_json().items() if name in MUST_MATCH]
    if (run_dir / DATA_DIR).exists():  # the directory of the files may differ between machines, their names may not
        old_source = config.get("source") or ()
        old_names, new_names = ([Path(path).name for path in paths] for paths in (old_source, settings.source))
        pairs.append(("source", old_names, new_names))
    for name, old, new in pairs:
        if old != json.loads(json.dumps(new)):
            raise InputError(
                f"the comparison in {run_dir} was started with {name}={old!r} and cannot continue with {new!r}; "
                "use the same settings, or another directory"
            )


def write_plan(run_dir: Path, settings: Settings, plan: ComparisonPlan, dataset: Dataset) -> None:
    """Write settings and plan, after all checks have passed."""
    if not (run_dir / PLAN_FILE).exists():
        write_json_atomic(run_dir / CONFIG_FILE, {"format": FORMAT, **settings.to_json()})
    write_json_atomic(run_dir / PLAN_FILE, {"fingerprint": dataset.fingerprint, **plan.to_json()})


def read_plan(run_dir: Path) -> Record | None:
    """Return the plan of the comparison in a directory; None if there is none."""
    plan = read_json(run_dir / PLAN_FILE, PLAN_SCHEMA, missing_ok=True)
    return None if plan is None else {name: value for name, value in plan.items() if name != "fingerprint"}


def _read_config(run_dir: Path) -> Record | None:
    config: Record | None = read_json(run_dir / CONFIG_FILE, {"source?": list[str]}, missing_ok=True)
    return config
