"""centre: move the mean of every embedding into the bias of the layer that reads it; the model stays the same.

An embedding says two things: its mean, which is the same for every row and tells nothing about any, and how the
rows differ. A gate takes both away, and a trained model misses the mean of a useless field as it would miss a
bias. Where a Linear reads the embeddings, W e + b = W (e - ē) + (b + W ē): the mean can move into the bias before
gates are put on. Then a gate takes away only what tells rows apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lpfs.data.batch import Batch
from lpfs.models.base import Model
from lpfs.train.checkpoint import Resumable
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import rank_batches, weighted_mean
from lpfs.train.evaluate import device_of, on_device

ROWS = 20_000  # so many tell the mean well enough: any vector moves into the bias, the mean is only the best one


@torch.no_grad()
def centre(model: Model, batches: Iterable[Batch], rows: int = ROWS) -> bool:
    """Centre the embeddings of fields with one id a row, in place; say whether the model has a place for the mean.

    A stream that can tell its position is put back to it. The logits stay equal up to rounding.
    """
    path = model.entrance()
    table = model.inputs.table
    if path is None or table is None or not model.inputs.ids:
        return False
    entrance = model.get_submodule(path)
    assert isinstance(entrance, nn.Linear)
    ids, dim = model.inputs.ids, model.inputs.dim
    means = _means(model, batches, rows)[:ids, :dim].to(entrance.weight.dtype)  # (F, D)
    columns = dict(zip(model.inputs.slots, entrance.weight.unflatten(1, (-1, dim)).unbind(1), strict=True))
    for part, name in enumerate(model.inputs.names[:ids]):
        first, stop = sum(table.sizes[:part]), sum(table.sizes[: part + 1])
        table.weight.data[first:stop, :dim] -= means[part]
        entrance.bias.add_(columns[name] @ means[part])
    return True


def _means(model: Model, batches: Iterable[Batch], rows: int) -> torch.Tensor:
    """Return the mean embedding of every part (N, D) over the first rows, as read without gates."""
    position = batches.state_dict() if isinstance(batches, Resumable) else None
    device = device_of(model)
    total: torch.Tensor = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    order = [model.inputs.slots.index(name) for name in model.inputs.names]
    ranks, own = current_group(), rank_batches(batches)
    for batch in own:
        read: torch.Tensor = model.inputs(on_device(batch, device))
        total = torch.add(total, read.double().sum(0))
        count += len(batch)
        if count * ranks.world >= rows:
            break
    if position is not None and isinstance(batches, Resumable):
        batches.load_state_dict(position)
    return weighted_mean(ranks, total / max(1, count), count, "averaging embeddings")[order]
