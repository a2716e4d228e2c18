"""The measures of a comparison: pure functions of numbers and sets of fields.

The luck of the test rows: AUC and logloss of many models on the same rows, drawn again and again.

Every row gets a weight out of Poisson(1), the same for all models of a draw, so that differences of models are
paired. Ranks are found once a model; a draw costs one cumulative sum.

Series: one number a seed, with its draws over the test rows; means, differences, and how sure they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.errors import InputError
from lpfs.train.metrics import row_losses

# two-sided 95 % points of Student's t with 1, 2, … degrees of freedom, and of the normal distribution
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Z_QUANTILE = 1.960


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


def mean_jaccard(sets: Sequence[Collection[str]]) -> float | None:
    """Return the mean Jaccard overlap over all pairs of selections; None with fewer than two.

    >>> overlap([["a"], ["a"], ["b"]])
    0.3333333333333333
    """
    pairs = [jaccard(one, other) for one, other in combinations(sets, 2)]
    return mean(pairs) if pairs else None


def interval_over_seeds(values: Sequence[float]) -> Interval | None:
    r"""Return the mean over seeds with Student's interval, m ± t·s/√n; None with fewer than two.

    Of differences of two methods at the same seeds it is the paired interval.

    >>> round(over_seeds([1.0, 2.0, 3.0]).low, 3)
    -0.484
    """
    if len(values) < 2:
        return None
    middle, freedom = mean(values), len(values) - 1
    factor = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else Z_QUANTILE
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


def false_positives(kept: Collection[str], true: Collection[str]) -> int:
    """Return how many fields were kept that are not true."""
    return len(set(kept) - set(true))


def count_by_kind(kept: Collection[str], kinds: Mapping[str, str]) -> dict[str, int]:
    """Return how many fields of each kind were kept, kinds in the order in which they come.

    >>> picks(["a", "c"], {"a": "main", "b": "copy", "c": "noise"})
    {'main': 1, 'copy': 0, 'noise': 1}
    """
    chosen = set(kept)
    found = dict.fromkeys(kinds.values(), 0)
    for name, kind in kinds.items():
        found[kind] += name in chosen
    return found


BOOTSTRAP_DRAWS = 400
CELLS = 1 << 22  # weights in memory at a time
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class ScoreRanks:
    """Where the clicks of one model stand among its other rows.

    Args:
        others: the rows without a click, in the order of their scores.
        below: for every click, how many of them score less.
        upto: for every click, how many of them score less or the same.

    """

    negative_order: npt.NDArray[np.int64]
    rank_low: npt.NDArray[np.int64]
    rank_high: npt.NDArray[np.int64]

    def aucs(self, weights: Numbers, clicks: npt.NDArray[np.int64]) -> Floats:
        r"""Return the AUC under every draw of weights (draws, rows); NaN where a class has no weight.

        .. math:: \sum_i w_i \frac{C(below_i) + C(upto_i)}{2} \Big/ \sum_i w_i \, C(all)

        with C(k) the weight of the k lowest rows without a click, i over the clicks.
        """
        found = np.empty(len(weights))
        lowest = np.zeros(len(self.negative_order) + 1)
        for draw, drawn in enumerate(weights):
            np.cumsum(drawn[self.negative_order], out=lowest[1:])
            own = drawn[clicks].astype(np.float64)
            every = own.sum() * lowest[-1]
            found[draw] = own @ (lowest[self.rank_low] + lowest[self.rank_high]) / 2 / every if every else np.nan
        return found


def rank_scores(scores: Numbers, labels: Numbers) -> ScoreRanks:
    """Return the ranks of one model's scores (rows,); labels are 0 and 1."""
    others = np.flatnonzero(labels == 0)
    others = others[np.argsort(scores[others], kind="stable")]
    sorted_scores, own = scores[others], scores[labels == 1]
    return ScoreRanks(
        others, np.searchsorted(sorted_scores, own, "left"), np.searchsorted(sorted_scores, own, "right")
    )


