"""LASSO logistic regression on one-hot ids."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.methods.base import Count, MethodOptions, Positive
from lpfs.methods.sampling import Ints, Reals, SampledRanking, SampledRows
from lpfs.schema import Field, Schema


@dataclass(frozen=True)
class LassoLogisticOptions(MethodOptions):
    """Number of rows, λ, passes over the rows, first learning rate, and maximum number of columns of a field."""

    rows: Count = 200_000
    strength: Positive = 1e-4
    passes: Count = 5
    lr: Positive = 0.1
    buckets: Count = 1 << 14


class LassoLogistic(SampledRanking):
    r"""LASSO logistic regression on one-hot ids: how much the weights of a field change the logit.

    .. math:: \min_w \frac1R \sum_r \ln\big(1 + e^{-\tilde y_r \langle w, x_r\rangle}\big) + \lambda \|w\|_1,
              \qquad \text{score}_n = \mathrm{std}_r \langle w_n, x_{rn}\rangle

    Tibshirani, Regression Shrinkage and Selection via the Lasso, 1996; by scikit-learn's stochastic gradient
    descent (Tsuruoka et al. 2009). The score is the standard deviation of what a field adds to the logit, so it
    does not depend on its number of ids. x is one-hot, or, if a field has more ids than there are buckets, one-hot
    by the remainder; a bag has the mean over its ids; numbers are standardized, with an indicator column each for
    missing ones. The CTR model is not trained.
    """

    Options = LassoLogisticOptions
    options: LassoLogisticOptions
    sklearn_module = "sklearn.linear_model"

    def score_fields(self, rows: SampledRows, schema: Schema, seed: int) -> dict[str, float]:
        sparse = importlib.import_module("scipy.sparse")  # a dependency of scikit-learn
        blocks = [one_hot(sparse, rows, field, self.options.buckets) for field in schema]
        classifier = self.import_sklearn().SGDClassifier(
            loss="log_loss",
            penalty="l1",
            alpha=self.options.strength,
            max_iter=self.options.passes,
            tol=None,
            average=True,
            learning_rate="invscaling",
            eta0=self.options.lr,
            power_t=0.25,
            random_state=seed,
        )
        classifier.fit(sparse.hstack(blocks, format="csr"), rows.labels)
        scores, first = {}, 0
        for field, block in zip(schema, blocks, strict=True):
            weights = classifier.coef_[0, first : first + block.shape[1]]
            scores[field.name] = float((block @ weights).std())
            first += block.shape[1]
        return scores


def one_hot(sparse: Any, rows: SampledRows, field: Field, buckets: int) -> Any:
    """Return the columns of a field as a sparse matrix (R, columns)."""
    if field.kind == "numeric":
        return sparse.csr_matrix(standardize(rows.numbers[field.name]))
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


def standardize(numbers: Reals) -> Reals:
    """Return (R, 2w): the numbers with mean 0 and deviation 1, missing ones 0, then indicators of missing ones."""
    missing = np.isnan(numbers)
    count = np.maximum((~missing).sum(0), 1)
    mean = np.where(missing, 0.0, numbers).sum(0) / count
    centered = np.where(missing, 0.0, numbers - mean)
    spread = np.sqrt((centered**2).sum(0) / count)
    return np.concatenate([centered / np.where(spread > 0, spread, 1.0), missing.astype(np.float64)], 1)
