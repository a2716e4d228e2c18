"""Comparison: what a report says about several methods, as plain values that any comparison can give.

``Comparison.from_json`` reads ``comparison.json``; keys that it does not know are left alone, so that a comparison
may write down more than a report shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lpfs.errors import InputError

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Result:
    """One search and what its fields are worth.

    Args:
        method: as ``lpfs methods`` calls it.
        keep: how many fields it was told to keep.
        seed: of the search and the training.
        auc: of the kept fields trained from scratch, on the test rows; None where the method failed.
        logloss: on the same rows.
        kept: the fields.
        seconds: of the search.
        memory: bytes at the peak of the search.

    """

    method: str
    keep: int
    seed: int
    auc: float | None
    logloss: float | None = None
    kept: tuple[str, ...] = ()
    seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Difference:
    """What ``method`` has more than ``other``: in AUC at the same number of fields, or in area.

    Args:
        method: the one.
        other: the one it is compared with.
        keep: number of fields; None for the area under the K-AUC curve.
        mean: over seeds.
        low, high: interval over seeds; None where one seed tells nothing.
        p: where a test gave one.
        rows: interval over the test rows.
        verdict: ``ahead``, ``behind``, ``level`` or ``unknown``; found from the interval where nothing is said.

    """

    method: str
    other: str
    keep: int | None
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    rows: tuple[float, float] | None = None
    verdict: str | None = None

    @property
    def said(self) -> str:
        """The verdict."""
        if self.verdict is not None:
            return self.verdict
        if self.low is None or self.high is None:
            return "unknown"
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


@dataclass(frozen=True)
class Comparison:
    """Several methods under one protocol.

    Args:
        results: one for every method, number of fields and seed.
        fields: all fields, in the order of the table.
        name: as the page calls it.
        all_fields: test AUC of all fields.
        differences: to the best method, or to another one that matters; paired over seeds where none are given.
        measures: method -> name of a measure -> value, as the area under the K-AUC curve.
        failed: method -> why it gave no result, or not all of them.
        order: the methods, the best first; by their mean AUC where nothing is said.
        aside: methods that stand beside the others, as one that knows the truth: never the best.
        said: command, configuration, fingerprint, versions, seconds.

    """

    results: tuple[Result, ...]
    fields: tuple[str, ...] = ()
    name: str = "comparison"
    all_fields: float | None = None
    differences: tuple[Difference, ...] = ()
    measures: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    said: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.results:
            raise InputError("a comparison needs at least one result")

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that gave a result, the best first."""
        found: dict[str, list[float]] = {}
        for each in self.results:
            if each.auc is not None:
                found.setdefault(each.method, []).append(each.auc)
        place = {name: number for number, name in enumerate(self.order)}
        means = {name: sum(each) / len(each) for name, each in found.items()}
        return tuple(sorted(found, key=lambda name: (place.get(name, len(place)), -means[name])))

    @property
    def fair(self) -> tuple[str, ...]:
        """The methods that may be called the best."""
        return tuple(name for name in self.methods if name not in self.aside)

    @property
    def keeps(self) -> tuple[int, ...]:
        """The numbers of fields, in order."""
        return tuple(sorted({each.keep for each in self.results}))

    def aucs(self, method: str, keep: int) -> dict[int, float]:
        """Return seed -> AUC."""
        found = self.of(method, keep)
        return {each.seed: each.auc for each in found if each.auc is not None}

    def of(self, method: str, keep: int | None = None) -> list[Result]:
        """Return the results of a method, at a number of fields or at all."""
        return [each for each in self.results if each.method == method and keep in (None, each.keep)]

    @classmethod
    def from_json(cls, values: Mapping[str, Any], name: str = "comparison") -> Comparison:
        """Build a comparison from plain values."""
        if not isinstance(values, Mapping) or not isinstance(values.get("results"), list):
            raise InputError(f"{COMPARISON} holds no list of results")
        results = tuple(
            Result(**{**each, "kept": tuple(each.get("kept") or ())}) for each in known(Result, values["results"])
        )
        names = values.get("fields") or dict.fromkeys(one for each in results for one in each.kept)
        own = {"all_fields", "measures", "failed"} & set(values)
        return cls(
            results=results,
            fields=tuple(names),
            name=name,
            differences=tuple(Difference(**each) for each in known(Difference, values.get("differences") or [])),
            said={key: value for key, value in values.items() if key not in ("results", "differences")},
            **{key: values[key] for key in own},
        )


def known(kind: type, given: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what a dataclass knows of each of some values."""
    names = {each.name for each in fields(kind)}
    return [{key: value for key, value in each.items() if key in names} for each in given]
