"""The measures of a comparison: pure functions of numbers and sets of fields."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import mean, stdev
from typing import Any

# two-sided 95 % points of Student's t with 1, 2, … degrees of freedom, and of the normal distribution
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.960


@dataclass(frozen=True)
class Interval:
    """A value and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"value": self.value, "low": self.low, "high": self.high}


def curve_area(curve: Mapping[int, float]) -> float:
    r"""Return the area under the K-AUC curve, normalised to the range of K: 0 for chance, 1 for certainty.

    .. math:: \frac{1}{K_n - K_1} \sum_i \frac{s_i + s_{i+1}}{2} (K_{i+1} - K_i), \quad s = (AUC - .5)/.5

    With one K it is s itself.

    >>> round(curve_area({5: 0.75, 10: 0.8, 20: 0.8}), 6)
    0.583333
    """
    weights = curve_weights(list(curve))
    return sum(weights[size] * (auc - 0.5) / 0.5 for size, auc in curve.items())


def curve_weights(sizes: Collection[int]) -> dict[int, float]:
    """Return what each K weighs in the area: the trapezoid's weights, 1 in all.

    >>> curve_weights([5, 10, 20])
    {5: 0.16666666666666666, 10: 0.5, 20: 0.3333333333333333}
    """
    order = sorted(sizes)
    if len(order) == 1:
        return {order[0]: 1.0}
    weights = dict.fromkeys(order, 0.0)
    for left, right in pairwise(order):
        share = (right - left) / 2 / (order[-1] - order[0])
        weights[left] += share
        weights[right] += share
    return weights


def jaccard(first: Collection[str], second: Collection[str]) -> float:
    """Return |A ∩ B| / |A ∪ B|; 1 for two empty sets.

    >>> jaccard(["a", "b"], ["b", "c"])
    0.3333333333333333
    """
    one, other = set(first), set(second)
    return len(one & other) / len(one | other) if one | other else 1.0


def overlap(sets: Sequence[Collection[str]]) -> float | None:
    """Return the mean Jaccard overlap over all pairs of selections; None with fewer than two.

    >>> overlap([["a"], ["a"], ["b"]])
    0.3333333333333333
    """
    pairs = [jaccard(one, other) for one, other in combinations(sets, 2)]
    return mean(pairs) if pairs else None


def over_seeds(values: Sequence[float]) -> Interval | None:
    r"""Return the mean over seeds with Student's interval, m ± t·s/√n; None with fewer than two.

    Of differences of two methods at the same seeds it is the paired interval.

    >>> round(over_seeds([1.0, 2.0, 3.0]).low, 3)
    -0.484
    """
    if len(values) < 2:
        return None
    middle, freedom = mean(values), len(values) - 1
    factor = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    width = factor * stdev(values) / len(values) ** 0.5
    return Interval(middle, middle - width, middle + width)


def verdict(seeds: Interval | None, rows: Interval | None) -> str:
    """Say whether a difference is beyond noise, ``ahead`` or ``behind``, or not, ``level``.

    The interval over seeds knows the luck of the training, that over rows the luck of the test rows. These add up:
    a difference is beyond noise where it is larger than both half widths together, √(a² + b²). With one seed the
    former is not known, so that nothing can be said: ``unknown``. Rows that are not known are not asked.

    >>> verdict(Interval(0.2, 0.1, 0.3), Interval(0.2, -0.1, 0.5))
    'level'
    >>> verdict(Interval(0.2, 0.05, 0.35), Interval(0.2, 0.05, 0.35))
    'level'
    """
    if seeds is None:
        return "unknown"
    widths = [max(each.high - each.value, each.value - each.low) for each in (seeds, rows) if each is not None]
    beyond = abs(seeds.value) > math.hypot(*widths)
    return "level" if not beyond else "ahead" if seeds.value > 0 else "behind"


def recall(kept: Collection[str], true: Collection[str]) -> float:
    """Return the share of the true fields that was kept; of K fields it is K / |true| at most."""
    return len(set(kept) & set(true)) / len(set(true))


def false_picks(kept: Collection[str], true: Collection[str]) -> int:
    """Return how many fields were kept that are not true."""
    return len(set(kept) - set(true))


def picks(kept: Collection[str], kinds: Mapping[str, str]) -> dict[str, int]:
    """Return how many fields of each kind were kept, kinds in the order in which they come.

    >>> picks(["a", "c"], {"a": "main", "b": "copy", "c": "noise"})
    {'main': 1, 'copy': 0, 'noise': 1}
    """
    chosen = set(kept)
    found = dict.fromkeys(kinds.values(), 0)
    for name, kind in kinds.items():
        found[kind] += name in chosen
    return found
