"""What ranks share: the batches of a stream; a model and its optimizer that rank 0 alone has trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lpfs.data.batches.batch import Batch
from lpfs.data.stream import Stream
from lpfs.train.codec import pack, unpack
from lpfs.train.distributed.group import current
from lpfs.train.tensor_io import DTYPES, NAMES


def shared(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return this rank's part of every batch of a Stream; any other batches are its part already."""
    ranks = current()
    if ranks.several and isinstance(batches, Stream) and batches.world == 1:
        return batches.share(ranks.rank, ranks.world)
    return batches


def take_buffers(model: nn.Module) -> None:
    """Give a model the buffers that it has on rank 0: running means are of the rows that a rank has seen."""
    current().copy([each for each in model.buffers() if each.numel()], "taking over buffers")


def take_over(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model and its optimizer the state that they have on rank 0."""
    ranks = current()
    if not ranks.several:
        return
    values, tensors = pack({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    shapes = {name: [NAMES[each.dtype], list(each.shape)] for name, each in tensors.items()}
    theirs = ranks.agree(lambda: {"values": values, "shapes": shapes}, "taking over a model")
    if not ranks.leads:
        shapes = theirs["shapes"]
        tensors = {name: torch.empty(shape, dtype=DTYPES[kind]) for name, (kind, shape) in shapes.items()}
    moved = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    ranks.copy(list(moved.values()), "taking over a model")
    if not ranks.leads:
        state = unpack(theirs["values"], moved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
