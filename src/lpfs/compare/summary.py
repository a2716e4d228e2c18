"""From results to a comparison: how good, how sure, how alike, how dear, and what was picked.

The results of a folder, read back: by method and K, drawn over the test rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Literal

import numpy as np

from lpfs.compare import statistics
from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan
from lpfs.compare.run_dir import TRUE_KINDS, Record, ResultStore, read
from lpfs.compare.statistics import (
    BOOTSTRAP_DRAWS,
    Floats,
    SeedSeries,
    SeedValue,
    bootstrap,
    curve_areas,
    paired_difference,
    summarize,
)
from lpfs.methods.registry import METHODS
from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.results import versions

Measure = Literal["auc", "logloss"]


class LoadedResults:
    """All results of a folder, with their scores drawn over the test rows."""

    def __init__(self, store: ResultStore) -> None:
        self.store = store
        known = {name: number for number, name in enumerate((ALL_FIELDS, *METHODS))}

        def place(each: Record) -> tuple[int, str, int, int]:
            return known.get(each["method"], len(known)), each["method"], each["keep"], each["seed"]

        self.all = sorted(store.results(), key=place)
        self.done = [each for each in self.all if each["status"] == "done"]
        self.drawn = bootstrap_all(store, sorted({each["trained"] for each in self.done}))
        self.sizes = sorted({each["keep"] for each in self.all if each["method"] != ALL_FIELDS})
        self.methods = [name for name in dict.fromkeys(each["method"] for each in self.all) if name != ALL_FIELDS]
        seeds = {each["seed"] for each in self.all}
        costs = {seed: read(store.seed(seed) / "cost.json") for seed in sorted(seeds)}
        self.pretraining = {seed: each for seed, each in costs.items() if each is not None}

    def of(self, method: str, keep: int | None = None) -> list[Record]:
        """Return the results of a method, of one size or of all, in the order of the seeds."""
        return [each for each in self.done if each["method"] == method and keep in (None, each["keep"])]

    def series(self, method: str, keep: int | None = None, of: Measure = "auc") -> SeedSeries:
        """Return the test AUC, or the test logloss, of every seed."""
        return {
            each["seed"]: SeedValue(each["test"][of], self.drawn[each["trained"]][of])
            for each in self.of(method, keep)
        }

    def areas(self, method: str) -> SeedSeries:
        """Return the area under the K-AUC curve of every seed."""
        return curve_areas({size: self.series(method, size) for size in self.sizes})


def bootstrap_all(store: ResultStore, names: Sequence[str]) -> dict[str, dict[Measure, Floats]]:
    """Return, for every set of fields that was trained, AUC and logloss under every draw of the test rows."""
    if not names:
        return {}
    labels = np.load(store.labels)
    if not np.isin(labels, (0, 1)).all():  # no bootstrap of rows that are clicked by halves
        return {name: {"auc": np.full(1, np.nan), "logloss": np.full(1, np.nan)} for name in names}
    scores = [np.load(store.folder / "trained" / f"{name}.npy") for name in names]
    aucs, lost = bootstrap(scores, labels)
    return {name: {"auc": aucs[:, number], "logloss": lost[:, number]} for number, name in enumerate(names)}


REFERENCE_METHOD = "lpfs++"
UNKNOWN = "not written down"  # which code made a result, before results said so
NOT_RANKED = ("oracle",)  # knows the truth: never the best of the methods


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; ``values`` is what ``comparison.json`` holds, see docs/compare.md."""

    folder: Path
    values: Record

    @property
    def best(self) -> str | None:
        """The method with the largest area under the K-AUC curve."""
        found: str | None = self.values["best"]
        return found

    @property
    def methods(self) -> Mapping[str, Record]:
        """What was found of each method, the best first; those that are no rivals (``aside``) last."""
        found: Mapping[str, Record] = self.values["methods"]
        return found

    @property
    def results(self) -> Sequence[Record]:
        """One record a method, K and seed."""
        found: Sequence[Record] = self.values["results"]
        return found


