"""Summary of a comparison, as in comparison.json: quality, confidence, overlap, cost, kinds of kept fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Literal, cast

import numpy as np

from lpfs._fileio import check_files
from lpfs.compare import statistics
from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan
from lpfs.compare.run_dir import COST_SCHEMA, TRUE_KINDS, Record, ResultStore, read_result
from lpfs.compare.statistics import Floats, SeedSeries, SeedValue, paired_difference, summarize
from lpfs.data.simulate import is_simulated
from lpfs.methods.registry import METHODS
from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.results import versions
from lpfs.report.comparison_data import FORMAT

REFERENCE_METHOD = "lpfs++"  # every method is compared with it, besides the best one
NOT_RANKED = ("oracle",)  # it knows the truth, so it is never the best method
DAMAGED_ADVICE = "restore it from a copy, or compare again in another directory"
TRUE_LABELS, SAMPLED_LABELS = "true probabilities", "sampled labels"  # what test rows are scored against
UNKNOWN_CODE = "not recorded"  # digest of the code of a result that does not state it

# name in comparison.json -> name in the details of a search
SEARCH_FACTS = {"own_count": "own_count", "steps": "steps", "rows_forward": "forwards", "rows_backward": "backwards"}

Metric = Literal["auc", "logloss"]


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``; ``values`` are those of ``comparison.json``, see docs/compare.md."""

    folder: Path
    values: Record

    @property
    def best(self) -> str | None:
        """The method with the largest area under the K-AUC curve."""
        return cast("str | None", self.values["best"])

    @property
    def methods(self) -> Mapping[str, Record]:
        """The record of each method, the best one first, unranked ones last."""
        return cast(Mapping[str, Record], self.values["methods"])

    @property
    def results(self) -> Sequence[Record]:
        """One record per method, K and seed."""
        return cast(Sequence[Record], self.values["results"])


class LoadedResults:
    """All results of a comparison, with bootstrap draws of their metrics."""

    def __init__(self, store: ResultStore) -> None:
        order = {name: number for number, name in enumerate((ALL_FIELDS, *METHODS))}
        records = sorted(store.results(), key=itemgetter("method", "keep", "seed"))
        self.all = sorted(records, key=lambda record: order.get(record["method"], len(order)))
        self.done = [record for record in self.all if record["status"] == "done"]
        for checksum in {record["labels"] for record in self.done}:
            check_files(store.directory, {store.labels.name: checksum}, DAMAGED_ADVICE)
        for files in {record["trained"]: record["files"] for record in self.done}.values():
            check_files(store.directory / "trained", files, DAMAGED_ADVICE)
        self.draws = bootstrap_all(store, sorted({record["trained"] for record in self.done}))
        searched = [record for record in self.all if record["method"] != ALL_FIELDS]
        self.methods = list(dict.fromkeys(record["method"] for record in searched))
        self.sizes = sorted({record["keep"] for record in searched})
        self.seeds = sorted({record["seed"] for record in self.all})
        costs = {seed: read_result(store.seed(seed) / "cost.json", COST_SCHEMA) for seed in self.seeds}
        self.pretraining = {seed: cost for seed, cost in costs.items() if cost is not None}

    def of(self, method: str, keep: int | None = None) -> list[Record]:
        """Return the results of a method, for one K or for all, in the order of the seeds."""
        return [record for record in self.done if record["method"] == method and keep in (None, record["keep"])]

    def series(self, method: str, keep: int | None = None, metric: Metric = "auc") -> SeedSeries:
        """Return the test AUC, or the test logloss, of every seed."""
        return {
            record["seed"]: SeedValue(record["test"][metric], self.draws[record["trained"]][metric])
            for record in self.of(method, keep)
        }

    def areas(self, method: str) -> SeedSeries:
        """Return the area under the K-AUC curve of every seed."""
        return statistics.curve_areas({size: self.series(method, size) for size in self.sizes})


def bootstrap_all(store: ResultStore, names: Sequence[str]) -> dict[str, dict[Metric, Floats]]:
    """Return AUC and logloss under every bootstrap draw, for every set of fields that was trained."""
    if not names:
        return {}
    labels = np.load(store.labels)
    logits = [np.load(store.directory / "trained" / f"{name}.npy") for name in names]
    aucs, losses = statistics.bootstrap(logits, labels)
    return {name: {"auc": aucs[:, number], "logloss": losses[:, number]} for number, name in enumerate(names)}


