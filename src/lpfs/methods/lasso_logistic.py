r"""LASSO logistic regression on one-hot ids: how much the weights of a field move the prediction.

.. math:: \min_w \frac1R \sum_r \ln\big(1 + e^{-\tilde y_r \langle w, x_r\rangle}\big) + \lambda \|w\|_1, \qquad
          \text{score}_n = \mathrm{std}_r \langle w_n, x_{rn}\rangle

Tibshirani, Regression Shrinkage and Selection via the Lasso, 1996; by scikit-learn's stochastic gradient descent
(Tsuruoka et al. 2009). The score of a field is the norm of its group of weights, each weighted by how much its
column varies: what the field adds to the logit, however many ids it has. x is one-hot, or, where a field has more
ids than there are buckets, one-hot by the remainder; a bag has the mean over its ids; numbers are standardised,
with a column each that says whether they are missing. The CTR model is not trained.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.need import of_sklearn
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import Ints, Reals, Rows, of_parts, ranked_model, sample
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Field, Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rows looked at, λ, passes over the rows, rate at the start, and columns a field may have."""

    rows: int = 200_000
    strength: float = 1e-4
    passes: int = 5
    lr: float = 0.1
    buckets: int = 1 << 14

    def __post_init__(self) -> None:
        check_numbers(self, positive=("strength", "lr"), whole=("rows", "passes", "buckets"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("lasso_logistic", wish)
    of_sklearn("lasso_logistic", "linear_model")


def search(task: Task) -> Selection:
    """Return the fields that a sparse linear model leans on; the model of the task is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = ranked_model(task, "lasso_logistic")
    with Effort() as effort:
        linear = of_sklearn("lasso_logistic", "linear_model")
        sparse = importlib.import_module("scipy.sparse")  # scikit-learn brings it
        rows = sample(task, "lasso_logistic", options.rows)
        blocks = [one_hot(sparse, rows, each, options.buckets) for each in model.reads]
        found = linear.SGDClassifier(
            loss="log_loss",
            penalty="l1",
            alpha=options.strength,
            max_iter=options.passes,
            tol=None,
            average=True,
            learning_rate="invscaling",
            eta0=options.lr,
            power_t=0.25,
            random_state=task.seed,
        )
        found.fit(sparse.hstack(blocks, format="csr"), rows.labels)
        scores, at = {}, 0
        for each, block in zip(model.reads, blocks, strict=True):
            weights = found.coef_[0, at : at + block.shape[1]]
            scores[each.name] = float((block @ weights).std())
            at += block.shape[1]
    scores = of_parts(model, scores)
    return ranked(task, "lasso_logistic", scores, steps=0, rows=len(rows), **effort.told())


def one_hot(sparse: Any, rows: Rows, field: Field, buckets: int) -> Any:
    """Return the columns of a field as a sparse matrix (R, columns)."""
    if field.kind == "numeric":
        return sparse.csr_matrix(standardised(rows.numbers[field.name]))
    values: Ints
    if field.kind == "multi":
        values, sizes = rows.bags[field.name]
        weights = np.repeat(1.0 / np.maximum(sizes, 1), sizes)
    else:
        values, sizes = rows.ids[field.name], np.ones(len(rows), np.int64)
        weights = np.ones(len(rows))
    width = min(field.cardinality, buckets)
    starts = np.concatenate([[0], sizes.cumsum()])
    return sparse.csr_matrix((weights, values % width, starts), shape=(len(rows), width))


def standardised(numbers: Reals) -> Reals:
    """Return (R, 2w): the numbers with mean 0 and deviation 1, missing ones 0, and then which are missing."""
    missing = np.isnan(numbers)
    there = np.maximum((~missing).sum(0), 1)
    mean = np.where(missing, 0.0, numbers).sum(0) / there
    centred = np.where(missing, 0.0, numbers - mean)
    spread = np.sqrt((centred**2).sum(0) / there)
    return np.concatenate([centred / np.where(spread > 0, spread, 1.0), missing.astype(np.float64)], 1)