def summarize_comparison(
    store: ResultStore, base: RunPlan, plan: ComparisonPlan, kinds: Mapping[str, str], fingerprint: str
) -> Comparison:
    """Return the comparison of all results that are there."""
    loaded = LoadedResults(store)
    whole = {name: loaded.areas(name) for name in loaded.methods}
    area = {name: mean(each.value for each in of.values()) for name, of in whole.items() if of}
    most = max((len(each) for each in whole.values()), default=0)  # with fewer seeds a method may just be lucky
    fair = [
        name
        for name in area
        if len(whole[name]) == most and name not in NOT_RANKED and kept_as_asked(loaded.of(name))
    ]
    best = max(fair, key=lambda name: area[name], default=None)
    aside = [name for name in loaded.methods if name in NOT_RANKED or not kept_as_asked(loaded.of(name))]
    order = sorted(loaded.methods, key=lambda name: (name in aside, -area.get(name, -2.0)))
    kinds = {name: kind for name, kind in kinds.items() if name in set(base.schema.names)}
    values = {
        "format": "lpfs-comparison",
        "best": best,
        "aside": aside,
        "sizes": loaded.sizes,
        "seeds": sorted({each["seed"] for each in loaded.all}),
        "fields": len(base.schema),
        "all_fields": {
            "auc": summarize(loaded.series(ALL_FIELDS)),
            "logloss": summarize(loaded.series(ALL_FIELDS, of="logloss")),
        },
        "methods": {name: method(loaded, name, best, whole, kinds) for name in order},
        "results": [flatten_record(each, kinds) for each in loaded.all],
        "pretraining": {str(seed): each for seed, each in loaded.pretraining.items()},
        "kinds": dict(Counter(kinds.values())),
        "plan": plan.to_json(),
        "settings": base.settings.to_json(),
        "recipe": base.steps.to_json(),
        "periods": base.splits.to_json(),
        "fingerprint": fingerprint,
        "draws": BOOTSTRAP_DRAWS,
        "code": source_versions(loaded.done),
        "versions": versions(),
    }
    return Comparison(store.folder, json.loads(json.dumps(values)))


def source_versions(records: Sequence[Record]) -> dict[str, dict[str, list[str]]]:
    """Return which state of the code made what: its digest, and the methods it searched with and trained for."""
    found: dict[str, dict[str, set[str]]] = {}
    for each in records:
        own = [("search", each["search"])] if "search" in each else []
        for what, record in [*own, ("trained", each)]:
            digest = record.get("code") or UNKNOWN
            found.setdefault(digest, {"search": set(), "trained": set()})[what].add(each["method"])
    return {digest: {what: sorted(names) for what, names in of.items()} for digest, of in sorted(found.items())}


def kept_as_asked(records: Sequence[Record]) -> bool:
    """Whether a method kept to what was asked for."""
    return all(len(each["kept"]) <= each["keep"] for each in records)


def method(
    loaded: LoadedResults, name: str, best: str | None, whole: Mapping[str, SeedSeries], kinds: Mapping[str, str]
) -> Record:
    """Return all that is told of one method."""
    rivals = {"best": best, REFERENCE_METHOD: REFERENCE_METHOD if REFERENCE_METHOD in whole else None}
    sizes = {}
    for size in loaded.sizes:
        records = loaded.of(name, size)
        if not records:
            continue
        own = loaded.series(name, size)
        sizes[str(size)] = {
            "auc": summarize(own),
            "logloss": summarize(loaded.series(name, size, "logloss")),
            "validation_auc": average(records, lambda each: each["validation"]["auc"]),
            "count": average(records, lambda each: len(each["kept"])),
            "overlap": statistics.mean_jaccard([each["kept"] for each in records]),
            "against": {
                key: paired_difference(own, loaded.series(rival, size))
                for key, rival in rivals.items()
                if rival not in (None, name)
            },
            "logloss_against": {
                key: paired_difference(
                    loaded.series(name, size, "logloss"), loaded.series(rival, size, "logloss"), less=True
                )
                for key, rival in rivals.items()
                if rival not in (None, name)
            },
            **picked_kinds(records, kinds),
        }
    overlaps = [each["overlap"] for each in sizes.values() if each["overlap"] is not None]
    failed = [each for each in loaded.all if each["method"] == name and each["status"] == "failed"]
    return {
        "area": summarize(whole[name]),
        "against": {
            key: paired_difference(whole[name], whole[rival])
            for key, rival in rivals.items()
            if rival not in (None, name)
        },
        "sizes": sizes,
        "overlap": mean(overlaps) if overlaps else None,
        "search": search_costs(loaded, name),
        "tried": max((len(each["tried"]) for each in loaded.of(name)), default=0),
        "used": dict(Counter(json.dumps(each["options"], sort_keys=True) for each in loaded.of(name))),
        "failed": [{key: each[key] for key in ("keep", "seed", "reason")} for each in failed],
    }


