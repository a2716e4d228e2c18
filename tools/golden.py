"""Record the results of fixed configurations, and compare a later version of the package with the record.

    python tools/golden.py record DIR                     # before a change
    python tools/golden.py compare DIR                    # after it: every number must be equal, bit for bit
    python tools/golden.py compare DIR --level selection  # only the kept fields must be equal
    PYTHONPATH=OTHER/src python tools/golden.py record DIR  # record another source tree

The configurations use only the public API and the documented command line: modules, JSON keys and files may be
renamed between record and compare. A record is valid on one machine with one version of torch. Each configuration
runs in its own process with one thread. Census configurations need census_income_kdd.parquet in --data (default:
$LPFS_SHARED/data) and are skipped without it. ``--fast`` selects the configurations of tests/test_golden.py. After
an intended change of their selections, run:

    python tools/golden.py record DIR --fast --selections tests/golden_selections.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lpfs

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
CENSUS = "census_income_kdd.parquet"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS")
LEVELS = ("bits", "selection")
IDENTICAL, NUMBERS, DIFFERENT, MISSING = "identical", "numbers differ", "different", "missing"


# ---------------------------------------------------------------- configurations


def select_simulated(
    folder: Path, preset: str, rows: int, *, prices: bool = False, seed: int = 0, **settings: Any
) -> Record:
    """Record ``lpfs.select`` on a simulated log; ``prices`` writes a TOML file of costs for ``budget``."""
    dataset = lpfs.simulate(folder / "log", preset, rows=rows, seed=seed)
    if prices:
        settings["costs"] = str(write_costs(folder / "costs.toml", dataset.schema.names))
    return describe_outcome(lpfs.select(dataset, folder / "run", quiet=True, device="cpu", **settings))


def select_graded(folder: Path, rows: int, *, prices: str = "", **settings: Any) -> Record:
    """Record ``lpfs.select`` on a table whose selection does not depend on rounding: strong fields beside noise.

    The log-odds are a sum of effects of f00 to f04, each weaker than the one before; f05 to f14 are noise.
    """
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, (rows, 15))
    effects = np.array([2.0, 1.7, 1.4, 1.1, 0.3]) * np.linspace(-1.5, 1.5, 6)[:, None]
    logits = sum(effects[ids[:, field], field] for field in range(5)) - 1.0
    columns = {f"f{field:02}": ids[:, field].astype(str) for field in range(15)}
    clicks = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(int)
    table = pl.DataFrame({"day": np.arange(rows) * 10 // rows, "click": clicks, **columns})
    if prices:
        (folder / "costs.toml").write_text(prices, "utf-8")
        settings["costs"] = str(folder / "costs.toml")
    options: dict[str, Any] = {"label": "click", "time": "day", "quiet": True, "device": "cpu"}
    return describe_outcome(lpfs.select(table, folder / "run", **options, **settings))


def select_census(folder: Path, every: int, **settings: Any) -> Record:
    """Record ``lpfs.select`` on every n-th row of the census table."""
    import polars as pl

    table = folder / "census.parquet"
    pl.read_parquet(census_path()).gather_every(every).write_parquet(table)
    outcome = lpfs.select(table, folder / "run", label="label", split="split", quiet=True, device="cpu", **settings)
    return describe_outcome(outcome)


def run_stages(folder: Path, rows: int, steps: int) -> Record:
    """Record ``train``, ``search``, ``prune``, ``evaluate`` and ``select --checkpoint`` of the command line."""
    run_command("simulate", "--preset", "small", "--rows", rows, "--out", folder / "log", "-q")
    cpu = ("--device", "cpu", "-q", "--out")
    run_command(
        "train", folder / "log", "--model", "deepfm", "--rows", "early", "--steps", steps, *cpu, folder / "trained"
    )
    target = ("--keep", 8, "--search-steps", steps)
    run_command("search", folder / "trained", folder / "log", *target, *cpu, folder / "found")
    run_command("prune", folder / "found", "-q", "--out", folder / "small")
    checkpoint = ("--checkpoint", folder / "trained", "--finish", "hot")
    run_command("select", folder / "log", *checkpoint, *target, *cpu, folder / "run")
    record: Record = {"kept": {}, "gates": {}, "history": {}, "metrics": {}, "checksums": {}}
    last_day = lpfs.Dataset(folder / "log").days(-1)
    for name in ("found", "small", "run"):
        selection = lpfs.Selection.load(folder / name / "selection.json")
        record["kept"][name] = list(selection.kept)
        record["gates"][name] = dict(selection.gates)
        if (folder / name / "history.parquet").exists():
            record["history"][name] = history_file(folder / name / "history.parquet")
    for name in ("trained", "found", "small", "run"):
        model = lpfs.load(folder / name / "model")
        record["checksums"][name] = tensor_checksums(model.state_dict().values())
        scores = lpfs.evaluate(model, last_day.stream(512, fields=model.names))
        record["metrics"][name] = {"auc": scores.auc, "logloss": scores.logloss}
    return record


def compare_methods(folder: Path, rows: int, steps: int, **settings: Any) -> Record:
    """Record ``lpfs.compare`` on a simulated log: kept fields and metrics of every method, K and seed."""
    dataset = lpfs.simulate(folder / "log", "small", rows=rows)
    quick: dict[str, Any] = {"pretrain_steps": steps, "search_steps": steps, "quiet": True, "device": "cpu"}
    comparison = lpfs.compare(dataset, folder / "comparison", **quick, **settings)
    record: Record = {"kept": {}, "metrics": {"best": comparison.best, "order": list(comparison.methods)}}
    for result in comparison.results:
        name = " ".join(str(result[key]) for key in ("method", "keep", "seed"))
        record["kept"][name] = result.get("kept", "failed")
        if "kept" in result:
            record["metrics"][name] = {
                key: result[key] for key in ("auc", "logloss", "validation_auc", "validation_logloss")
            }
    return record


def prepare_table(folder: Path, rows: int) -> Record:
    """Record ``lpfs prepare`` of a messy CSV: schema, fingerprint, checksums of the data files and the batches."""
    table = write_messy_table(folder / "messy.csv", rows)
    run_command("prepare", table, "--label", "click", "--time", "day", "--missing", "?", "-q", "--out", folder / "data")
    dataset = lpfs.Dataset(folder / "data")
    checksums: dict[str, Any] = {"fingerprint": dataset.fingerprint}
    for path in sorted((folder / "data").rglob("*.np[yz]")):
        checksums[path.relative_to(folder / "data").as_posix()] = array_checksum(path)
    for number, batch in enumerate(dataset.stream(256, shuffle=True, seed=3)):
        tensors = [batch.ids, batch.dense, batch.labels, *([] if batch.missing is None else [batch.missing])]
        tensors += [part for bag in batch.bags.values() for part in bag]
        checksums[f"batch {number}"] = tensor_checksums(tensors, ordered=True)
    return {
        "kept": {"fields": list(dataset.schema.names)},
        "metrics": {
            "rows": dataset.rows,
            "days": list(dataset.days()),
            "fields": {field.name: [field.kind, field.cardinality, field.dim] for field in dataset.schema},
        },
        "checksums": checksums,
    }


def search_own_model(folder: Path, rows: int, steps: int, **target: Any) -> Record:
    """Record attach, a training loop of the user, absorb and prune on a plain torch model."""
    import torch
    from torch import nn

    class OwnModel(nn.Module):
        def __init__(self, sizes: Sequence[int]) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
            self.top = nn.Sequential(nn.Linear(4 * len(sizes), 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            parts = [table(ids[:, column]) for column, table in enumerate(self.tables)]
            output: torch.Tensor = self.top(torch.cat(parts, dim=1))
            return output

    torch.manual_seed(0)
    dataset = lpfs.simulate(folder / "log", "small", rows=rows)
    fields = [field for field in dataset.schema if field.kind == "categorical"]
    names = [field.name for field in fields]
    model = OwnModel([field.cardinality for field in fields])
    gates = lpfs.attach(model, dict(zip(names, model.tables, strict=True)), steps=steps, reader=model.top[0])
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.05)
    gate_optimizer = gates.optimizer(**target)
    stream = dataset.stream(128, shuffle=True, seed=1, fields=names, drop_last=True)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in stream:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids)[:, 0], batch.labels[:, 0])
            optimizer.zero_grad()
            gate_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            gate_optimizer.step()
            gates.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    selection = lpfs.absorb(model, optimizer)
    inputs = {name: (0, column) for column, name in enumerate(names)}
    pruned = lpfs.prune(model, selection, batch=(batch.ids,), inputs=inputs, optimizer=optimizer)
    return {
        "kept": {"selection": list(selection.kept)},
        "gates": {"selection": dict(selection.gates)},
        "history": {"losses": losses},
        "metrics": {"max_logit_change": pruned.certificate.max_logit_change, "bound": pruned.certificate.bound},
        "checksums": {"model": tensor_checksums(pruned.model.state_dict().values())},
    }


SMALL: Mapping[str, Any] = {"preset": "small", "rows": 12_000, "pretrain_steps": 150, "search_steps": 300}
TERABYTE: Mapping[str, Any] = {"preset": "terabyte", "rows": 24_000, "pretrain_steps": 100, "search_steps": 200}
CROSSES: Mapping[str, Any] = {**TERABYTE, "rows": 12_000, "pretrain_steps": 60, "search_steps": 100}
INDUSTRIAL: Mapping[str, Any] = {"preset": "industrial-small", "rows": 9_000, "pretrain_steps": 80, "search_steps": 150}
CENSUS_STEPS: Mapping[str, Any] = {"every": 15, "pretrain_steps": 150, "search_steps": 300}

CONFIGURATIONS: dict[str, Callable[[Path], Record]] = {
    "small-keep-lpfs++": partial(select_simulated, **SMALL, keep=10, seeds=2),
    "small-keep-lpfs": partial(select_simulated, **SMALL, keep=8, method="lpfs", model="deepfm", must_keep=("f03",)),
    "small-penalty-lpfs++": partial(select_simulated, **SMALL, penalty=0.02, model="fm", finish="retrain"),
    "small-penalty-lpfs": partial(select_simulated, **SMALL, penalty=0.1, method="lpfs", finish="hot"),
    "small-budget-lpfs++": partial(select_simulated, **SMALL, budget=14.0, prices=True, model="wide_deep"),
    "small-budget-lpfs": partial(select_simulated, **SMALL, budget=14.0, prices=True, method="lpfs"),
    "small-max-auc-loss-lpfs++": partial(select_simulated, **SMALL, max_auc_loss=0.01),
    "terabyte-keep-lpfs++": partial(select_simulated, **TERABYTE, keep=12, model="dlrm"),
    "terabyte-max-auc-loss-lpfs": partial(
        select_simulated, **TERABYTE, max_auc_loss=0.002, method="lpfs", model="dcnv2", finish="none"
    ),
    "terabyte-keep-crosses": partial(select_simulated, **CROSSES, keep=40, level="cross", finish="retrain"),
    "industrial-small-keep-lpfs++": partial(select_simulated, **INDUSTRIAL, keep=30, model="user_item"),
    "industrial-small-budget-lpfs": partial(
        select_simulated, **INDUSTRIAL, budget=60.0, costs="complexity", method="lpfs", finish="hot"
    ),
    "census-keep-lpfs++": partial(select_census, **CENSUS_STEPS, keep=10),
    "census-max-auc-loss-lpfs": partial(select_census, **CENSUS_STEPS, max_auc_loss=0.005, method="lpfs"),
    "small-permutation": partial(select_simulated, **SMALL, keep=10, method="permutation"),
    "small-shufflegate": partial(select_simulated, **SMALL, keep=10, method="shufflegate"),
    "stages": partial(run_stages, rows=8_000, steps=120),
    "own-model": partial(search_own_model, rows=8_000, steps=300, keep=8),
    "compare-three": partial(
        compare_methods, rows=4_000, steps=60, methods=["lpfs++", "permutation", "shark"], keep=[5, 10], seeds=2, tune=2
    ),
    "compare-all": partial(compare_methods, rows=4_000, steps=60, methods="all", keep=[8], seeds=1),
    "prepare-messy": partial(prepare_table, rows=3_000),
}

TINY: Mapping[str, Any] = {
    "rows": 6_000,
    "pretrain_steps": 100,
    "search_steps": 200,
    "model_options": {"dim": 4, "hidden": [16]},
    "lr": 0.05,
    "finish": "none",
}
FAST: dict[str, Callable[[Path], Record]] = {
    "fast-keep-lpfs++": partial(select_graded, **TINY, keep=4),
    "fast-keep-lpfs": partial(select_graded, **TINY, keep=4, method="lpfs"),
    "fast-penalty": partial(select_graded, **TINY, penalty=0.15),
    "fast-budget": partial(select_graded, **TINY, budget=3.0, prices="default = 1.0\n[fields]\nf03 = 20.0\n"),
    "fast-permutation": partial(select_graded, **TINY, keep=4, method="permutation"),
    "fast-shufflegate": partial(select_graded, **TINY, keep=4, method="shufflegate"),
    "fast-prepare": partial(prepare_table, rows=500),
}


# ---------------------------------------------------------------- inputs


def census_path() -> Path:
    return Path(os.environ.get("LPFS_SHARED", ROOT.parent / "shared")) / "data" / CENSUS


def write_costs(path: Path, names: Sequence[str]) -> Path:
    lines = ['unit = "ms"', "default = 0.5", "[fields]", *(f'"{name}" = 4.0' for name in names[:3])]
    lines += ["[groups.profile]", "cost = 6.0", f"fields = {json.dumps(list(names[-10:]))}"]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_messy_table(path: Path, rows: int) -> Path:
    """Write a CSV with missing values, quotes, Unicode, dates, a constant and a duplicate column, rare values."""
    state = 12345
    lines = ["day,click,user id,città,price,count,constant,copy of city,mixed,note"]
    cities = ("Zürich", "São Paulo", '"New York, NY"', "東京", "", "?", "Łódź")
    for row in range(rows):
        state = (1103515245 * state + 12345) % 2**31
        draw = state >> 8
        city = cities[draw % len(cities)]
        price = "" if draw % 11 == 0 else "?" if draw % 13 == 0 else f"{(draw % 1000) / 7:.3f}"
        mixed = ("7", "07", "seven", " 7 ", "7.0")[draw % 5]
        note = f'"said ""{draw % 40}"""' if draw % 3 else ""
        day = f"2024-02-{1 + 10 * row // rows:02d}"
        values = (day, draw % 4 == 0, draw % 900, city, price, draw % 17, "same", city, mixed, note)
        lines.append(",".join(str(int(value)) if isinstance(value, bool) else str(value) for value in values))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def run_command(*arguments: Any) -> None:
    """Run ``python -m lpfs`` with these arguments; raise RuntimeError with its error output if it fails."""
    command = [sys.executable, "-m", "lpfs", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"lpfs {arguments[0]} ended with code {result.returncode}: {result.stderr.strip()}")


