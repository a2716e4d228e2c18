"""Batch: rows of a Dataset as tensors. RowBlock: the same rows as NumPy arrays, before they become batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from lpfs.data.store.format import AnyArray
from lpfs.schema import Schema

if TYPE_CHECKING:
    import torch  # imported where it is used: ``prepare`` needs no tensors
    from torch import Tensor

Index = npt.NDArray[np.int64]
Bag = tuple[AnyArray, Index]  # values, and (n + 1,) offsets
Rows = TypeVar("Rows", "Batch", "RowBlock")


@dataclass(frozen=True)
class Batch:
    """Rows of a Dataset as tensors; columns follow the order of the schema.

    Args:
        ids: (B, F) int32, one column per categorical field.
        dense: (B, C) float32, the values of the numeric fields side by side (a field of width w has w columns).
        labels: (B, T) float32, the label first, then the tasks.
        missing: (B, C) bool, True where a number is missing (``dense`` is 0.0 there); None if the Dataset has no
            missing numbers.
        bags: for each multi field its values and the (B,) offsets at which the rows start, both int32, as
            ``torch.nn.EmbeddingBag`` expects them.
        padded: whether the values of all bags are padded to one length, as a captured step needs them. A last offset,
            the (B + 1)th, is then the number of those that are used.
    """

    ids: Tensor
    dense: Tensor
    labels: Tensor
    missing: Tensor | None = None
    bags: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    padded: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return map_rows(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which copies to CUDA are asynchronous."""
        return map_rows(self, lambda tensor: tensor.pin_memory())

    def select(self, schema: Schema, names: Sequence[str]) -> Batch:
        """Return the batch with only these fields, in the order of ``schema``, the schema of this batch."""
        import torch

        kept = {schema[name].name for name in names}
        if len(kept) == len(schema):
            return self
        id_names = [item.name for item in schema if item.kind == "categorical"]
        dense_names = [item.name for item in schema if item.kind == "numeric" for _ in range(item.dim)]
        ids, columns = (
            torch.tensor([i for i, name in enumerate(names) if name in kept], dtype=torch.long, device=self.ids.device)
            for names in (id_names, dense_names)
        )
        return Batch(
            self.ids.index_select(1, ids),
            self.dense.index_select(1, columns),
            self.labels,
            None if self.missing is None else self.missing.index_select(1, columns),
            {name: bag for name, bag in self.bags.items() if name in kept},
            self.padded,
        )

    def head(self, rows: int) -> Batch:
        """Return the first rows, as views."""
        if rows >= len(self):
            return self
        bags = {name: (ids if self.padded else ids[: int(starts[rows])], starts[: rows + self.padded])
                for name, (ids, starts) in self.bags.items()}  # fmt: skip
        missing = None if self.missing is None else self.missing[:rows]
        return Batch(self.ids[:rows], self.dense[:rows], self.labels[:rows], missing, bags, self.padded)


@dataclass(frozen=True)
class RowBlock:
    """The contents of a Batch as arrays of n rows; bags have n + 1 offsets."""

    ids: AnyArray  # (n, F)
    dense: AnyArray  # (n, C)
    labels: AnyArray  # (n, T)
    missing: AnyArray | None = None  # (n, C)
    bags: Mapping[str, Bag] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Index) -> RowBlock:
        """Return a copy of the rows at ``index``, in this order."""
        return map_rows(self, lambda array: array.take(index, 0), lambda _, bag: take_bag(bag, index))

    def slice(self, start: int, stop: int) -> RowBlock:
        """Return a view of rows ``start`` to ``stop`` (exclusive)."""
        return map_rows(self, lambda array: array[start:stop], lambda _, bag: slice_bag(bag, start, stop))

    def batch(self) -> Batch:
        """Return the rows as tensors that share this memory."""
        import torch

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


def map_rows(rows: Rows, function: Callable[[Any], Any], bag_function: Callable[[str, Any], Any] | None = None) -> Rows:
    """Apply a function to each array or tensor, and another one to the name and value of each bag."""
    bags: Any = {
        name: (function(bag[0]), function(bag[1])) if bag_function is None else bag_function(name, bag)
        for name, bag in rows.bags.items()
    }
    missing = None if rows.missing is None else function(rows.missing)
    columns: Any = {name: function(getattr(rows, name)) for name in ("ids", "dense", "labels")}
    return replace(rows, **columns, missing=missing, bags=bags)


def concat_rows(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of all blocks, one block after another."""
    if len(blocks) == 1:
        return blocks[0]
    missing: Any = None if blocks[0].missing is None else np.concatenate([block.missing for block in blocks])
    return RowBlock(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.dense for block in blocks]),
        np.concatenate([block.labels for block in blocks]),
        missing,
        {name: concat_bags([block.bags[name] for block in blocks]) for name in blocks[0].bags},
    )


def slice_bag(bag: Bag, start: int, stop: int) -> Bag:
    """Return rows ``start`` to ``stop`` (exclusive) of a bag."""
    values, offsets = bag
    return values[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]


def take_bag(bag: Bag, index: Index) -> Bag:
    """Return the rows of a bag at ``index``, in this order."""
    values, offsets = bag
    starts, lengths = offsets[index], offsets[index + 1] - offsets[index]
    ends = bag_offsets(lengths)
    positions = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    return values.take(positions), ends


def concat_bags(bags: Sequence[Bag]) -> Bag:
    """Return the rows of all bags, one bag after another."""
    lengths = np.concatenate([np.diff(offsets) for _, offsets in bags])
    return np.concatenate([values for values, _ in bags]), bag_offsets(lengths)


def bag_offsets(lengths: AnyArray) -> Index:
    """Return the offsets of bags with the given numbers of values."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
