"""Other raw values in some fields of a batch: what the leak check feeds in place of dropped fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from lpfs.data.batches.batch import Batch
from lpfs.schema import Schema


def other_values(schema: Schema, names: Sequence[str]) -> Callable[[Batch], Batch]:
    """Return a function from a batch to one with other values in these fields, of which ids stay in range.

    Every id becomes the next one, every number the next larger whole step, and what was missing is there and the
    other way round. The function returns the batch itself where there are no other values: a field of one id, a
    bag that is empty everywhere.
    """
    wanted = set(names)

    def change(batch: Batch) -> Batch:
        at = column = 0
        for each in schema:
            hit = each.name in wanted
            if each.kind == "numeric":
                if hit and len(batch):
                    batch = _other_numbers(batch, at, at + each.dim)
                at += each.dim
            elif each.kind == "multi":
                if hit:
                    batch = _other_bag(batch, each.name, each.cardinality)
            else:
                if hit and each.cardinality > 1 and len(batch):
                    ids = batch.ids.clone()
                    ids[:, column] = _next(ids[:, column], each.cardinality)
                    batch = replace(batch, ids=ids)
                column += 1
        return batch

    return change


def _next(ids: Tensor, cardinality: int) -> Tensor:
    return (ids + 1) % cardinality


def _other_bag(batch: Batch, name: str, cardinality: int) -> Batch:
    values, offsets = batch.bags[name]
    if cardinality < 2 or not values.numel():
        return batch
    return replace(batch, bags={**batch.bags, name: (_next(values, cardinality), offsets)})


def _other_numbers(batch: Batch, start: int, stop: int) -> Batch:
    dense, missing = batch.dense.clone(), batch.missing
    dense[:, start:stop] += 1
    if missing is not None:
        missing = missing.clone()
        missing[:, start:stop] = ~missing[:, start:stop]
        dense[:, start:stop] = dense[:, start:stop].masked_fill(missing[:, start:stop], 0.0)
    return replace(batch, dense=dense, missing=missing)
