"""Metrics of click predictions, exact in float64: pure functions of logits and labels.

Every function takes logits (B,), labels (B,) in [0, 1] and optional weights (B,) >= 0. A row of weight w and
label y counts as w·y clicks and w·(1-y) non-clicks, which covers weights and soft labels. A metric that is not
defined is None: AUC and normalized entropy for a single class, calibration without clicks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lpfs.errors import InputError

Floats = npt.NDArray[np.float64]
Values = npt.ArrayLike | Tensor


@dataclass(frozen=True)
class Scores:
    """The metrics of one task on one set of rows; None if a metric is not defined.

    Args:
        rows: number of rows.
        positives: weighted number of clicks.
        auc: area under the ROC curve, ties count half; None for a single class.
        logloss: mean binary cross entropy, in nats.
        accuracy: fraction of rows on the correct side of probability 1/2.
        entropy: normalized entropy, logloss / entropy of the mean label; None for a single class.
        calibration: sum of predictions / sum of labels; None without clicks.
        corrected: calibration before negatives were sampled; None without clicks or a known rate.
    """

    rows: int
    positives: float
    auc: float | None
    logloss: float
    accuracy: float
    entropy: float | None
    calibration: float | None
    corrected: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def scores(logits: Values, labels: Values, weights: Values | None = None, negative_rate: float | None = None) -> Scores:
    """Return all metrics of one task.

    >>> scores([-1.0, 2.0, 0.5, -3.0], [0, 1, 1, 0]).auc
    1.0
    """
    z, y, w = _check_inputs(logits, labels, weights)
    return Scores(
        rows=z.size,
        positives=float((w * y).sum()),
        auc=auc(z, y, w),
        logloss=logloss(z, y, w),
        accuracy=accuracy(z, y, w),
        entropy=normalised_entropy(z, y, w),
        calibration=calibration(z, y, w),
        corrected=None if negative_rate is None else calibration(z, y, w, negative_rate),
    )


def auc(logits: Values, labels: Values, weights: Values | None = None) -> float | None:
    r"""Return the area under the ROC curve; None for a single class.

    .. math:: \Big(\sum_{i,j} p_i n_j \, [z_i > z_j] + \tfrac12 p_i n_j \, [z_i = z_j]\Big) \Big/ PN

    where p = w·y and n = w·(1-y), P and N their sums.

    >>> auc([1.0, 2.0, 2.0], [0, 1, 0])
    0.75
    """
    z, y, w = _check_inputs(logits, labels, weights)
    order = np.argsort(z)
    z, y, w = z[order], y[order], w[order]
    last = np.append(np.flatnonzero(z[1:] != z[:-1]), z.size - 1)  # last index of each run of equal logits
    clicks, others = np.cumsum(w * y)[last], np.cumsum(w * (1 - y))[last]
    if not (clicks[-1] > 0 and others[-1] > 0):
        return None
    ties = np.diff(others, prepend=0.0)  # non-clicks with the same logit
    area = np.sum(np.diff(clicks, prepend=0.0) * (others - 0.5 * ties))
    return float(area / clicks[-1] / others[-1])


def logloss(logits: Values, labels: Values, weights: Values | None = None) -> float:
    """Return the mean binary cross entropy: mean of max(z, 0) - zy + log(1 + exp(-|z|)).

    >>> round(logloss([0.0, 0.0], [0, 1]), 6)
    0.693147
    """
    z, y, w = _check_inputs(logits, labels, weights)
    return float((w * row_losses(z, y)).sum() / w.sum())


def row_losses(logits: Floats, labels: Floats) -> Floats:
    """Return the binary cross entropy of every row.

    >>> row_losses(np.array([0.0, 50.0]), np.array([1.0, 1.0])).round(3).tolist()
    [0.693, 0.0]
    """
    losses: Floats = np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
    return losses


def accuracy(logits: Values, labels: Values, weights: Values | None = None) -> float:
    """Return the fraction of rows on the correct side of probability 1/2, which counts as a click."""
    z, y, w = _check_inputs(logits, labels, weights)
    return float((w * np.where(z >= 0, y, 1 - y)).sum() / w.sum())


def normalised_entropy(logits: Values, labels: Values, weights: Values | None = None) -> float | None:
    """Return logloss / entropy of the mean label (below 1 beats a constant); None for a single class."""
    z, y, w = _check_inputs(logits, labels, weights)
    mean = float((w * y).sum() / w.sum())
    if not 0 < mean < 1:
        return None
    return logloss(z, y, w) / -(mean * math.log(mean) + (1 - mean) * math.log1p(-mean))


def calibration(
    logits: Values, labels: Values, weights: Values | None = None, negative_rate: float = 1.0
) -> float | None:
    """Return sum of predictions / sum of labels; None without clicks.

    With ``negative_rate`` r, the fraction of negatives that was kept, it is the calibration on the log before
    sampling: a kept negative represents 1/r negatives, and the odds of the model are too high by 1/r.
    """
    z, y, w = _check_inputs(logits, labels, weights)
    clicks = float((w * y).sum())
    if clicks == 0:
        return None
    predicted = probabilities(z, negative_rate)
    return float((w * (y + (1 - y) / negative_rate) * predicted).sum() / clicks)


def probabilities(logits: Values, negative_rate: float = 1.0) -> Floats:
    """Return click probabilities of the whole log, for a model trained with negatives kept at a rate r.

    p = q / (q + (1-q)/r), which is the sigmoid of z + log r.

    >>> probabilities([0.0], negative_rate=0.25)
    array([0.2])
    """
    if not 0 < negative_rate <= 1:
        raise InputError(f"negative_rate must be in (0, 1], the fraction of kept negatives; found {negative_rate!r}")
    z = _as_float64(logits) + np.log(negative_rate)
    odds = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, odds) / (1 + odds))


def _check_inputs(logits: Values, labels: Values, weights: Values | None = None) -> tuple[Floats, Floats, Floats]:
    """Return logits, labels and weights as float64 vectors; raise InputError if they are invalid."""
    z, y = _as_float64(logits), _as_float64(labels)
    w = np.ones_like(y) if weights is None else _as_float64(weights)
    if z.ndim != 1 or z.shape != y.shape or z.shape != w.shape or not z.size:
        shapes = f"{z.shape}, {y.shape} and {w.shape}"
        raise InputError(f"logits, labels and weights must have the same shape (B,), B >= 1; found {shapes}")
    if not np.isfinite(z).all():
        raise InputError(f"the logit of row {int(np.flatnonzero(~np.isfinite(z))[0])} is not finite")
    outside = np.flatnonzero(~((y >= 0) & (y <= 1)))
    if outside.size:
        row = int(outside[0])
        raise InputError(f"labels must be in [0, 1], found {y[row]} in row {row}")
    if not ((w >= 0) & (w < np.inf)).all() or not w.sum() > 0:
        raise InputError("weights must be finite, >= 0 and not all 0")
    return z, y, w


def _as_float64(values: Values) -> Floats:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)


def population_stability(reference: Floats, counts: Floats) -> Floats:
    r"""Return the population stability index of histograms (N, bins), without what chance alone gives.

    .. math:: \mathrm{PSI} = \sum_i (p_i - q_i) \log(p_i / q_i) - (b - 1)(1/n + 1/m)

    with half a row added to every bin; b bins are not empty in both.
    """
    rows, new_rows = reference.sum(1, keepdims=True), counts.sum(1, keepdims=True)
    used = (reference + counts) > 0
    bins = used.sum(1, keepdims=True)
    p = (reference + 0.5) / (rows + 0.5 * bins)
    q = (counts + 0.5) / (new_rows + 0.5 * bins)
    index = np.where(used, (p - q) * np.log(p / q), 0.0).sum(1, keepdims=True)
    chance = (bins - 1) * (1 / np.maximum(rows, 1) + 1 / np.maximum(new_rows, 1))
    return np.asarray((index - chance)[:, 0])
