"""Rows: columns gathered row by row in memory, to be cut or shuffled quickly.

Batch: the rows a model sees at once, as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lpfs.data.store.format import AnyArray
from lpfs.schema import Schema


@dataclass(frozen=True)
class Batch:
    """Rows of a Dataset as tensors; columns follow the order of the schema.

    Args:
        ids: (B, F) int32, one column a categorical field.
        dense: (B, C) float32, the numbers of the numeric fields side by side (a field of width w takes w).
        labels: (B, T) float32, the label first, then the tasks.
        missing: (B, C) bool, where a number is missing (it reads 0.0 there); None when none ever is.
        bags: of each multi field its values and the (B,) offsets where rows begin, both int32, as
            ``torch.nn.EmbeddingBag`` takes them.

    """

    ids: Tensor
    dense: Tensor
    labels: Tensor
    missing: Tensor | None = None
    bags: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which CUDA copies without waiting."""
        return self._map(Tensor.pin_memory)

    def select(self, schema: Schema, names: Sequence[str]) -> Batch:
        """Return the batch with only these fields; ``schema`` says which it holds, and keeps their order."""
        wanted = {schema[name].name for name in names}
        if len(wanted) == len(schema):
            return self
        ids: list[int] = []
        dense: list[int] = []
        seen = at = 0
        for each in schema:
            if each.kind == "numeric":
                dense += range(at, at + each.dim) if each.name in wanted else ()
                at += each.dim
            elif each.kind != "multi":
                ids += [seen] if each.name in wanted else []
                seen += 1
        columns = torch.tensor(dense, dtype=torch.long, device=self.dense.device)
        return Batch(
            self.ids.index_select(1, torch.tensor(ids, dtype=torch.long, device=self.ids.device)),
            self.dense.index_select(1, columns),
            self.labels,
            None if self.missing is None else self.missing.index_select(1, columns),
            {name: bag for name, bag in self.bags.items() if name in wanted},
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.ids),
            change(self.dense),
            change(self.labels),
            None if self.missing is None else change(self.missing),
            {name: (change(values), change(offsets)) for name, (values, offsets) in self.bags.items()},
        )


Index = npt.NDArray[np.int64]
Bag = tuple[AnyArray, Index]  # values, and (n + 1,) offsets


@dataclass(frozen=True)
class RowBlock:
    """What a Batch holds, as arrays of n rows; bags have n + 1 offsets."""

    ids: AnyArray  # (n, F)
    dense: AnyArray  # (n, C)
    labels: AnyArray  # (n, T)
    missing: AnyArray | None = None  # (n, C)
    bags: Mapping[str, Bag] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Index) -> RowBlock:
        """Return a copy of these rows, in this order."""
        return RowBlock(
            self.ids.take(index, 0),
            self.dense.take(index, 0),
            self.labels.take(index, 0),
            None if self.missing is None else self.missing.take(index, 0),
            {name: take_bag(bag, index) for name, bag in self.bags.items()},
        )

    def slice(self, start: int, stop: int) -> RowBlock:
        """Return a view of the rows from ``start`` to before ``stop``."""
        return RowBlock(
            self.ids[start:stop],
            self.dense[start:stop],
            self.labels[start:stop],
            None if self.missing is None else self.missing[start:stop],
            {name: slice_bag(bag, start, stop) for name, bag in self.bags.items()},
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


def slice_bag(bag: Bag, start: int, stop: int) -> Bag:
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


def concat_rows(parts: Sequence[RowBlock]) -> RowBlock:
    """Return all rows of the parts, one part after another."""
    if len(parts) == 1:
        return parts[0]
    missing: Any = None if parts[0].missing is None else np.concatenate([each.missing for each in parts])
    return RowBlock(
        np.concatenate([each.ids for each in parts]),
        np.concatenate([each.dense for each in parts]),
        np.concatenate([each.labels for each in parts]),
        missing,
        {name: concat_bags([each.bags[name] for each in parts]) for name in parts[0].bags},
    )


def concat_bags(bags: Sequence[Bag]) -> Bag:
    """Return all rows of several bags."""
    lengths = np.concatenate([np.diff(offsets) for _, offsets in bags])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.concatenate([values for values, _ in bags]), offsets
