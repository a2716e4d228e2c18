"""Click rates: fields as columns of numbers that trees can split; an id is the click rate of rows with it."""

from __future__ import annotations

import numpy as np

from lpfs.methods.sample import Ints, Reals, Rows
from lpfs.schema import Schema

FOLDS = 5
SMOOTH = 10.0  # rows of the overall click rate that every id begins with


def matrix(rows: Rows, schema: Schema) -> tuple[Reals, list[str]]:
    """Return columns (R, C) and the field that each belongs to.

    An id is the click rate of that id in the other folds of the rows (Micci-Barreca 2001, cross-fitted: a row
    never sees its own label, or a field of many ids would seem to know everything); a bag is the mean of those
    of its ids, an empty one the overall rate. Numbers stand for themselves, a missing one below them all.
    """
    columns: list[Reals] = []
    owners: list[str] = []
    for each in schema:
        if each.kind == "numeric":
            found = [_filled(column) for column in rows.numbers[each.name].T]
        elif each.kind == "multi":
            values, sizes = rows.bags[each.name]
            owner = np.repeat(np.arange(len(sizes)), sizes)
            rates = click_rates(values, rows.labels[owner], owner % FOLDS, float(rows.labels.mean()))
            total = np.bincount(owner, rates, len(sizes))
            found = [np.where(sizes > 0, total / np.maximum(sizes, 1), rows.labels.mean())]
        else:
            fold = np.arange(len(rows)) % FOLDS
            found = [click_rates(rows.ids[each.name], rows.labels, fold, float(rows.labels.mean()))]
        columns += found
        owners += [each.name] * len(found)
    return np.stack(columns, 1), owners


def click_rates(ids: Ints, labels: Reals, fold: Ints, mean: float) -> Reals:
    r"""Return, for every row, the smoothed click rate of its id in the other folds (R,).

    .. math:: r = \frac{\sum_{j:\, v_j = v,\, f_j \ne f} y_j + s \bar y}{|\{j: v_j = v, f_j \ne f\}| + s}

    >>> click_rates(np.array([7, 7, 7]), np.array([1.0, 1.0, 0.0]), np.array([0, 1, 1]), 0.5).round(3)
    array([0.5  , 0.545, 0.545])
    """  # fmt: skip
    _, place = np.unique(ids, return_inverse=True)
    cells = place * FOLDS + fold
    size = (int(place.max()) + 1 if len(place) else 0) * FOLDS
    clicks = np.bincount(cells, labels, size).reshape(-1, FOLDS)
    seen = np.bincount(cells, minlength=size).reshape(-1, FOLDS)
    others = (clicks.sum(1, keepdims=True) - clicks).ravel()[cells]
    count = (seen.sum(1, keepdims=True) - seen).ravel()[cells]
    rates: Reals = (others + SMOOTH * mean) / (count + SMOOTH)
    return rates


def _filled(column: Reals) -> Reals:
    """Return the numbers with the missing ones put below them all."""
    missing = np.isnan(column)
    low = float(column[~missing].min()) if not missing.all() else 0.0
    return np.where(missing, low - 1.0, column)
