"""FieldCounts: how often each value of a field occurs in the training and test rows, and how often with a click.

The rows are streamed once, so the memory is a few counts per id, less than that of the embedding tables. Missing share,
distinct values, drift and the AUC of a field alone follow from the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.bins import bin_edges
from lpfs.data.dataset import Dataset
from lpfs.data.store.format import FIRST_ID, MISSING_ID
from lpfs.methods.sampling import SampledRows, batch_columns
from lpfs.pipeline.splits import DataSplits
from lpfs.schema import Field, Schema
from lpfs.train.metrics import population_stability

READ_ROWS = 1 << 15  # rows per batch while they are read
SAMPLE_ROWS = 100_000  # training rows from which the bins of numbers are computed
BINS = 100  # quantile bins of a numeric column
BLOCKS = 20  # of the training rows, which belong in turn to one and the other half
PRIOR_ROWS = 20  # rows at the mean rate that are added to those of every value
DRIFT_GROUPS = 20  # groups of values that are compared between periods

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


class ColumnCounts:
    """Rows and clicks by id in the two halves of the training rows, and rows by id in the test rows."""

    def __init__(self, size: int, edges: Numbers | None = None) -> None:
        self.edges = edges  # between the bins of a numeric column, whose bin 0 is a missing number
        self.train, self.clicks = np.zeros((2, size), np.int64), np.zeros((2, size), np.int64)
        self.test = np.zeros(size, np.int64)

    def add(self, ids: Ids, labels: Numbers, halves: Ids | None) -> None:
        """Count values; ``halves`` is the half of each training row, None for test rows."""
        if halves is None:
            _add_counts(self.test, ids)
            return
        clicked = labels > 0
        for half in (0, 1):
            rows = halves == half
            if rows.any():
                _add_counts(self.train[half], ids[rows])
                _add_counts(self.clicks[half], ids[rows & clicked])


def _add_counts(counts: Ids, ids: Ids) -> None:
    if len(counts) <= len(ids):
        counts += np.bincount(ids, minlength=len(counts))
    else:
        np.add.at(counts, ids, 1)


@dataclass(frozen=True)
class FieldCounts:
    """The counts of one field."""

    field: Field
    columns: tuple[ColumnCounts, ...]  # several of a numeric field of several columns
    seen: int | None  # distinct values before rare ones were merged, if known
    missing: Ids  # (2,) training rows without a value: all, positive
    total: tuple[int, int]  # training rows: all, positive

    @property
    def missing_share(self) -> float:
        """Share of training rows without a value."""
        return float(self.missing[0] / self.total[0])

    @property
    def present(self) -> tuple[int, int]:
        """Number of training rows with a value: all, positive."""
        return self.total[0] - int(self.missing[0]), self.total[1] - int(self.missing[1])

    @property
    def distinct(self) -> int | None:
        """Number of distinct values of ids, None for numbers."""
        if self.seen is not None or self.field.kind == "numeric":
            return self.seen
        return int(np.count_nonzero(self.columns[0].train.sum(0)[FIRST_ID:]))

    def alone_auc(self) -> float:
        r"""Return the AUC of the field alone on one half of the training rows, by click rates of the other half.

        .. math:: r_v = \frac{\text{clicks}_v + m\,\bar r}{\text{rows}_v + m}, \qquad m = 20

        Values that the first half does not have get the mean rate, so values that occur once predict nothing.
        """
        return max(_rate_auc(column.train, column.clicks) for column in self.columns)

    def drift(self) -> float:
        """Return the population stability index between training and test rows, the largest of the columns."""
        return max(stability_index(column.train.sum(0), column.test) for column in self.columns)

    def unseen_share(self) -> float:
        """Return the share of test rows whose value is in no training row."""
        column = self.columns[0]
        return float(column.test[column.train.sum(0) == 0].sum() / max(1, column.test.sum()))


def _rate_auc(rows: Ids, clicks: Ids) -> float:
    mean = clicks[0].sum() / max(1, rows[0].sum())
    rates = (clicks[0] + PRIOR_ROWS * mean) / (rows[0] + PRIOR_ROWS)
    return counted_auc(rates, clicks[1], rows[1] - clicks[1])


def counted_auc(scores: Numbers, clicks: Ids, others: Ids) -> float:
    """Return the AUC of values with a score, clicks and non-clicks each; 0.5 with one class only.

    >>> counted_auc(np.array([0.1, 0.9]), np.array([0, 5]), np.array([5, 0]))
    1.0
    """
    if not clicks.sum() or not others.sum():
        return 0.5
    _, group = np.unique(scores, return_inverse=True)
    positive, negative = np.bincount(group, clicks), np.bincount(group, others)
    below = np.cumsum(negative) - 0.5 * negative
    return float(positive @ below / positive.sum() / negative.sum())


def stability_index(train: Ids, test: Ids) -> float:
    r"""Return the population stability index of the frequencies of values in two periods.

    .. math:: \sum_g (q_g - p_g) \log(q_g / p_g)

    over at most 20 groups of consecutive ids with about equal frequency; a frequent value is a group of its own. Half
    a row is added to every group, and the index expected without drift, (G - 1)(1/n + 1/m), is subtracted.

    >>> stability_index(np.array([500, 500]), np.array([500, 500]))
    0.0
    """
    total, later = int(train.sum()), int(test.sum())
    if not total or not later:
        return 0.0
    both = train + test * (total / later)  # so that values of the test rows alone have groups, too
    end = np.cumsum(both) / both.sum()
    middle = end - both / both.sum() / 2
    group = np.unique((middle * DRIFT_GROUPS).astype(np.int64), return_inverse=True)[1]
    index = population_stability(*(np.bincount(group, rows).astype(np.float64)[None] for rows in (train, test)))
    return max(0.0, float(index[0]))


def count_fields(splits: DataSplits, schema: Schema) -> dict[str, FieldCounts]:
    """Count the values of each field in the training rows and in the test rows."""
    counts = _empty_counts(splits, schema)
    block = -(-splits.train.rows // BLOCKS)
    for rows in (splits.train, splits.test):
        first = 0
        for batch in rows.stream(READ_ROWS, fields=schema.names):
            sample = batch_columns(batch, schema)
            halves = (np.arange(first, first + len(sample)) // block) % 2 if rows is splits.train else None
            for field in counts.values():
                _count_batch(field, sample, halves)
            first += len(sample)
    return counts


def _empty_counts(splits: DataSplits, schema: Schema) -> dict[str, FieldCounts]:
    train = splits.train
    sample = train.part(max(0, train.rows - SAMPLE_ROWS), train.rows)
    numeric = schema.subset([field.name for field in schema if field.kind == "numeric"])
    batches = list(sample.stream(READ_ROWS, fields=numeric.names)) if len(numeric) else []
    numbers = [batch_columns(batch, numeric).numbers for batch in batches]
    counts = {}
    for field in schema:
        columns = [ColumnCounts(field.cardinality)]
        if field.kind == "numeric":
            values = np.concatenate([part[field.name] for part in numbers])
            edges = [quantile_edges(column) for column in values.T]
            columns = [ColumnCounts(len(column_edges) + 2, column_edges) for column_edges in edges]
        seen = _distinct_seen(train, field)
        total = train.rows, train.label_counts()[0]
        counts[field.name] = FieldCounts(field, tuple(columns), seen, np.zeros(2, np.int64), total)
    return counts


def _distinct_seen(rows: Dataset, field: Field) -> int | None:
    """Return the number of distinct values that the encoder saw; None if it is not stored."""
    about: Mapping[str, Any] = rows.vocabulary_about(field.name)
    seen = about.get("values_seen")
    return seen if isinstance(seen, int) else None


def _count_batch(counts: FieldCounts, rows: SampledRows, halves: Ids | None) -> None:
    name, labels = counts.field.name, rows.labels
    if counts.field.kind == "numeric":
        values = rows.numbers[name]
        edges = [np.empty(0) if column.edges is None else column.edges for column in counts.columns]
        columns = [bin_numbers(values[:, number], column_edges) for number, column_edges in enumerate(edges)]
        is_missing = np.asarray(np.isnan(values).all(1))
    elif counts.field.kind == "multi":
        ids, sizes = rows.bags[name]
        row_of = np.arange(len(rows)).repeat(sizes)
        columns = [ids.astype(np.int64)]
        is_missing = sizes == 0
        is_missing[row_of[ids == MISSING_ID]] = True
        labels, halves = labels[row_of], None if halves is None else halves[row_of]
    else:
        columns = [rows.ids[name].astype(np.int64)]
        is_missing = columns[0] == MISSING_ID
    for column, ids in zip(counts.columns, columns, strict=True):
        column.add(ids, labels, halves)
    if halves is not None:
        counts.missing[:] += np.array([is_missing.sum(), is_missing[rows.labels > 0].sum()], np.int64)


def quantile_edges(values: Numbers) -> Numbers:
    """Return the edges of at most 100 bins with about as many numbers each; NaN is not counted."""
    return bin_edges(values[~np.isnan(values)], BINS)


def bin_numbers(raw: Numbers, edges: Numbers) -> Ids:
    """Return the bin of each number, starting at 1; 0 if it is missing.

    >>> bin_numbers(np.array([0.5, np.nan, 2.0]), np.array([1.0])).tolist()
    [1, 0, 2]
    """
    return np.where(np.isnan(raw), 0, 1 + np.searchsorted(edges, np.nan_to_num(raw), side="right"))