def summarize_comparison(
    store: ResultStore, base: RunPlan, plan: ComparisonPlan, kinds: Mapping[str, str], fingerprint: str
) -> Comparison:
    """Return the comparison of all results so far."""
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    area = {name: mean(point.value for point in series.values()) for name, series in areas.items() if series}
    max_seeds = max(map(len, areas.values()), default=0)  # a mean over fewer seeds is less certain
    too_large = {record["method"] for record in loaded.done if len(record["kept"]) > record["keep"]}
    unranked = [name for name in loaded.methods if name in NOT_RANKED or name in too_large]
    candidates = [name for name in area if len(areas[name]) == max_seeds and name not in unranked]
    best = max(candidates, key=lambda name: area[name], default=None)
    order = sorted(loaded.methods, key=lambda name: (name in unranked, -area.get(name, -2.0)))
    kinds = {name: kind for name, kind in kinds.items() if name in set(base.schema.names)}
    values = {
        "format": FORMAT,
        "best": best,
        "unranked": unranked,
        "sizes": loaded.sizes,
        "seeds": loaded.seeds,
        "fields": len(base.schema),
        "all_fields": {
            "auc": summarize(loaded.series(ALL_FIELDS)),
            "logloss": summarize(loaded.series(ALL_FIELDS, metric="logloss")),
        },
        "methods": {name: summarize_method(loaded, name, best, areas, kinds) for name in order},
        "results": [flatten_record(record, kinds) for record in loaded.all],
        "pretraining": {str(seed): cost for seed, cost in loaded.pretraining.items()},
        "kinds": dict(Counter(kinds.values())),
        "plan": plan.to_json(),
        "settings": base.settings.to_json(),
        "steps": base.steps.to_json(),
        "splits": base.splits.to_json(),
        "fingerprint": fingerprint,
        "test_labels": TRUE_LABELS if is_simulated(base.dataset) else SAMPLED_LABELS,
        "bootstrap_draws": statistics.BOOTSTRAP_DRAWS,
        "code": source_versions(loaded.done),
        "versions": versions(),
    }
    return Comparison(store.directory, json.loads(json.dumps(values)))


def source_versions(records: Sequence[Record]) -> dict[str, dict[str, list[str]]]:
    """Return digest of the source code -> the methods that it searched with, and those that it trained for."""
    methods: dict[str, dict[str, set[str]]] = {}
    for record in records:
        searches = [("search", record["search"])] if "search" in record else []
        for stage, values in [*searches, ("trained", record)]:
            digest = values.get("code") or UNKNOWN_CODE
            methods.setdefault(digest, {"search": set(), "trained": set()})[stage].add(record["method"])
    return {
        digest: {stage: sorted(names) for stage, names in by_stage.items()}
        for digest, by_stage in sorted(methods.items())
    }


def summarize_method(
    loaded: LoadedResults, name: str, best: str | None, areas: Mapping[str, SeedSeries], kinds: Mapping[str, str]
) -> Record:
    """Return the summary of one method."""
    rivals = {"best": best, REFERENCE_METHOD: REFERENCE_METHOD if REFERENCE_METHOD in areas else None}
    others = {key: rival for key, rival in rivals.items() if rival is not None and rival != name}
    sizes: dict[str, Record] = {}
    for size in loaded.sizes:
        records = loaded.of(name, size)
        if not records:
            continue
        auc, logloss = loaded.series(name, size), loaded.series(name, size, "logloss")
        sizes[str(size)] = {
            "auc": summarize(auc),
            "logloss": summarize(logloss),
            "validation_auc": mean(record["validation"]["auc"] for record in records),
            "count": mean(len(record["kept"]) for record in records),
            "overlap": statistics.mean_jaccard([record["kept"] for record in records]),
            "differences": {key: paired_difference(auc, loaded.series(other, size)) for key, other in others.items()},
            "logloss_differences": {
                key: paired_difference(logloss, loaded.series(other, size, "logloss"), lower_is_better=True)
                for key, other in others.items()
            },
            **kind_metrics(records, kinds),
        }
    overlaps = [values["overlap"] for values in sizes.values() if values["overlap"] is not None]
    failed = [record for record in loaded.all if record["method"] == name and record["status"] == "failed"]
    return {
        "area": summarize(areas[name]),
        "differences": {key: paired_difference(areas[name], areas[other]) for key, other in others.items()},
        "sizes": sizes,
        "overlap": mean(overlaps) if overlaps else None,
        "search": {**search_costs(loaded, name), **search_facts(loaded.of(name))},
        "trials": max((len(record["trials"]) for record in loaded.of(name)), default=0),
        "options_used": dict(Counter(json.dumps(record["options"], sort_keys=True) for record in loaded.of(name))),
        "failed": [{key: record[key] for key in ("keep", "seed", "reason")} for record in failed],
    }


