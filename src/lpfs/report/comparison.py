"""Comparison: what a report says about several methods, as plain values that any comparison can give.

``Comparison.from_json`` reads ``comparison.json``; keys that it does not know are left alone, so that a comparison
may write down more than a report shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
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
    """AUC of ``method`` minus that of ``other`` at the same number of fields, with an interval; p where known."""

    method: str
    other: str
    keep: int
    mean: float
    low: float
    high: float
    p: float | None = None

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.low > 0 or self.high < 0


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
        failed: method -> why it gave no result.
        said: command, configuration, fingerprint, versions, seconds.

    """

    results: tuple[Result, ...]
    fields: tuple[str, ...] = ()
    name: str = "comparison"
    all_fields: float | None = None
    differences: tuple[Difference, ...] = ()
    measures: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.results:
            raise InputError("a comparison needs at least one result")

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that gave a result, the best first: by the mean AUC over all numbers of fields and seeds."""
        found: dict[str, list[float]] = {}
        for each in self.results:
            if each.auc is not None:
                found.setdefault(each.method, []).append(each.auc)
        return tuple(sorted(found, key=lambda name: -sum(found[name]) / len(found[name])))

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


def read_comparison(folder: Path) -> Comparison:
    """Read the folder that ``compare`` left."""
    place = folder / COMPARISON
    try:
        return Comparison.from_json(json.loads(place.read_text("utf-8")), folder.resolve().name)
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{place} cannot be read as a comparison: {error}") from None
