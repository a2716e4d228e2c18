"""Series: one number a seed, with its draws over the test rows; means, differences, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from lpfs.compare.bootstrap import Floats, over_rows
from lpfs.compare.statistics import Interval, curve_weights, over_seeds, verdict


@dataclass(frozen=True)
class Point:
    """A number, and what it is under every draw of the test rows."""

    value: float
    drawn: Floats


Series = Mapping[int, Point]  # by seed


def told(series: Series) -> dict[str, Any] | None:
    """Return the mean over seeds, with its intervals over seeds and over rows; None where there is nothing."""
    if not series:
        return None
    values = {seed: each.value for seed, each in series.items()}
    seeds, rows = intervals(series)
    return {
        "value": mean(values.values()),
        "seeds": None if seeds is None else seeds.to_json(),
        "rows": None if rows is None else rows.to_json(),
        "by_seed": {str(seed): value for seed, value in values.items()},
    }


def intervals(series: Series) -> tuple[Interval | None, Interval | None]:
    """Return how sure the mean is: over seeds, and over rows."""
    values = [each.value for each in series.values()]
    return over_seeds(values), over_rows(mean(values), np.mean([each.drawn for each in series.values()], axis=0))


def against(series: Series, other: Series, *, less: bool = False) -> dict[str, Any] | None:
    """Return the difference to another series, paired by seed and by row, and whether it is beyond noise.

    ``less`` says that less is better, as of a loss.
    """
    pairs = [(seed, each, other[seed]) for seed, each in series.items() if seed in other]
    apart = {seed: Point(one.value - two.value, one.drawn - two.drawn) for seed, one, two in pairs}
    found = told(apart)
    if found is None:
        return None
    better = {seed: Point(-each.value, -each.drawn) for seed, each in apart.items()} if less else apart
    return {**found, "verdict": verdict(*intervals(better))}


def areas(curves: Mapping[int, Series]) -> dict[int, Point]:
    """Return the area under the K-AUC curve of every seed that has all of the sizes; ``curves`` are by K."""
    weights = curve_weights(list(curves))
    seeds = [seed for seed in next(iter(curves.values())) if all(seed in each for each in curves.values())]
    found = {}
    for seed in seeds:
        points = [(weights[size], each[seed]) for size, each in curves.items()]
        value = sum(weight * (point.value - 0.5) / 0.5 for weight, point in points)
        drawn = np.sum([weight * (point.drawn - 0.5) / 0.5 for weight, point in points], axis=0)
        found[seed] = Point(value, drawn)
    return found
