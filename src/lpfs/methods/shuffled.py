"""A batch with one field shuffled over its rows: the field keeps its values and loses its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.schema import Schema


def shuffled(batch: Batch, schema: Schema, names: Sequence[str], order: Tensor) -> Batch:
    """Return the batch with these fields taken from the rows in ``order`` (B,): whole bags for multi fields."""
    ids, dense, missing, bags = batch.ids, batch.dense, batch.missing, dict(batch.bags)
    column = number = 0
    for field in schema:
        if field.name in names:
            if field.kind == "categorical":
                ids = ids.clone() if ids is batch.ids else ids
                ids[:, column] = batch.ids[order, column]
            elif field.kind == "multi":
                bags[field.name] = _bags(*batch.bags[field.name], order)
            else:
                own = slice(number, number + field.dim)
                dense = dense.clone() if dense is batch.dense else dense
                dense[:, own] = batch.dense[order, own]
                if missing is not None and batch.missing is not None:
                    missing = missing.clone() if missing is batch.missing else missing
                    missing[:, own] = batch.missing[order, own]
        column += field.kind == "categorical"
        number += field.dim if field.kind == "numeric" else 0
    return replace(batch, ids=ids, dense=dense, missing=missing, bags=bags)


def _bags(values: Tensor, offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bags in another order.

    >>> _bags(torch.tensor([7, 8, 9]), torch.tensor([0, 2]), torch.tensor([1, 0]))
    (tensor([9, 7, 8]), tensor([0, 1]))
    """
    starts = offsets.long()
    sizes = torch.diff(starts, append=starts.new_tensor([len(values)]))
    taken = sizes[order]
    ends = taken.cumsum(0)
    first = ends - taken
    within = torch.arange(len(values), device=values.device) - first.repeat_interleave(taken)
    return values[starts[order].repeat_interleave(taken) + within], first.to(offsets.dtype)
