"""Confidence intervals of the AUC and of paired differences between two models on the same rows.

The AUC is a U-statistic: its error is, to first order, the sum of one influence per row (DeLong et al., 1988). The
influences of two models on the same rows are subtracted before they are squared, so that what the models share cancels.
Rows of one user are summed first; folds are evaluated apart, because the scores of two networks cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lpfs.train.metrics import row_losses

# quantiles of Student's t distribution with 1, 2, … degrees of freedom; after them those of the normal distribution
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
T_950 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
Z_975, Z_950 = 1.960, 1.645

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """A paired difference with two standard errors: over rows, and over folds (0 without folds)."""

    value: float
    se_rows: float
    se_folds: float = 0.0
    folds: int = 1

    @property
    def interval(self) -> Interval:
        """The two-sided 95 % interval, by the larger of both errors."""
        width = self._width(Z_975, T_975)
        return Interval(self.value, self.value - width, self.value + width)

    @property
    def upper(self) -> float:
        """The one-sided 95 % upper bound, by the larger of both errors."""
        return self.value + self._width(Z_950, T_950)

    def _width(self, z: float, t: tuple[float, ...]) -> float:
        factor = t[self.folds - 2] if 2 <= self.folds <= len(t) + 1 else z
        return max(z * self.se_rows, factor * self.se_folds)


def auc_influence(logits: Floats, labels: Floats) -> tuple[float, Floats]:
    r"""Return the AUC and the influence of every row on it; the squares of the influences sum to DeLong's variance.

    .. math:: \psi_i = \frac{p_i}{P}\,(F_-(z_i) - A) + \frac{n_i}{N}\,(1 - F_+(z_i) - A)

    where p = y and n = 1 - y, P and N are their sums, and F counts ties half. The AUC is NaN for a single class.
    """
    _, run, counts = np.unique(logits, return_inverse=True, return_counts=True)
    clicks = np.bincount(run, labels, minlength=len(counts))
    others = counts - clicks
    positives, negatives = clicks.sum(), others.sum()
    if not (positives > 0 and negatives > 0):
        return math.nan, np.zeros_like(logits)
    above = ((np.cumsum(others) - 0.5 * others) / negatives)[run]  # share of negatives below each row
    below = 1 - ((np.cumsum(clicks) - 0.5 * clicks) / positives)[run]  # share of positives above each row
    auc = float(labels @ above / positives)
    scale = [math.sqrt(count / (count - 1)) if count > 1 else 1.0 for count in (positives, negatives)]
    influence = labels * (above - auc) / positives * scale[0] + (1 - labels) * (below - auc) / negatives * scale[1]
    return auc, influence


def auc_interval(logits: Floats, labels: Floats, groups: Ints | None = None) -> Interval:
    """Return the AUC with its 95 % interval, limited to [0, 1]; NaN for a single class."""
    auc, influence = auc_influence(np.asarray(logits, np.float64), np.asarray(labels, np.float64))
    width = Z_975 * _standard_error(influence, groups)
    return Interval(auc, max(0.0, auc - width), min(1.0, auc + width))


def auc_difference(
    first: Floats, second: Floats, labels: Floats, groups: Ints | None = None, folds: Ints | None = None
) -> PairedDifference:
    """Return AUC(first) - AUC(second) on the same rows: what is lost from the first model to the second.

    Args:
        first, second: logits (B,).
        labels: (B,) in [0, 1].
        groups: (B,) such as the user of each row; rows of one group are not independent.
        folds: (B,) number of the network that predicted each row. AUCs are computed within folds, and the mean over
            folds is weighted by rows.
    """
    first, second, labels = (np.asarray(values, np.float64) for values in (first, second, labels))
    influence, values, weights = np.zeros(len(labels)), [], []
    for rows in _fold_rows(folds, len(labels)):
        (auc, one), (other_auc, other) = (
            auc_influence(first[rows], labels[rows]),
            auc_influence(second[rows], labels[rows]),
        )
        if math.isnan(auc):
            continue
        values.append(auc - other_auc)
        weights.append(rows.size / len(labels))
        influence[rows] = (one - other) * weights[-1]
    return _difference(values, weights, influence, groups)


def logloss_difference(
    first: Floats, second: Floats, labels: Floats, groups: Ints | None = None, folds: Ints | None = None
) -> PairedDifference:
    """Return logloss(second) - logloss(first) on the same rows: what is lost from the first model to the second."""
    first, second, labels = (np.asarray(values, np.float64) for values in (first, second, labels))
    losses = row_losses(second, labels) - row_losses(first, labels)
    parts = list(_fold_rows(folds, len(labels)))
    values, weights = [float(losses[rows].mean()) for rows in parts], [rows.size / len(labels) for rows in parts]
    return _difference(values, weights, (losses - losses.mean()) / len(losses), groups)


def _difference(values: list[float], weights: list[float], influence: Floats, groups: Ints | None) -> PairedDifference:
    """Return the weighted mean over folds; their error has Nadeau and Bengio's factor for shared training rows."""
    count = len(values)
    if not count:
        return PairedDifference(math.nan, math.nan)
    value = float(np.average(values, weights=weights))
    se_folds = math.sqrt((1 / count + 1 / (count - 1)) * float(np.var(values, ddof=1))) if count > 1 else 0.0
    return PairedDifference(value, _standard_error(influence / sum(weights), groups), se_folds, count)


def _fold_rows(folds: Ints | None, rows: int) -> Iterator[Ints]:
    if folds is None:
        yield np.arange(rows)
    else:
        yield from (np.flatnonzero(folds == fold) for fold in np.unique(folds))


def _standard_error(influence: Floats, groups: Ints | None) -> float:
    """Return the root of the sum of squares, over rows or over groups of rows."""
    if groups is not None:
        sums = np.bincount(np.unique(groups, return_inverse=True)[1], influence).astype(np.float64)
        influence = sums * math.sqrt(len(sums) / max(1, len(sums) - 1))
    return float(np.sqrt(influence @ influence))