# ---------------------------------------------------------------- records


def describe_outcome(outcome: lpfs.Outcome) -> Record:
    """Return the kept fields, gates, history and metrics of a run; times, speeds and texts are left out."""
    selection = outcome.selection
    savings = {
        name: {key: value for key, value in values.items() if "second" not in key}
        for name, values in outcome.savings.items()
    }
    return {
        "kept": {"selection": list(selection.kept)},
        "gates": {"selection": dict(selection.gates)},
        "history": columns_of(selection.history),
        "metrics": {
            "test": outcome.metrics,
            "validation": outcome.choices,
            "certificates": outcome.certificates,
            "max_logit_change": outcome.max_logit_change,
            "chosen": outcome.chosen,
            "chosen_in": outcome.chosen_in,
            "savings": savings,
            "hot_start": outcome.hot_start,
            "dropped": list(selection.dropped),
        },
        "checksums": {"model": tensor_checksums(outcome.model.state_dict().values())},
    }


def columns_of(history: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for row in history:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def history_file(path: Path) -> dict[str, list[Any]]:
    import polars as pl

    return pl.read_parquet(path).to_dict(as_series=False)


def tensor_checksums(tensors: Any, *, ordered: bool = False) -> list[str]:
    """Return shape and SHA-256 of every tensor; sorted unless ``ordered``, because parameters may be renamed."""
    checksums = []
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        checksums.append(f"{list(array.shape)} {array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}")
    return checksums if ordered else sorted(checksums)


def array_checksum(path: Path) -> str:
    """Return the checksum of the arrays of an ``.npy`` or ``.npz`` file (the bytes of a zip contain times)."""
    import numpy as np

    content = np.load(path, allow_pickle=False)
    arrays = [content[name] for name in sorted(content)] if path.suffix == ".npz" else [content]
    return hashlib.sha256(b"\0".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def to_plain(value: Any) -> Any:
    """Return JSON values; floats stay exact, because JSON writes the shortest text that reads back equal."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def run_one(name: str) -> Record:
    """Run a configuration in this process, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="lpfs-golden-") as folder:
        record = (CONFIGURATIONS | FAST)[name](Path(folder))
    plain: Record = to_plain(record)
    return plain


def run_all(names: Sequence[str], folder: Path, jobs: int) -> Iterator[tuple[str, float, str]]:
    """Run every configuration in its own process and yield (name, seconds, error), in order."""
    environment = {**os.environ, **dict.fromkeys(THREADS, "1"), "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}

    def run_child(name: str) -> tuple[float, str]:
        started = time.perf_counter()
        command = [sys.executable, __file__, "run-one", str(folder), "--only", name]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        error = "" if result.returncode == 0 else (result.stderr.strip() or f"exit code {result.returncode}")
        return time.perf_counter() - started, error

    with ThreadPoolExecutor(jobs) as pool:
        for name, (seconds, error) in zip(names, pool.map(run_child, names), strict=True):
            yield name, seconds, error


# ---------------------------------------------------------------- comparison


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries by path; lists are leaves."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {key: leaf for name, item in value.items() for key, leaf in flatten(item, f"{path}/{name}").items()}


def difference(old: Any, new: Any) -> float:
    """Return the largest absolute difference of two leaves: 0.0 where equal, inf where they are not comparable."""
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return math.inf
        return max(map(difference, old, new), default=0.0)
    if old == new or (old != old and new != new):  # NaN equals NaN here
        return 0.0
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(old - new) if math.isfinite(old - new) else math.inf
    return math.inf


def compare_part(old: Any, new: Any) -> tuple[float, list[str]]:
    """Return the largest difference of two parts of a record, and notes on renamed or missing keys.

    Keys that exist only in one of the two are paired in their order: a rename is reported and is no difference.
    """
    before, after = flatten(old), flatten(new)
    pairs = {key: key for key in before if key in after}
    removed, added = ([key for key in one if key not in other] for one, other in ((before, after), (after, before)))
    notes = []
    if len(removed) == len(added):
        pairs |= dict(zip(removed, added, strict=True))
        notes += [f"{was} is now {now}" for was, now in zip(removed, added, strict=True)]
        largest = 0.0
    else:
        notes += [f"only in the record: {key}" for key in removed] + [f"only now: {key}" for key in added]
        largest = math.inf
    for was, now in pairs.items():
        change = difference(before[was], after[now])
        if math.isinf(change):
            notes.append(f"{was}: {shorten(before[was])} -> {shorten(after[now])}")
        largest = max(largest, change)
    return largest, notes


def shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def compare_records(old: Record, new: Record) -> tuple[str, list[str]]:
    """Return ``identical``, ``numbers differ`` or ``different`` (kept fields), and lines that explain it."""
    lines: list[str] = []
    verdict = IDENTICAL
    for part in ("metrics", "gates", "history", "checksums"):
        largest, notes = compare_part(old.get(part, {}), new.get(part, {}))
        if largest:
            verdict = NUMBERS
            size = "not comparable" if math.isinf(largest) else f"largest difference {largest:.3g}"
            lines.append("weights or data differ" if part == "checksums" else f"{part}: {size}")
        lines += [f"  {note}" for note in notes[:8]] + ([f"  and {len(notes) - 8} more"] if len(notes) > 8 else [])
    if old["kept"] != new["kept"]:
        verdict = DIFFERENT
        for name in old["kept"] | new["kept"]:
            was, now = old["kept"].get(name), new["kept"].get(name)
            if was is None or now is None or isinstance(was, str) or isinstance(now, str):
                text = "" if was == now else f"{shorten(was)} -> {shorten(now)}"
            elif sorted(was) == sorted(now):
                text = "" if was == now else "same fields in another order"
            else:
                lost, gained = ([x for x in a if x not in b] for a, b in ((was, now), (now, was)))
                text = f"no longer kept {lost}, newly kept {gained}"
            lines += [f"kept, {name}: {text}"] if text else []
    return verdict, lines


# ---------------------------------------------------------------- commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare", "run-one"), metavar="record|compare")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the records, one JSON file each")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this configuration; may be repeated")
    parser.add_argument("--fast", action="store_true", help="the small configurations of tests/test_golden.py")
    parser.add_argument("--level", choices=LEVELS, default="bits", help="what must be equal (default: bits)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each (default: 2)")
    parser.add_argument("--data", type=Path, help=f"folder of {CENSUS} (default: $LPFS_SHARED/data)")
    parser.add_argument("--selections", type=Path, help="with record: also write all kept fields to this JSON file")
    options = parser.parse_args()
    if options.data:
        os.environ["LPFS_SHARED"] = str(options.data.resolve().parent)
    if options.command == "run-one":
        write_record(options.folder, options.only[0])
        return 0
    known = FAST if options.fast else CONFIGURATIONS
    unknown = [name for name in options.only or () if name not in CONFIGURATIONS | FAST]
    if unknown:
        parser.error(f"no configuration {unknown[0]!r}; there are {', '.join(CONFIGURATIONS | FAST)}")
    names = list(options.only or known)
    print(f"lpfs from {Path(lpfs.__file__).parent}", flush=True)
    if not census_path().is_file():
        for name in [name for name in names if name.startswith("census")]:
            names.remove(name)
            print(f"{name:32} skipped: {census_path()} does not exist", flush=True)
    if options.command == "record":
        return record(names, options.folder, options.jobs, options.selections)
    return compare(names, options.folder, options.jobs, options.level)


def write_record(folder: Path, name: str) -> None:
    import torch

    torch.set_num_threads(1)
    values = {"configuration": name, "environment": environment(), **run_one(name)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values, ensure_ascii=False, indent=None) + "\n", "utf-8")


def read_record(folder: Path, name: str) -> Record:
    values: Record = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return values


def environment() -> dict[str, str]:
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def record(names: Sequence[str], folder: Path, jobs: int, selections: Path | None) -> int:
    """Write a record of every configuration; return 1 if one fails."""
    started, failed = time.perf_counter(), 0
    for name, seconds, error in run_all(names, folder, jobs):
        print(f"{name:32} {seconds:6.1f} s  {f'FAILED: {error}' if error else 'recorded'}", flush=True)
        failed += bool(error)
    print(f"{len(names) - failed} recorded in {folder}, {failed} failed, {time.perf_counter() - started:.0f} s")
    if selections and not failed:
        kept = {name: read_record(folder, name)["kept"] for name in names}
        selections.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return int(failed > 0)


def compare(names: Sequence[str], folder: Path, jobs: int, level: str) -> int:
    """Compare every configuration with its record; return 2 if kept fields differ, 1 if numbers do."""
    started, verdicts = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="lpfs-golden-") as temporary:
        for name, seconds, error in run_all(names, Path(temporary), jobs):
            if error:
                verdict, lines = DIFFERENT, [f"failed: {error}"]
            elif not (folder / f"{name}.json").exists():
                verdict, lines = MISSING, [f"no record in {folder}"]
            else:
                old, new = read_record(folder, name), read_record(Path(temporary), name)
                verdict, lines = compare_records(old, new)
                if old["environment"] != new["environment"]:
                    lines.append(f"recorded elsewhere: {old['environment']}, now {new['environment']}")
            shown = {NUMBERS: "kept fields identical, numbers differ", DIFFERENT: "DIFFERENT"}.get(verdict, verdict)
            print(f"{name:32} {seconds:6.1f} s  {shown}", *(f"    {line}" for line in lines), sep="\n", flush=True)
            verdicts.append(verdict)
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in (IDENTICAL, NUMBERS, DIFFERENT, MISSING))
    print(f"{counts}; {time.perf_counter() - started:.0f} s")
    if DIFFERENT in verdicts or MISSING in verdicts:
        return 2
    return int(level == "bits" and NUMBERS in verdicts)


if __name__ == "__main__":
    sys.exit(main())
