"""Are verdicts and warnings of select true? Runs on simulated logs whose click probabilities are known.

    python benchmarks/verdicts.py --jobs 16 --out benchmarks/results/verdicts.json

Each run is one line of verdicts.jsonl next to --out; finished runs are not repeated. The true loss of AUC from the
model of all fields to the deployed model is computed on fresh rows of the same days, with the true click probabilities
as labels. From all runs: how often the printed interval contains it, whether the allowed loss holds on the validation
rows and in truth, and how often each warning was due and given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FRESH_ROWS = 200_000  # per period, on which the true AUC is computed
VALUES = 6  # of an ordinary field
FIRST_ID = 2  # ids 0 and 1 stand for missing and unseen values
SETTINGS: Mapping[str, Any] = {
    "model_options": {"dim": 4, "hidden": [16]},
    "lr": 0.05,
    "pretrain_steps": 400,
    "search_steps": 400,
    "finish": "retrain",
    "force": True,
    "quiet": True,
    "device": "cpu",
}
CHECKED = ("few positives", "leak", "near unique", "drift")  # kinds of warnings that are due or not by construction

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = dict[str, Ids]
Record = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of simulated log: effects are the standard deviations of the terms of the logit, one field each."""

    effects: Sequence[float] = (1.0, 0.8, 0.6, 0.4)
    noise: int = 8  # fields without an effect
    intercept: float = -1.0
    rows: int = 12_000
    days: int = 10
    copies: float = 0.0  # share of rows in which each field with an effect has an equal copy; 0: no copies
    fading: bool = False  # whether the effects of half of the fields fade over the days
    extra: Callable[[np.random.Generator, Ids, Ids, int], tuple[Columns, Floats]] | None = None  # further fields
    settings: Mapping[str, Any] = field(default_factory=dict)
    shuffled: bool = False  # whether the rows are split into 20 random parts instead of days
    due: tuple[str, ...] = ()  # warnings that must be given
    may: tuple[str, ...] = ()  # warnings that may be given


# further fields: (random generator, labels, day of each row, number of days) -> columns, log likelihood ratio


def no_ratio(labels: Ids) -> Floats:
    return np.zeros(len(labels))


