"""Looking rows up, with the gate in the same pass; the gradient goes to ``weight.row_grads``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from lpfs.tables.engines.choice import engine_for
from lpfs.tables.engines.plain import check_ids
from lpfs.tables.rows import RowParameter


class Lookup(torch.autograd.Function):
    """(B, F) ids to (B, F, D) gated embeddings."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
        """Gather."""
        ctx.save_for_backward(starts, ids, gate)
        ctx.weight = weight
        out: Tensor = engine_for(weight).gather(weight, starts, ids, gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Reduce the gradient by rows."""
        starts, ids, gate = ctx.saved_tensors
        return None, None, None, _collect(ctx.weight, starts, ids, gate, grad.contiguous())


class BagLookup(torch.autograd.Function):
    """Bags of ids (V,) with (B,) offsets to (B, D) gated sums or means; an empty bag gives zeros."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, starts: Tensor, ids: Tensor, offsets: Tensor, gate: Tensor | None, mean: bool
    ) -> Tensor:
        """Sum; ``starts`` (2,) and ``gate`` (1,) are those of this one field."""
        check_ids(starts, ids[:, None])
        rows = ids + starts[0]
        out = embedding_bag(rows, weight.detach(), offsets.to(rows.dtype), mode="mean" if mean else "sum")
        ctx.save_for_backward(starts, ids, offsets, gate)
        ctx.weight, ctx.mean = weight, mean
        return out if gate is None else out * gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Hand every id the gradient of its bag, then reduce."""
        starts, ids, offsets, gate = ctx.saved_tensors
        sizes = torch.diff(offsets.long(), append=offsets.new_tensor([len(ids)]).long())
        if ctx.mean:
            grad = grad / sizes.clamp(min=1)[:, None]
        each = grad.repeat_interleave(sizes, 0, output_size=len(ids))
        gate_grad = _collect(ctx.weight, starts, ids[:, None], gate, each[:, None])
        return None, None, None, None, gate_grad, None


def _collect(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor) -> Tensor | None:
    rows, gate_grad = engine_for(weight).reduce(weight, starts, ids, gate, grad)
    if isinstance(weight, RowParameter) and weight.requires_grad and ids.numel():
        weight.row_grads.append(rows)
    result: Tensor | None = gate_grad
    return result
