"""The luck of the test rows: AUC and logloss of many models on the same rows, drawn again and again.

Every row gets a weight out of Poisson(1), the same for all models of a draw, so that differences of models are
paired. Ranks are found once a model; a draw costs one cumulative sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.compare.statistics import NORMAL, Interval
from lpfs.errors import InputError
from lpfs.train.metrics import losses

DRAWS = 400
CELLS = 1 << 22  # weights in memory at a time
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Ranks:
    """Where the clicks of one model stand among its other rows.

    Args:
        others: the rows without a click, in the order of their scores.
        below: for every click, how many of them score less.
        upto: for every click, how many of them score less or the same.

    """

    others: npt.NDArray[np.int64]
    below: npt.NDArray[np.int64]
    upto: npt.NDArray[np.int64]

    def aucs(self, weights: Numbers, clicks: npt.NDArray[np.int64]) -> Floats:
        r"""Return the AUC under every draw of weights (draws, rows); NaN where a class has no weight.

        .. math:: \sum_i w_i \frac{C(below_i) + C(upto_i)}{2} \Big/ \sum_i w_i \, C(all)

        with C(k) the weight of the k lowest rows without a click, i over the clicks.
        """
        found = np.empty(len(weights))
        lowest = np.zeros(len(self.others) + 1)
        for draw, drawn in enumerate(weights):
            np.cumsum(drawn[self.others], out=lowest[1:])
            own = drawn[clicks].astype(np.float64)
            every = own.sum() * lowest[-1]
            found[draw] = own @ (lowest[self.below] + lowest[self.upto]) / 2 / every if every else np.nan
        return found


def ranks(scores: Numbers, labels: Numbers) -> Ranks:
    """Return the ranks of one model's scores (rows,); labels are 0 and 1."""
    others = np.flatnonzero(labels == 0)
    others = others[np.argsort(scores[others], kind="stable")]
    sorted_scores, own = scores[others], scores[labels == 1]
    return Ranks(others, np.searchsorted(sorted_scores, own, "left"), np.searchsorted(sorted_scores, own, "right"))


def bootstrap(
    models: Sequence[Numbers], labels: Numbers, draws: int = DRAWS, seed: int = 0
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
    known = [ranks(each, labels) for each in models]
    lost = [losses(each.astype(np.float64), labels) for each in models]
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


def over_rows(value: float, drawn: Floats) -> Interval | None:
    """Return a value with the interval of its draws, value ± 1.96 of their standard deviation."""
    known = drawn[np.isfinite(drawn)]
    if len(known) < 2:
        return None
    width = NORMAL * float(known.std(ddof=1))
    return Interval(value, value - width, value + width)