def kind_metrics(records: Sequence[Record], kinds: Mapping[str, str]) -> Record:
    """Return mean recall, false positives and kept fields by kind; nothing if the truth is unknown."""
    true = {name for name, kind in kinds.items() if kind in TRUE_KINDS}
    sets = [set(record["kept"]) for record in records]
    if not true or not all(kept <= set(kinds) for kept in sets):
        return {}
    counts = [Counter(kinds[name] for name in kept) for kept in sets]
    return {
        "recall": mean(statistics.recall(kept, true) for kept in sets),
        "false_positives": mean(len(kept - true) for kept in sets),
        "kept_by_kind": {kind: mean(count[kind] for count in counts) for kind in dict.fromkeys(kinds.values())},
    }


def search_costs(loaded: LoadedResults, name: str) -> Record:
    """Return seconds and memory of a search, also relative to pretraining (seconds per epoch, peak memory)."""
    searches = {
        (record["seed"], None if record["search"]["shared_by_all_k"] else record["keep"]): record["search"]
        for record in loaded.of(name)
    }
    seconds, memory = (median_cost(searches.values(), key) for key in ("seconds", "memory"))
    pretraining = [
        {**cost, "epoch": cost["seconds"] and cost["seconds"] / cost["passes"]} for cost in loaded.pretraining.values()
    ]
    epoch, peak = (median_cost(pretraining, key) for key in ("epoch", "memory"))
    return {
        "seconds": seconds,
        "epochs": seconds / epoch if seconds is not None and epoch else None,
        "memory": memory,
        "memory_ratio": memory / peak if memory is not None and peak else None,
        "shared_by_all_k": bool(searches) and all(keep is None for _, keep in searches),
    }


def search_facts(records: Sequence[Record]) -> Record:
    """Return the mean number of steps of a search, of rows that went forward and backward, and of the method's own K.

    The last one is None for methods that only rank, or that were asked for K and have no count of their own.
    """
    details = [record["search"].get("details") or {} for record in records]
    means = {}
    for name, key in SEARCH_FACTS.items():
        known = [float(values[key]) for values in details if values.get(key) is not None]
        means[name] = mean(known) if known else None
    return means


def median_cost(costs: Iterable[Record], key: str) -> float | None:
    """Return the median of a cost, without the first of each process, which includes compilation, if others exist.

    >>> costs = [{"s": 9.0, "first_in_process": True}, {"s": 1.0, "first_in_process": False}]
    >>> median_cost(costs, "s")
    1.0
    """
    known = [cost for cost in costs if cost[key] is not None]
    warm = [cost[key] for cost in known if not cost["first_in_process"]]
    values = warm or [cost[key] for cost in known]
    return float(median(values)) if values else None


def flatten_record(record: Record, kinds: Mapping[str, str]) -> Record:
    """Return a result as one row."""
    row = {name: record.get(name) for name in ("method", "keep", "seed", "status")}
    if record["status"] == "failed":
        return {**row, "reason": record["reason"]}
    search = record.get("search", {})
    details = search.get("details") or {}
    by_kind = kind_metrics([record], kinds)
    return {
        **row,
        "auc": record["test"]["auc"],
        "logloss": record["test"]["logloss"],
        "validation_auc": record["validation"]["auc"],
        "validation_logloss": record["validation"]["logloss"],
        "count": len(record["kept"]),
        "search_seconds": search.get("seconds"),
        "search_memory": search.get("memory"),
        "search_steps": details.get("steps"),
        "rows_forward": details.get("forwards"),
        "rows_backward": details.get("backwards"),
        "own_count": details.get("own_count"),
        "search_code": search.get("code"),
        "trained_code": record.get("code"),
        "train_seconds": record["train_seconds"],
        "trials": len(record.get("trials", [])),
        "options": record.get("options", {}),
        **{name: by_kind[name] for name in ("recall", "false_positives") if by_kind},
        "kept": record["kept"],
    }
