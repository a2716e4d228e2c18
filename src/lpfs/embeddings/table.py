"""Looking rows up, with the gate in the same pass; the gradient goes to ``weight.row_grads``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag
from torch.nn.parallel import DistributedDataParallel

from lpfs.errors import StateError
from lpfs.tables.engines.choice import engine_for
from lpfs.embeddings._torch import check_ids
from lpfs.embeddings.row_grad import RowGrad, RowParameter, add_grad


class Lookup(torch.autograd.Function):
    """(B, F) ids to (B, F, D) gated embeddings."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None
    ) -> Tensor:
        """Gather; ``span``: the first row of these fields, and the first after them."""
        refuse_averaging(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        ctx.save_for_backward(starts, ids, gate)
        ctx.weight, ctx.span = weight, span
        out: Tensor = engine_for(weight).gather(weight, starts, ids, gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Reduce the gradient by rows."""
        starts, ids, gate = ctx.saved_tensors
        gate_grad = _collect(ctx.weight, starts, ctx.span, ids, gate, grad)
        return None, None, None, None, gate_grad


class BagLookup(torch.autograd.Function):
    """Bags of F fields to (B, F, D) gated sums or means, in one pass; an empty bag gives zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        starts: Tensor,
        span: tuple[int, int],
        counts: tuple[int, ...],
        ids: Tensor,
        offsets: Tensor,
        gate: Tensor | None,
        mean: bool,
    ) -> Tensor:
        """Sum; ids (V,) field after field, ``counts`` of each; where every bag begins in them (F, B)."""
        refuse_averaging(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        rows = ids + _of_each(starts, counts, ids)
        flat = offsets.reshape(-1).to(rows.dtype)
        out = embedding_bag(rows, weight.detach(), flat, mode="mean" if mean else "sum")
        out = out.view(*offsets.shape, weight.shape[1]).transpose(0, 1)
        ctx.save_for_backward(starts, rows, flat, gate, None if gate is None else out)
        ctx.weight, ctx.span, ctx.mean = weight, span, mean
        return out if gate is None else out * gate[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Hand every id the gradient of its bag, then reduce."""
        starts, rows, offsets, gate, out = ctx.saved_tensors
        gate_grad = None
        if gate is not None:
            gate_grad = (grad * out).sum((0, 2))
            grad = grad * gate[:, None]
        sizes = torch.diff(offsets, append=offsets.new_tensor([len(rows)]))
        grad = grad.transpose(0, 1).reshape(len(sizes), grad.shape[2])
        if ctx.mean:
            grad = grad / sizes.clamp(min=1)[:, None]
        each = grad.repeat_interleave(sizes, 0, output_size=len(rows))
        whole = torch.stack([starts[0], starts[-1]])  # to those who reduce, one field that holds all
        _collect(ctx.weight, whole, ctx.span, (rows - starts[0])[:, None], None, each[:, None])
        return None, None, None, None, None, None, gate_grad, None


def _of_each(starts: Tensor, counts: tuple[int, ...], ids: Tensor) -> Tensor:
    """Return the first row (V,) of the field of every id; refuse an id outside its field."""
    each = torch.tensor(counts, device=ids.device)
    sizes = (starts[1:] - starts[:-1]).repeat_interleave(each, output_size=len(ids))
    if not bool(((ids >= 0) & (ids < sizes)).all()):
        for number, own in enumerate(ids.split(counts)):
            check_ids(starts[number : number + 2], own[:, None])
    return starts[:-1].repeat_interleave(each, output_size=len(ids))


def refuse_averaging(weight: Tensor) -> None:
    """Refuse a table inside DistributedDataParallel, which waits for a dense gradient that never comes."""
    if DistributedDataParallel._active_ddp_module is not None and isinstance(weight, RowParameter):
        raise StateError(
            "DistributedDataParallel averages dense gradients, and that of a Table comes by rows: it would stay "
            "apart on every rank. Train with lpfs.fit, without a wrapper, started by torchrun: see "
            "docs/distributed.md"
        )


def _collect(
    weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None, grad: Tensor
) -> Tensor | None:
    if weight.requires_grad and not isinstance(weight, RowParameter):
        raise StateError(
            "the weight of this Table is an ordinary parameter (load_state_dict with assign=True makes it so): it "
            "would never train. Load without assign=True"
        )
    rows, gate_grad = engine_for(weight).reduce(weight, starts, ids, gate, grad.contiguous())
    if isinstance(weight, RowParameter) and weight.requires_grad and ids.numel():
        add_grad(weight, RowGrad(rows.rows, rows.values, span))
    result: Tensor | None = gate_grad
    return result