def average(records: Sequence[Record], value: Callable[[Record], float]) -> float | None:
    """Return the mean of something over results."""
    return mean(map(value, records)) if records else None


def picked_kinds(records: Sequence[Record], kinds: Mapping[str, str]) -> Record:
    """Return recall, false picks and the kinds of what was kept, on average; nothing where no truth is known."""
    true = [name for name, kind in kinds.items() if kind in TRUE_KINDS]
    if not true or not all(set(each["kept"]) <= set(kinds) for each in records):
        return {}
    counts = [statistics.count_by_kind(each["kept"], kinds) for each in records]
    return {
        "recall": average(records, lambda each: statistics.recall(each["kept"], true)),
        "false_picks": average(records, lambda each: statistics.false_positives(each["kept"], true)),
        "picks": {kind: mean(each[kind] for each in counts) for kind in counts[0]},
    }


def search_costs(loaded: LoadedResults, name: str) -> Record:
    """Return what a search costs: seconds and memory, and both relative to pretraining (one epoch of it)."""
    searches = {
        (each["seed"], None if each["search"]["once"] else each["keep"]): each["search"]
        for each in loaded.of(name)
    }
    seconds, memory = (median_cost(searches.values(), key) for key in ("seconds", "memory"))
    base = loaded.pretraining.values()
    epoch = median_cost(
        [{**each, "seconds": each["seconds"] and each["seconds"] / each["passes"]} for each in base], "seconds"
    )
    peak = median_cost(base, "memory")
    return {
        "seconds": seconds,
        "epochs": seconds / epoch if seconds is not None and epoch else None,
        "memory": memory,
        "memory_ratio": memory / peak if memory is not None and peak else None,
        "once": bool(searches) and all(keep is None for _, keep in searches),
    }


def median_cost(costs: Iterable[Record], key: str) -> float | None:
    """Return the median of a cost; the first of a process, which compiles and loads things, only where it is all.

    >>> usual([{"s": 9.0, "first": True}, {"s": 1.0, "first": False}, {"s": None, "first": False}], "s")
    1.0
    """
    known = [each for each in costs if each[key] is not None]
    warm = [each[key] for each in known if not each["first"]]
    found = warm or [each[key] for each in known]
    return float(median(found)) if found else None


def flatten_record(record: Record, kinds: Mapping[str, str]) -> Record:
    """Return a result as one row."""
    row = {name: record.get(name) for name in ("method", "keep", "seed", "status")}
    if record["status"] == "failed":
        return {**row, "reason": record["reason"]}
    own = record.get("search", {})
    return {
        **row,
        "auc": record["test"]["auc"],
        "logloss": record["test"]["logloss"],
        "validation_auc": record["validation"]["auc"],
        "validation_logloss": record["validation"]["logloss"],
        "count": len(record["kept"]),
        "search_seconds": own.get("seconds"),
        "search_memory": own.get("memory"),
        "train_seconds": record["train_seconds"],
        "tried": len(record.get("tried", [])),
        "options": record.get("options", {}),
        **{name: value for name, value in picked_kinds([record], kinds).items() if name != "picks"},
        "kept": record["kept"],
    }