def leak(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return a field that equals the label in 99 % of the rows."""
    value = labels ^ (rng.random(len(labels)) < 0.01)
    return {"leak": value + FIRST_ID}, np.where(value == 1, 1, -1) * math.log(99)


def leaking_pair(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return two random bits whose exclusive or is the label."""
    one = rng.integers(2, size=len(labels))
    return {"one": one + FIRST_ID, "two": (one ^ labels) + FIRST_ID}, np.where(labels == 1, 30.0, -30.0)


def only_after_click(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return a field that has a value in a third of the positive rows, and in no other row."""
    known = (labels == 1) & (rng.random(len(labels)) < 1 / 3)
    values = rng.integers(VALUES, size=len(labels)) + FIRST_ID
    return {"after": np.where(known, values, 0)}, np.where(known, 30.0, math.log(2 / 3))


def near_unique(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    return {"request": rng.integers(100_000, size=len(labels)) + FIRST_ID}, no_ratio(labels)


def two_near_unique(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    columns = {name: rng.integers(60_000, size=len(labels)) + FIRST_ID for name in ("request", "session")}
    return columns, no_ratio(labels)


def many_values(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return noise with 1,000 values, about ten rows each: not near-unique."""
    return {"city": rng.integers(1000, size=len(labels)) + FIRST_ID}, no_ratio(labels)


def new_values(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return a field with 30 values of its own on every day."""
    return {"campaign": day * 30 + rng.integers(30, size=len(labels)) + FIRST_ID}, no_ratio(labels)


def other_frequencies(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return a field whose first value becomes frequent on the last two days."""
    first = rng.random(len(labels)) < np.where(day >= days - 2, 0.8, 0.1)
    return {"browser": np.where(first, 0, rng.integers(1, VALUES, size=len(labels))) + FIRST_ID}, no_ratio(labels)


def missing_values(rng: np.random.Generator, labels: Ids, day: Ids, days: int) -> tuple[Columns, Floats]:
    """Return a field that is missing at random in 60 % of the rows."""
    values = rng.integers(VALUES, size=len(labels)) + FIRST_ID
    return {"rarely known": np.where(rng.random(len(labels)) < 0.6, 0, values)}, no_ratio(labels)


KINDS: dict[str, Kind] = {
    "clear": Kind(),
    "graded": Kind(effects=(1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08), noise=4),
    "all matter": Kind(effects=(0.5,) * 10, noise=0),
    "weak": Kind(effects=(0.2, 0.15, 0.1), noise=9),
    "no signal": Kind(effects=(), noise=10),
    "copies": Kind(copies=0.95, noise=4),
    "equal copies": Kind(copies=1.0, noise=4, may=("same column",)),
    "many rows": Kind(rows=30_000, days=24),
    "many small days": Kind(rows=12_000, days=60),
    "random parts": Kind(rows=6_000, days=20, shuffled=True),
    "few positives": Kind(intercept=-5.5, due=("few positives",)),
    "rare": Kind(intercept=-3.5, effects=(1.0, 0.8, 0.6)),
    "mostly positive": Kind(intercept=3.5, effects=(1.0, 0.8, 0.6)),
    "leak": Kind(extra=leak, due=("leak",)),
    "leaking pair": Kind(extra=leaking_pair, due=("leak",)),
    "only after the click": Kind(extra=only_after_click, due=("leak",)),
    "near-unique": Kind(extra=near_unique, due=("near unique",)),
    "two near-unique": Kind(extra=two_near_unique, due=("near unique",)),
    "many values": Kind(extra=many_values),
    "new values": Kind(extra=new_values, due=("drift",)),
    "other frequencies": Kind(extra=other_frequencies, due=("drift",)),
    "fading effects": Kind(fading=True),
    "missing values": Kind(extra=missing_values),
    "too few kept": Kind(effects=(0.6,) * 6, noise=6, settings={"keep": 3}),
    "many kept": Kind(settings={"keep": 8}),
    "given allowance": Kind(settings={"max_auc_loss": 0.01}),
}


def draw(kind: Kind, tables: Floats, rng: np.random.Generator, day: Ids) -> tuple[Columns, Floats, Ids]:
    """Return the ids of every field, the probability of a click given all of them, and the labels.

    ``tables`` (fields, values) are the terms of the logit; ``day`` is the day of each row.
    """
    rows, count = len(day), len(kind.effects)
    values = rng.integers(VALUES, size=(rows, count + kind.noise))
    terms = tables[np.arange(count), values[:, :count]] if count else np.zeros((rows, 0))
    if kind.fading:
        terms[:, ::2] *= 1 - day[:, None] / (kind.days - 1)
    logit = kind.intercept + terms.sum(1)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    columns = {f"f{number:02}": values[:, number] + FIRST_ID for number in range(count + kind.noise)}
    if kind.copies:
        for number in range(count):
            is_equal = rng.random(rows) < kind.copies
            other = rng.integers(VALUES, size=rows)
            columns[f"copy{number:02}"] = np.where(is_equal, values[:, number], other) + FIRST_ID
    if kind.extra is not None:
        more, ratio = kind.extra(rng, labels, day, kind.days)
        columns, logit = columns | more, logit + ratio
    return columns, 1 / (1 + np.exp(-logit)), labels


def write_log(out: Path, columns: Columns, labels: Ids, day: Ids, sizes: Mapping[str, int], settings: Record) -> Any:
    """Write a Dataset with these fields."""
    from lpfs.data.dataset import Dataset
    from lpfs.data.store.writer import DatasetWriter
    from lpfs.schema import Field, Schema

    schema = Schema(tuple(Field(name, cardinality=size) for name, size in sizes.items()), label="click")
    with DatasetWriter(out, schema, fingerprint=str(out), settings=settings) as writer:
        for number in np.unique(day):
            rows = day == number
            ids = {name: column[rows] for name, column in columns.items()}
            writer.day(f"{number:02}").append(ids=ids, labels={"click": labels[rows].astype(np.float32)})
    return Dataset(out)


def run(name: str, seed: int) -> Record:
    """Run select on one log and compare its verdict and warnings with the truth."""
    import torch

    from lpfs.pipeline import select as select_module, stages

    torch.set_num_threads(1)
    kind, started = KINDS[name], time.perf_counter()
    rng = np.random.default_rng([list(KINDS).index(name), seed])
    tables = rng.normal(size=(len(kind.effects), VALUES))
    tables -= tables.mean(1, keepdims=True)
    tables *= (np.array(kind.effects) / tables.std(1))[:, None] if len(tables) else 1
    day = np.arange(kind.rows) * kind.days // kind.rows
    columns, _, labels = draw(kind, tables, rng, day)
    # every id that can occur has a row in the tables of the model, as after hashing
    sizes = dict.fromkeys(columns, FIRST_ID + VALUES) | {
        key: FIRST_ID + size
        for key, size in (("request", 100_000), ("session", 60_000), ("city", 1000), ("campaign", 30 * kind.days))
        if key in columns
    }
    models: Record = {}

    def keep_full(*arguments: Any) -> Any:
        models["full"] = all_fields(*arguments)
        return models["full"]

    all_fields, stages.all_fields = stages.all_fields, keep_full  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = {"options": {"shuffle": True}} if kind.shuffled else {}
            log = write_log(Path(folder) / "log", columns, labels, day, sizes, settings)
            outcome = select_module.select(log, Path(folder) / "run", **{**SETTINGS, **kind.settings, "seed": seed})
        finally:
            stages.all_fields = all_fields
        models["kept"] = outcome.model
        true = {}
        for period in ("valid", "test"):
            first, last = (int(text) for text in outcome.record["splits"][period]["days"])
            fresh_day = np.sort(rng.integers(first, last + 1, size=FRESH_ROWS))
            fresh, probability, drawn = draw(kind, tables, rng, fresh_day)
            rows = write_log(Path(folder) / period, fresh, drawn, fresh_day, sizes, {})
            true[period] = {key: true_auc(model, rows, probability) for key, model in models.items()}
    return describe(name, kind, seed, outcome, true) | {"seconds": round(time.perf_counter() - started, 1)}


def true_auc(model: Any, rows: Any, probability: Floats) -> float:
    """Return the AUC of the predictions if every row is a click with its true probability."""
    from lpfs.train.evaluate import predictions
    from lpfs.train.metrics import auc

    logits = predictions(model, rows.stream(8192, fields=model.reads.names)).logits[:, 0]
    return auc(logits, probability) or 0.5


def describe(name: str, kind: Kind, seed: int, outcome: Any, true: Mapping[str, Mapping[str, float]]) -> Record:
    """Return what is known about a run, as JSON values."""
    record, verdict = outcome.record, outcome.verdict
    losses = {period: values["full"] - values["kept"] for period, values in true.items()}
    given = {warning["kind"]: warning["fields"] for warning in record["warnings"]}
    labels = [record["splits"][period] for period in ("valid", "test")]
    fewest = min(min(part["positives"], part["rows"] - part["positives"]) for part in labels)
    due = {warning: warning in kind.due for warning in CHECKED if warning not in kind.may}
    due["few positives"] = fewest < 50
    return {
        "kind": name,
        "seed": seed,
        "kept": list(outcome.kept),
        "total": len(outcome.selection.names),
        "true_auc": true["test"]["full"],
        "true_loss": losses["test"],
        "true_validation_loss": losses["valid"],
        "loss": verdict["loss"],
        "low": verdict["low"],
        "high": verdict["high"],
        "verdict": verdict["kind"],
        "text": verdict["text"],
        "allowed": verdict["allowed"],
        "finds_count": "keep" not in kind.settings,
        "tries": len(verdict["checks"]),
        "holds": verdict["checks"][-1]["holds"],
        "fewest": fewest,
        "warnings": given,
        "due": due,
    }


def share(hits: int, runs: int) -> Record:
    """Return a share with its 95 % interval (Wilson)."""
    if not runs:
        return {"hits": 0, "runs": 0}
    z, p = 1.96, hits / runs
    middle, width = p + z * z / (2 * runs), z * math.sqrt(p * (1 - p) / runs + z * z / (4 * runs * runs))
    low, high = ((middle + sign * width) / (1 + z * z / runs) for sign in (-1, 1))
    return {"hits": hits, "runs": runs, "share": round(p, 4), "low": round(low, 4), "high": round(high, 4)}


def summarize(records: Sequence[Record]) -> Record:
    """Return coverage, kept promises and warnings over all runs, and by kind."""
    # if all fields are kept, both models are equal and the interval cannot miss
    smaller = [record for record in records if record["low"] is not None and len(record["kept"]) < record["total"]]
    judged, few = ([record for record in smaller if (record["fewest"] < 50) == is_few] for is_few in (False, True))
    found = [record for record in records if record["finds_count"]]
    held = [record for record in found if record["holds"]]
    enough = [record for record in records if record["verdict"] == "enough"]
    costs = [record for record in records if record["verdict"] == "costs"]

    def is_covered(record: Record) -> bool:
        return bool(record["low"] <= record["true_loss"] <= record["high"])

    def count(values: Sequence[Record], test: Callable[[Record], bool]) -> Record:
        return share(sum(map(test, values)), len(values))

    warnings: dict[str, Record] = {}
    for kind in CHECKED:
        known = [record for record in records if kind in record["due"]]
        for label, is_due in (("due and given", True), ("not due and given", False)):
            some = [record for record in known if record["due"][kind] == is_due]
            given = sum(kind in record["warnings"] for record in some)
            warnings.setdefault(kind, {})[label] = share(given, len(some))
    by_kind = {}
    for name in dict.fromkeys(record["kind"] for record in records):
        some = [record for record in records if record["kind"] == name]
        by_kind[name] = {
            "runs": len(some),
            "covered": sum(is_covered(record) for record in some if record["low"] is not None),
            "verdicts": {
                kind: sum(record["verdict"] == kind for record in some) for kind in ("enough", "costs", "not decided")
            },
            "fields": f"{np.mean([len(record['kept']) for record in some]):.1f} of {some[0]['total']}",
            "true_loss": round(float(np.mean([record["true_loss"] for record in some])), 5),
            "allowed": round(float(np.mean([record["allowed"] or 0 for record in some])), 5),
            "holds": sum(record["holds"] for record in some),
            "given": {
                kind: sum(kind in record["warnings"] for record in some)
                for kind in sorted({k for r in some for k in r["warnings"]})
            },
        }
    return {
        "runs": len(records),
        "true loss in the printed interval, 50 rows of each class or more": count(judged, is_covered),
        "true loss in the interval, fewer rows": count(few, is_covered),
        "allowed loss holds on the validation rows": share(len(held), len(found)),
        "or a warning says that it does not": count(found, lambda r: r["holds"] or "allowance" in r["warnings"]),
        "true loss is allowed where the check holds": count(held, lambda r: r["true_validation_loss"] <= r["allowed"]),
        "true loss is allowed where fields are called enough": count(enough, lambda r: r["true_loss"] <= r["allowed"]),
        "true loss above 0 where fields are said to cost": count(costs, lambda r: r["true_loss"] > 0),
        "warnings": warnings,
        "kinds": by_kind,
    }


def main() -> None:
    """Do the missing runs and summarize all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verdicts.json"))
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind")
    parser.add_argument("--first", type=int, default=200, help="first seed; thresholds were chosen on 0, 1, 100 to 109")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--only", action="append", choices=KINDS, help="a kind; repeatable")
    options = parser.parse_args()
    lines = options.out.with_suffix(".jsonl")
    lines.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []
    done = {(record["kind"], record["seed"]) for record in records}
    names = options.only or list(KINDS)
    left = [
        (name, seed)
        for seed in range(options.first, options.first + options.seeds)
        for name in names
        if (name, seed) not in done
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(options.jobs) as pool, lines.open("a", encoding="utf-8") as file:
        futures = [pool.submit(run, *case) for case in left]
        for number, future in enumerate(as_completed(futures), 1):
            record = future.result()
            records.append(record)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            covered = record["low"] is not None and record["low"] <= record["true_loss"] <= record["high"]
            loss = f"true loss {record['true_loss']:.5f}{'' if covered else ' (outside)'}"
            given = ", ".join(record["warnings"])
            print(
                f"{number}/{len(left)} {record['kind']} {record['seed']}: {record['text']}; {loss}; {given}", flush=True
            )
    records.sort(key=lambda record: (list(KINDS).index(record["kind"]), record["seed"]))
    summary = summarize(records)
    options.out.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps({key: value for key, value in summary.items() if key != "kinds"}, indent=1))
    for name, values in summary["kinds"].items():
        print(f"{name:22} {values}")


if __name__ == "__main__":
    main()