def bootstrap(
    models: Sequence[Numbers], labels: Numbers, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return AUC and logloss of every model's logits under every draw of the rows, (draws, models) each.

    >>> aucs, lost = bootstrap([np.array([-1.0, 2.0, 0.1, 0.8])], np.array([0, 1, 0, 1]), draws=3)
    >>> aucs.shape, lost.shape
    ((3, 1), (3, 1))
    """
    if not np.isin(labels, (0, 1)).all():
        raise InputError("a bootstrap of AUC needs labels of 0 and 1")
    drawn = np.random.default_rng(seed)
    clicks = np.flatnonzero(labels == 1)
    known = [rank_scores(each, labels) for each in models]
    lost = [row_losses(each.astype(np.float64), labels) for each in models]
    aucs, means = np.empty((draws, len(models))), np.empty((draws, len(models)))
    pause = max(1, CELLS // max(1, len(labels)))
    for first in range(0, draws, pause):
        count = min(pause, draws - first)
        weights = drawn.poisson(1.0, (count, len(labels))).astype(np.uint8)
        every = weights.astype(np.float64)
        with np.errstate(invalid="ignore"):  # a draw of few rows can be empty
            every /= every.sum(1, keepdims=True)
        for number, each in enumerate(known):
            aucs[first : first + count, number] = each.aucs(weights, clicks)
            means[first : first + count, number] = [row @ lost[number] for row in every]
    return aucs, means


def interval_over_rows(value: float, drawn: Floats) -> Interval | None:
    """Return a value with the interval of its draws, value ± 1.96 of their standard deviation."""
    known = drawn[np.isfinite(drawn)]
    if len(known) < 2:
        return None
    width = Z_QUANTILE * float(known.std(ddof=1))
    return Interval(value, value - width, value + width)


@dataclass(frozen=True)
class SeedValue:
    """A number, and what it is under every draw of the test rows."""

    value: float
    drawn: Floats


SeedSeries = Mapping[int, SeedValue]  # by seed


def summarize(series: SeedSeries) -> dict[str, Any] | None:
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


def intervals(series: SeedSeries) -> tuple[Interval | None, Interval | None]:
    """Return how sure the mean is: over seeds, and over rows."""
    values = [each.value for each in series.values()]
    return interval_over_seeds(values), interval_over_rows(
        mean(values), np.mean([each.drawn for each in series.values()], axis=0)
    )


def paired_difference(series: SeedSeries, other: SeedSeries, *, less: bool = False) -> dict[str, Any] | None:
    """Return the difference to another series, paired by seed and by row, and whether it is beyond noise.

    ``less`` says that less is better, as of a loss.
    """
    pairs = [(seed, each, other[seed]) for seed, each in series.items() if seed in other]
    apart = {seed: SeedValue(one.value - two.value, one.drawn - two.drawn) for seed, one, two in pairs}
    found = summarize(apart)
    if found is None:
        return None
    better = {seed: SeedValue(-each.value, -each.drawn) for seed, each in apart.items()} if less else apart
    return {**found, "verdict": verdict(*intervals(better))}


def curve_areas(curves: Mapping[int, SeedSeries]) -> dict[int, SeedValue]:
    """Return the area under the K-AUC curve of every seed that has all of the sizes; ``curves`` are by K."""
    weights = curve_weights(list(curves))
    seeds = [seed for seed in next(iter(curves.values())) if all(seed in each for each in curves.values())]
    found = {}
    for seed in seeds:
        points = [(weights[size], each[seed]) for size, each in curves.items()]
        value = sum(weight * (point.value - 0.5) / 0.5 for weight, point in points)
        drawn = np.sum([weight * (point.drawn - 0.5) / 0.5 for weight, point in points], axis=0)
        found[seed] = SeedValue(value, drawn)
    return found
