"""Gradient boosted trees and random forest of scikit-learn on the fields as numeric columns."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs._validation import check_options
from lpfs.methods.base import Count, MethodOptions, Positive
from lpfs.methods.sampling import Ints, Reals, SampledRanking, SampledRows
from lpfs.schema import Schema

EXACT_ROWS = 50_000  # with more rows the splits are searched in histograms
FOLDS = 5
PRIOR_ROWS = 10.0  # weight of the overall click rate in that of an id, in rows


class TreeRanking(SampledRanking):
    """Ranks fields by the feature importances of trees: the sum over the columns of a field."""

    sklearn_module = "sklearn.ensemble"

    def score_fields(self, rows: SampledRows, schema: Schema, seed: int) -> dict[str, float]:
        columns, owners = feature_matrix(rows, schema)
        importances = self.importances(columns, rows.labels, seed)
        scores = dict.fromkeys(schema.names, 0.0)
        for name, importance in zip(owners, importances.tolist(), strict=True):
            scores[name] += importance
        return scores

    def importances(self, columns: Reals, labels: Reals, seed: int) -> Reals:
        """Return the importance of every column (C,)."""
        trees = self.make_trees(self.import_sklearn(), seed).fit(columns, labels)
        return np.asarray(trees.feature_importances_)

    @abstractmethod
    def make_trees(self, ensemble: Any, seed: int) -> Any:
        """Return the classifier, from the module ``sklearn.ensemble``."""


@dataclass(frozen=True)
class GBDTOptions(MethodOptions):
    """Number of rows (None: all), of trees, their depth and learning rate, and the share of rows for each tree."""

    rows: Count | None = None
    trees: Count = 100
    depth: Count = 3
    lr: Positive = 0.1
    subsample: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subsample != 1:  # 1: all rows
            check_options(self, fraction=("subsample",))


class GBDT(TreeRanking):
    """Gain of the splits of gradient boosted trees on a field, summed over all trees.

    Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001; scikit-learn's
    GradientBoostingClassifier up to 50,000 rows, and above that its HistGradientBoostingClassifier, which bins the
    columns and trains each tree on all rows. The gain is that of the trees, not of the CTR model, which is not
    trained. Ids become click rates of other rows, bags the mean over their ids.
    """

    Options = GBDTOptions
    options: GBDTOptions
    trial_options = ({"depth": 5}, {"trees": 300}, {"lr": 0.03}, {"depth": 2})

    def importances(self, columns: Reals, labels: Reals, seed: int) -> Reals:
        if len(labels) <= EXACT_ROWS:
            return super().importances(columns, labels, seed)
        trees = self.import_sklearn().HistGradientBoostingClassifier(
            max_iter=self.options.trees,
            max_depth=self.options.depth,
            learning_rate=self.options.lr,
            early_stopping=False,
            random_state=seed,
        )
        return histogram_gains(trees.fit(columns, labels), columns.shape[1])

    def make_trees(self, ensemble: Any, seed: int) -> Any:
        return ensemble.GradientBoostingClassifier(
            n_estimators=self.options.trees,
            max_depth=self.options.depth,
            learning_rate=self.options.lr,
            subsample=float(self.options.subsample),
            random_state=seed,
        )


def histogram_gains(trees: Any, columns: int) -> Reals:
    """Return the total gain of the splits on every column, of scikit-learn's histogram trees.

    They have no ``feature_importances_``; the nodes of their predictors have the column and the gain of each split.
    """
    gains = np.zeros(columns)
    for (tree,) in trees._predictors:
        splits = tree.nodes[tree.nodes["is_leaf"] == 0]
        np.add.at(gains, splits["feature_idx"].astype(np.int64), splits["gain"])
    return gains / (gains.sum() or 1.0)


@dataclass(frozen=True)
class RandomForestOptions(MethodOptions):
    """Number of rows, of trees, and the minimum number of rows in a leaf."""

    rows: Count = 50_000
    trees: Count = 100
    leaf: Count = 20


class RandomForest(TreeRanking):
    """Impurity that the splits of a random forest on a field remove, summed over all trees.

    Breiman, Random Forests, 2001; through scikit-learn. The importance is that of the forest, not of the CTR
    model, which is not trained. Ids become click rates of other rows, bags the mean over their ids.
    """

    Options = RandomForestOptions
    options: RandomForestOptions
    trial_options = ({"leaf": 5}, {"leaf": 80}, {"trees": 300}, {"leaf": 200})

    def make_trees(self, ensemble: Any, seed: int) -> Any:
        return ensemble.RandomForestClassifier(
            n_estimators=self.options.trees, min_samples_leaf=self.options.leaf, random_state=seed
        )


def feature_matrix(rows: SampledRows, schema: Schema) -> tuple[Reals, list[str]]:
    """Return columns (R, C) and the field of each.

    An id becomes the click rate of that id in the other folds of the rows (Micci-Barreca 2001, cross-fitted, so
    that a column does not contain the label of its row); a bag the mean over its ids, an empty one the overall
    rate. Numbers are used as they are, with missing ones below the minimum.
    """
    columns, owners = list[Reals](), list[str]()
    mean = float(rows.labels.mean())
    for field in schema:
        if field.kind == "numeric":
            of_field = [_fill_missing(column) for column in rows.numbers[field.name].T]
        elif field.kind == "multi":
            values, sizes = rows.bags[field.name]
            row = np.repeat(np.arange(len(sizes)), sizes)
            rates = out_of_fold_rates(values, rows.labels[row], row % FOLDS, mean)
            total = np.bincount(row, rates, len(sizes))
            of_field = [np.where(sizes > 0, total / np.maximum(sizes, 1), mean)]
        else:
            of_field = [out_of_fold_rates(rows.ids[field.name], rows.labels, np.arange(len(rows)) % FOLDS, mean)]
        columns += of_field
        owners += [field.name] * len(of_field)
    return np.stack(columns, 1), owners


def out_of_fold_rates(ids: Ints, labels: Reals, fold: Ints, mean: float) -> Reals:
    r"""Return, for every row, the smoothed click rate of its id in the other folds (R,).

    .. math:: r = \frac{\sum_{j:\, v_j = v,\, f_j \ne f} y_j + s \bar y}{|\{j: v_j = v, f_j \ne f\}| + s}

    >>> out_of_fold_rates(np.array([7, 7, 7]), np.array([1.0, 1.0, 0.0]), np.array([0, 1, 1]), 0.5).round(3)
    array([0.5  , 0.545, 0.545])
    """  # fmt: skip
    _, index = np.unique(ids, return_inverse=True)
    cells = index * FOLDS + fold
    size = (int(index.max()) + 1 if len(index) else 0) * FOLDS
    clicks = np.bincount(cells, labels, size).reshape(-1, FOLDS)
    counts = np.bincount(cells, minlength=size).reshape(-1, FOLDS)
    other_clicks = (clicks.sum(1, keepdims=True) - clicks).ravel()[cells]
    other_counts = (counts.sum(1, keepdims=True) - counts).ravel()[cells]
    rates: Reals = (other_clicks + PRIOR_ROWS * mean) / (other_counts + PRIOR_ROWS)
    return rates


def _fill_missing(column: Reals) -> Reals:
    """Return the numbers with the missing ones below the minimum."""
    missing = np.isnan(column)
    low = float(column[~missing].min()) if not missing.all() else 0.0
    return np.where(missing, low - 1.0, column)
