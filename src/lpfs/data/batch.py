"""Rows: columns gathered row by row in memory, to be cut or shuffled quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batches.batch import Batch
from lpfs.data.store.format import AnyArray

Index = npt.NDArray[np.int64]
Bag = tuple[AnyArray, Index]  # values, and (n + 1,) offsets


@dataclass(frozen=True)
class Rows:
    """What a Batch holds, as arrays of n rows; bags have n + 1 offsets."""

    ids: AnyArray  # (n, F)
    dense: AnyArray  # (n, C)
    labels: AnyArray  # (n, T)
    missing: AnyArray | None = None  # (n, C)
    bags: Mapping[str, Bag] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Index) -> Rows:
        """Return a copy of these rows, in this order."""
        return Rows(
            self.ids.take(index, 0),
            self.dense.take(index, 0),
            self.labels.take(index, 0),
            None if self.missing is None else self.missing.take(index, 0),
            {name: take_bag(bag, index) for name, bag in self.bags.items()},
        )

    def cut(self, start: int, stop: int) -> Rows:
        """Return a view of the rows from ``start`` to before ``stop``."""
        return Rows(
            self.ids[start:stop],
            self.dense[start:stop],
            self.labels[start:stop],
            None if self.missing is None else self.missing[start:stop],
            {name: cut_bag(bag, start, stop) for name, bag in self.bags.items()},
        )

    def batch(self) -> Batch:
        """Return the rows as tensors that share this memory."""
        return Batch(
            torch.from_numpy(self.ids),
            torch.from_numpy(self.dense),
            torch.from_numpy(self.labels),
            None if self.missing is None else torch.from_numpy(self.missing),
            {
                name: (torch.from_numpy(values), torch.from_numpy(offsets[:-1].astype(np.int32)))
                for name, (values, offsets) in self.bags.items()
            },
        )


def cut_bag(bag: Bag, start: int, stop: int) -> Bag:
    """Return the rows from ``start`` to before ``stop`` of a bag."""
    values, offsets = bag
    return values[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]


def take_bag(bag: Bag, index: Index) -> Bag:
    """Return the rows of a bag in the order of ``index``."""
    values, offsets = bag
    starts, lengths = offsets[index], offsets[index + 1] - offsets[index]
    ends = np.zeros(len(index) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    where = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    return values.take(where), ends


def join(parts: Sequence[Rows]) -> Rows:
    """Return all rows of the parts, one part after another."""
    if len(parts) == 1:
        return parts[0]
    missing: Any = None if parts[0].missing is None else np.concatenate([each.missing for each in parts])
    return Rows(
        np.concatenate([each.ids for each in parts]),
        np.concatenate([each.dense for each in parts]),
        np.concatenate([each.labels for each in parts]),
        missing,
        {name: join_bags([each.bags[name] for each in parts]) for name in parts[0].bags},
    )


def join_bags(bags: Sequence[Bag]) -> Bag:
    """Return all rows of several bags."""
    lengths = np.concatenate([np.diff(offsets) for _, offsets in bags])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.concatenate([values for values, _ in bags]), offsets
