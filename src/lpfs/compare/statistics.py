"""Statistics of a comparison: areas, overlaps, confidence intervals over seeds and over test rows.

The bootstrap gives every test row a weight from Poisson(1), the same for all models, so that differences between
models are paired.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.errors import InputError
from lpfs.train.intervals import T_975, Z_975, Interval, auc_influence
from lpfs.train.metrics import row_losses

BOOTSTRAP_DRAWS = 400
MAX_WEIGHTS = 1 << 22  # bootstrap weights in memory at a time

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]


def curve_weights(sizes: Collection[int]) -> dict[int, float]:
    """Return the weight of each K in the area, those of the trapezoidal rule; they sum to 1.

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

    >>> mean_jaccard([["a"], ["a"], ["b"]])
    0.3333333333333333
    """
    overlaps = [jaccard(one, other) for one, other in combinations(sets, 2)]
    return mean(overlaps) if overlaps else None


def recall(kept: Collection[str], true: Collection[str]) -> float:
    """Return the share of the true fields that was kept; with K fields it is at most K / |true|."""
    return len(set(kept) & set(true)) / len(set(true))


def interval_over_seeds(values: Sequence[float]) -> Interval | None:
    r"""Return the mean over seeds with Student's interval, m ± t·s/√n; None with fewer than two values.

    For differences of two methods at the same seeds it is the paired interval.

    >>> round(interval_over_seeds([1.0, 2.0, 3.0]).low, 3)
    -0.484
    """
    if len(values) < 2:
        return None
    center, freedom = mean(values), len(values) - 1
    factor = T_975[freedom - 1] if freedom <= len(T_975) else Z_975
    width = factor * stdev(values) / len(values) ** 0.5
    return Interval(center, center - width, center + width)


def interval_over_rows(value: float, draws: Floats) -> Interval | None:
    """Return a value with its bootstrap interval, value ± 1.96 standard deviations of the draws."""
    finite = draws[np.isfinite(draws)]
    if len(finite) < 2:
        return None
    width = Z_975 * float(finite.std(ddof=1))
    return Interval(value, value - width, value + width)


def verdict(seeds: Interval | None, rows: Interval | None) -> str:
    """Return whether a difference is significant at 95 %: ``ahead`` or ``behind`` if it is, ``level`` if not.

    The interval over seeds measures the variance of the training, the interval over rows that of the test rows. A
    difference is significant if it is larger than √(a² + b²) of both half widths. With one seed the former is
    unknown, and so is the verdict: ``unknown``. An unknown interval over rows is left out.

    >>> verdict(Interval(0.2, 0.1, 0.3), Interval(0.2, -0.1, 0.5))
    'level'
    >>> verdict(Interval(0.2, 0.05, 0.35), Interval(0.2, 0.05, 0.35))
    'level'
    """
    if seeds is None:
        return "unknown"
    known = [interval for interval in (seeds, rows) if interval is not None]
    widths = [max(interval.high - interval.value, interval.value - interval.low) for interval in known]
    significant = abs(seeds.value) > math.hypot(*widths)
    return "level" if not significant else "ahead" if seeds.value > 0 else "behind"


def bootstrap(
    logits: Sequence[Numbers], labels: Numbers, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> tuple[Floats, Floats]:
    r"""Return AUC and logloss of every model under every draw of the test rows, (draws, models) each.

    The AUC of a draw with weights w is that of its first-order expansion, A + Σ (w_i - 1) ψ_i, with the influence ψ of
    every row: a draw of all models is one matrix product. It is NaN for a single class.

    >>> aucs, losses = bootstrap([np.array([-1.0, 2.0, 0.1, 0.8])], np.array([0, 1, 0, 1]), draws=3)
    >>> aucs.shape, losses.shape
    ((3, 1), (3, 1))
    """
    if not ((labels >= 0) & (labels <= 1)).all():
        raise InputError("a bootstrap of AUC needs labels between 0 and 1")
    generator = np.random.default_rng(seed)
    influences, row_loss = np.empty((2, len(labels), len(logits)), np.float32)
    values = np.empty(len(logits))
    for number, scores in enumerate(logits):
        values[number], influences[:, number] = auc_influence(scores.astype(np.float64), labels.astype(np.float64))
        row_loss[:, number] = row_losses(scores.astype(np.float64), labels)
    aucs, losses = np.empty((draws, len(logits))), np.empty((draws, len(logits)))
    chunk = max(1, MAX_WEIGHTS // max(1, len(labels)))
    for first in range(0, draws, chunk):
        weights = generator.poisson(1.0, (min(chunk, draws - first), len(labels))).astype(np.float32)
        aucs[first : first + chunk] = values + (weights - 1) @ influences
        with np.errstate(invalid="ignore"):  # a draw of few rows can be empty
            losses[first : first + chunk] = (weights @ row_loss) / weights.sum(1, keepdims=True)
    return aucs, losses


@dataclass(frozen=True)
class SeedValue:
    """A value, and its values under every bootstrap draw of the test rows."""

    value: float
    draws: Floats


SeedSeries = Mapping[int, SeedValue]  # by seed


def summarize(series: SeedSeries) -> dict[str, Any] | None:
    """Return the mean over seeds with its intervals over seeds and over rows; None for an empty series."""
    if not series:
        return None
    seeds, rows = intervals(series)
    return {
        "value": mean(point.value for point in series.values()),
        "seeds": None if seeds is None else asdict(seeds),
        "rows": None if rows is None else asdict(rows),
        "by_seed": {str(seed): point.value for seed, point in series.items()},
    }


def intervals(series: SeedSeries) -> tuple[Interval | None, Interval | None]:
    """Return the intervals of the mean: over seeds, and over rows."""
    values = [point.value for point in series.values()]
    mean_draws = np.mean([point.draws for point in series.values()], axis=0)
    return interval_over_seeds(values), interval_over_rows(mean(values), mean_draws)


def paired_difference(series: SeedSeries, other: SeedSeries, *, lower_is_better: bool = False) -> dict[str, Any] | None:
    """Return the difference to another series, paired by seed and by row, with its verdict."""
    differences = {
        seed: SeedValue(point.value - other[seed].value, point.draws - other[seed].draws)
        for seed, point in series.items()
        if seed in other
    }
    summary = summarize(differences)
    if summary is None:
        return None
    result = verdict(*intervals(differences))
    if lower_is_better:
        result = {"ahead": "behind", "behind": "ahead"}.get(result, result)
    return {**summary, "verdict": result}


def curve_areas(curves: Mapping[int, SeedSeries]) -> dict[int, SeedValue]:
    r"""Return the area under the K-AUC curve for every seed that has all sizes; ``curves`` are by K.

    It is divided by the range of K: 0 for random, 1 for perfect scores. With one K it is s itself.

    .. math:: \frac{1}{K_n - K_1} \sum_i \frac{s_i + s_{i+1}}{2} (K_{i+1} - K_i), \quad s = (AUC - .5)/.5
    """
    weights, areas = curve_weights(curves), {}
    common = [seed for seed in next(iter(curves.values())) if all(seed in series for series in curves.values())]
    for seed in common:
        points = [(weights[size], series[seed]) for size, series in curves.items()]
        value = sum(weight * (point.value - 0.5) / 0.5 for weight, point in points)
        draws = np.sum([weight * (point.draws - 0.5) / 0.5 for weight, point in points], axis=0)
        areas[seed] = SeedValue(value, draws)
    return areas
