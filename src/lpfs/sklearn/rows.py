"""Rows: the same rows in another order, repeated or weighted, are the same data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def merge_rows(table: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return each distinct row once, with the sum of its weights, in an order that depends on the rows alone.

    So a row of weight 3 and a row that is there three times give the very same search, bit for bit. Rows are
    sorted by a 64-bit hash of their values. Should two different rows have the same hash they stay apart.

    >>> rows, weight = merge_rows(np.array([[1.0], [2.0], [1.0]]), np.array([1.0, 1.0, 2.0]))
    >>> sorted(zip(rows[:, 0].tolist(), weight.tolist()))
    [(1.0, 3.0), (2.0, 1.0)]
    """
    table = np.where(np.isnan(table), np.nan, table + 0.0)  # one NaN and one zero, whatever their bits
    hashes = _hash(table)
    order = np.lexsort([table[:, 0], hashes])
    table, weight, hashes = table[order], weight[order], hashes[order]
    new = np.ones(len(table), dtype=np.bool_)
    new[1:] = hashes[1:] != hashes[:-1]
    same = np.flatnonzero(~new)
    new[same] = (table[same].view(np.uint64) != table[same - 1].view(np.uint64)).any(axis=1)
    first = np.flatnonzero(new)
    return table[first], np.add.reduceat(weight, first)


def _hash(table: Floats) -> NDArray[np.uint64]:
    """Return a hash of every row (n,): multiply, add and shift the bits of its values, column by column."""
    bits = np.ascontiguousarray(table).view(np.uint64)
    hashes = np.full(len(bits), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for column in bits.T:
        hashes = (hashes ^ column) * np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(29)
    return hashes


class Sampler:
    """Batches of row numbers, each row with a probability in proportion to its weight.

    With no more rows than a batch takes there is nothing to draw: every batch is all rows.
    """

    def __init__(self, weight: Floats, batch_size: int, seed: int) -> None:
        self.all = np.arange(len(weight)) if len(weight) <= batch_size else None
        self.cumulated = np.cumsum(weight)
        self.batch_size = batch_size
        self.random = np.random.default_rng(seed)

    def draw(self) -> NDArray[np.intp]:
        """Return the rows of the next batch (B,)."""
        if self.all is not None:
            return self.all
        points = self.random.random(self.batch_size) * self.cumulated[-1]
        rows: NDArray[np.intp] = np.searchsorted(self.cumulated, points, side="right")
        return rows.clip(max=len(self.cumulated) - 1)
