"""Contingency: how often each value of a field goes with each label, and what that table says."""

from __future__ import annotations

import numpy as np

from lpfs.methods.sample import Ints, Reals, Rows
from lpfs.schema import Field


def tables(rows: Rows, field: Field, bins: int) -> list[Reals]:
    """Return the table of values and labels (V, 2) of a field; of a numeric one, a table for each of its numbers.

    Ids stand for themselves. Numbers are cut at quantiles into ``bins``, and a missing one is a value of its own.
    A row with a bag is shared out evenly over its ids; an empty bag is a value of its own.
    """
    if field.kind == "numeric":
        return [table(binned(each, bins), rows.labels) for each in rows.numbers[field.name].T]
    if field.kind == "multi":
        values, sizes = rows.bags[field.name]
        empty = np.flatnonzero(sizes == 0)
        owners = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), empty])
        ids = np.concatenate([values, np.full(len(empty), -1)])
        return [table(ids, rows.labels[owners], 1.0 / np.maximum(sizes, 1)[owners])]
    return [table(rows.ids[field.name], rows.labels)]


def table(values: Ints, labels: Reals, weights: Reals | None = None) -> Reals:
    """Return how much of each value that occurs goes with labels 0 and 1 (V, 2).

    >>> table(np.array([5, 5, 9]), np.array([0.0, 1.0, 1.0]))
    array([[1., 1.],
           [0., 1.]])
    """
    _, place = np.unique(values, return_inverse=True)
    weights = np.ones(len(values)) if weights is None else weights
    return np.stack([np.bincount(place, weights * (labels == each)) for each in (0, 1)], 1)


def binned(numbers: Reals, bins: int) -> Ints:
    """Return the bin of each number (R,), cut at quantiles; -1 where it is missing.

    >>> binned(np.array([1.0, 2.0, 3.0, 4.0, np.nan]), 2)
    array([ 0,  0,  1,  1, -1])
    """
    there = numbers[~np.isnan(numbers)]
    edges = np.unique(np.quantile(there, np.arange(1, bins) / bins)) if len(there) else np.zeros(0)
    return np.where(np.isnan(numbers), -1, np.searchsorted(edges, numbers)).astype(np.int64)


def information(counts: Reals) -> float:
    r"""Return the mutual information :math:`\sum_{v,y} p_{vy} \ln (p_{vy} / p_v p_y)` of a table, in nats."""
    joint = counts / counts.sum()
    apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log(joint[seen] / apart[seen])).sum())


def chi_squared(counts: Reals) -> float:
    r"""Return :math:`\chi^2 = \sum_{v,y} (n_{vy} - e_{vy})^2 / e_{vy}` with e what independence would give."""
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    seen = expected > 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


def freedom(counts: Reals) -> int:
    """Return the degrees of freedom of a table: (V - 1)(Y - 1), of what occurs."""
    return (int((counts.sum(1) > 0).sum()) - 1) * (int((counts.sum(0) > 0).sum()) - 1)
