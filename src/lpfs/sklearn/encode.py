"""From the columns of a table to what the net reads: standardised numbers, ids, marks of missing values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

# Standardised numbers are cut here: one wild value must not steer the search.
CUT = 5.0
# Ids of the values that a categorical column has beside its frequent ones.
MISSING, RARE, FIRST = 0, 1, 2


@dataclass(frozen=True)
class Encoded:
    """A table for the net: numeric columns first, then categorical ones.

    Args:
        numbers: (n, C), standardised; 0 where missing.
        missing: (n, C), 1 where missing; without columns where nothing is.
        ids: (n, M).
        sizes: how many ids each categorical column has.
        order: the columns of the table in the order of the net (N,).

    """

    numbers: Tensor
    missing: Tensor
    ids: Tensor
    sizes: Sequence[int]
    order: Sequence[int]

    def __getitem__(self, rows: slice) -> Encoded:
        """Return some of the rows."""
        return Encoded(self.numbers[rows], self.missing[rows], self.ids[rows], self.sizes, self.order)


def compact(table: Floats, categorical: NDArray[np.bool_]) -> Floats:
    """Return the table with the codes of each categorical column numbered anew, by those that are there.

    >>> compact(np.array([[7.0, 7.0], [3.0, 3.0]]), np.array([False, True]))
    array([[7., 1.],
           [3., 0.]])
    """
    table = table.copy()
    for at in np.flatnonzero(categorical):
        there = ~np.isnan(table[:, at])
        table[there, at] = np.unique(table[there, at], return_inverse=True)[1]
    return table


def encode(table: Floats, categorical: NDArray[np.bool_], weight: Floats) -> Encoded:
    """Encode a table (n, N) of numbers and codes; means, deviations and frequencies are weighted.

    A column that is the same in every row, or missing in every row, becomes zeros: it must not serve as a bias.
    """
    ids = {int(at): frequent_ids(table[:, at], weight) for at in np.flatnonzero(categorical)}
    ids = {at: each for at, each in ids.items() if each.min() < each.max()}
    numeric = [at for at in range(table.shape[1]) if at not in ids]
    numbers = np.zeros((len(table), len(numeric)))
    missing = np.zeros((len(table), len(numeric)), dtype=np.bool_)
    for place, at in enumerate(numeric):
        if not categorical[at]:
            numbers[:, place] = standardised(table[:, at], weight)
            gone = np.isnan(table[:, at])
            missing[:, place] = gone & ~gone.all()
    return Encoded(
        numbers=torch.from_numpy(numbers).float(),
        missing=torch.from_numpy(missing).float() if missing.any() else torch.zeros(len(table), 0),
        ids=torch.from_numpy(np.stack(list(ids.values()), 1)) if ids else torch.zeros(len(table), 0).long(),
        sizes=[int(each.max()) + 1 for each in ids.values()],
        order=[*numeric, *ids],
    )


def standardised(values: Floats, weight: Floats) -> Floats:
    """Return (v - mean) / deviation, weighted, within ±5; 0 where v is missing or always the same.

    >>> standardised(np.array([1.0, 3.0, np.nan]), np.ones(3))
    array([-1.,  1.,  0.])
    """
    there = ~np.isnan(values)
    share = np.where(there, weight, 0.0) / max(float(weight[there].sum()), 1e-300)
    values = np.where(there, values, 0.0)
    values = values / max(float(np.abs(values).max()), 1e-300)  # squares of it can neither overflow nor vanish
    centred = np.where(there, values - float(share @ values), 0.0)
    deviation = math.sqrt(float(share @ centred**2))
    if deviation < 1e-12:
        return np.zeros_like(values)
    result: Floats = np.clip(centred / deviation, -CUT, CUT)
    return result


def frequent_ids(codes: Floats, weight: Floats) -> NDArray[np.int64]:
    """Return ids (n,): 0 for a missing value, 1 for a rare one, then the frequent ones by their codes.

    Rare is what has less than max(3, √n/4) of the total weight n: what is seen a few times can only be learnt
    by heart.

    >>> frequent_ids(np.array([0.0, 0, 0, 1, np.nan]), np.ones(5)).tolist()
    [2, 2, 2, 1, 0]
    """
    there = ~np.isnan(codes)
    ids = np.zeros(len(codes), dtype=np.int64)
    values, inverse = np.unique(codes[there], return_inverse=True)
    seen = np.bincount(inverse, weights=weight[there], minlength=len(values))
    frequent = seen >= max(3.0, math.sqrt(float(weight.sum())) / 4)
    ids[there] = np.where(frequent, FIRST - 1 + np.cumsum(frequent), RARE)[inverse]
    return ids
