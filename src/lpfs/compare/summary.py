"""From results to a comparison: how good, how sure, how alike, how dear, and what was picked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from lpfs.compare import statistics
from lpfs.compare.bootstrap import DRAWS
from lpfs.compare.loaded import Loaded
from lpfs.compare.plan import ALL_FIELDS, Plan
from lpfs.compare.series import Series, against, told
from lpfs.compare.store import Record, Store
from lpfs.compare.truth import TRUE
from lpfs.pipeline.results import versions
from lpfs.pipeline.stages import Work

OURS = "lpfs++"
UNKNOWN = "not written down"  # which code made a result, before results said so
CEILING = ("oracle",)  # knows the truth: never the best of the methods


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


def summarise(store: Store, base: Work, plan: Plan, kinds: Mapping[str, str], fingerprint: str) -> Comparison:
    """Return the comparison of all results that are there."""
    loaded = Loaded(store)
    whole = {name: loaded.areas(name) for name in loaded.methods}
    area = {name: mean(each.value for each in of.values()) for name, of in whole.items() if of}
    most = max((len(each) for each in whole.values()), default=0)  # with fewer seeds a method may just be lucky
    fair = [name for name in area if len(whole[name]) == most and name not in CEILING and within(loaded.of(name))]
    best = max(fair, key=lambda name: area[name], default=None)
    aside = [name for name in loaded.methods if name in CEILING or not within(loaded.of(name))]
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
            "auc": told(loaded.series(ALL_FIELDS)),
            "logloss": told(loaded.series(ALL_FIELDS, of="logloss")),
        },
        "methods": {name: method(loaded, name, best, whole, kinds) for name in order},
        "results": [flat(each, kinds) for each in loaded.all],
        "pretraining": {str(seed): each for seed, each in loaded.pretraining.items()},
        "kinds": dict(Counter(kinds.values())),
        "plan": plan.to_json(),
        "settings": base.settings.to_json(),
        "recipe": base.recipe.to_json(),
        "periods": base.parts.to_json(),
        "fingerprint": fingerprint,
        "draws": DRAWS,
        "code": states(loaded.done),
        "versions": versions(),
    }
    return Comparison(store.folder, json.loads(json.dumps(values)))


def states(records: Sequence[Record]) -> dict[str, dict[str, list[str]]]:
    """Return which state of the code made what: its digest, and the methods it searched with and trained for."""
    found: dict[str, dict[str, set[str]]] = {}
    for each in records:
        own = [("search", each["search"])] if "search" in each else []
        for what, record in [*own, ("trained", each)]:
            digest = record.get("code") or UNKNOWN
            found.setdefault(digest, {"search": set(), "trained": set()})[what].add(each["method"])
    return {digest: {what: sorted(names) for what, names in of.items()} for digest, of in sorted(found.items())}


def within(records: Sequence[Record]) -> bool:
    """Whether a method kept to what was asked for."""
    return all(len(each["kept"]) <= each["keep"] for each in records)


def method(
    loaded: Loaded, name: str, best: str | None, whole: Mapping[str, Series], kinds: Mapping[str, str]
) -> Record:
    """Return all that is told of one method."""
    rivals = {"best": best, OURS: OURS if OURS in whole else None}
    sizes = {}
    for size in loaded.sizes:
        records = loaded.of(name, size)
        if not records:
            continue
        own = loaded.series(name, size)
        sizes[str(size)] = {
            "auc": told(own),
            "logloss": told(loaded.series(name, size, "logloss")),
            "validation_auc": average(records, lambda each: each["validation"]["auc"]),
            "count": average(records, lambda each: len(each["kept"])),
            "overlap": statistics.overlap([each["kept"] for each in records]),
            "against": {
                key: against(own, loaded.series(rival, size))
                for key, rival in rivals.items()
                if rival not in (None, name)
            },
            "logloss_against": {
                key: against(
                    loaded.series(name, size, "logloss"), loaded.series(rival, size, "logloss"), less=True
                )
                for key, rival in rivals.items()
                if rival not in (None, name)
            },
            **picked(records, kinds),
        }
    overlaps = [each["overlap"] for each in sizes.values() if each["overlap"] is not None]
    failed = [each for each in loaded.all if each["method"] == name and each["status"] == "failed"]
    return {
        "area": told(whole[name]),
        "against": {
            key: against(whole[name], whole[rival]) for key, rival in rivals.items() if rival not in (None, name)
        },
        "sizes": sizes,
        "overlap": mean(overlaps) if overlaps else None,
        "search": searching(loaded, name),
        "tried": max((len(each["tried"]) for each in loaded.of(name)), default=0),
        "used": dict(Counter(json.dumps(each["options"], sort_keys=True) for each in loaded.of(name))),
        "failed": [{key: each[key] for key in ("keep", "seed", "reason")} for each in failed],
    }


def average(records: Sequence[Record], value: Callable[[Record], float]) -> float | None:
    """Return the mean of something over results."""
    return mean(map(value, records)) if records else None


def picked(records: Sequence[Record], kinds: Mapping[str, str]) -> Record:
    """Return recall, false picks and the kinds of what was kept, on average; nothing where no truth is known."""
    true = [name for name, kind in kinds.items() if kind in TRUE]
    if not true or not all(set(each["kept"]) <= set(kinds) for each in records):
        return {}
    counts = [statistics.picks(each["kept"], kinds) for each in records]
    return {
        "recall": average(records, lambda each: statistics.recall(each["kept"], true)),
        "false_picks": average(records, lambda each: statistics.false_picks(each["kept"], true)),
        "picks": {kind: mean(each[kind] for each in counts) for kind in counts[0]},
    }


def searching(loaded: Loaded, name: str) -> Record:
    """Return what a search costs: seconds and memory, and both relative to pretraining (one epoch of it)."""
    searches = {
        (each["seed"], None if each["search"]["once"] else each["keep"]): each["search"]
        for each in loaded.of(name)
    }
    seconds, memory = (usual(searches.values(), key) for key in ("seconds", "memory"))
    base = loaded.pretraining.values()
    epoch = usual(
        [{**each, "seconds": each["seconds"] and each["seconds"] / each["passes"]} for each in base], "seconds"
    )
    peak = usual(base, "memory")
    return {
        "seconds": seconds,
        "epochs": seconds / epoch if seconds is not None and epoch else None,
        "memory": memory,
        "memory_ratio": memory / peak if memory is not None and peak else None,
        "once": bool(searches) and all(keep is None for _, keep in searches),
    }


def usual(costs: Iterable[Record], key: str) -> float | None:
    """Return the median of a cost; the first of a process, which compiles and loads things, only where it is all.

    >>> usual([{"s": 9.0, "first": True}, {"s": 1.0, "first": False}, {"s": None, "first": False}], "s")
    1.0
    """
    known = [each for each in costs if each[key] is not None]
    warm = [each[key] for each in known if not each["first"]]
    found = warm or [each[key] for each in known]
    return float(median(found)) if found else None


def flat(record: Record, kinds: Mapping[str, str]) -> Record:
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
        **{name: value for name, value in picked([record], kinds).items() if name != "picks"},
        "kept": record["kept"],
    }
