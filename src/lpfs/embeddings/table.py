"""Looking rows up, with the gate in the same pass; the gradient goes to ``weight.row_grads``.

Table: one weight for the rows of all fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag
from torch.nn.parallel import DistributedDataParallel

from lpfs.embeddings._torch import backend_for, check_ids
from lpfs.embeddings.row_grad import RowGrad, RowParameter, add_grad
from lpfs.errors import InputError, StateError


class EmbeddingLookup(torch.autograd.Function):
    """(B, F) ids to (B, F, D) gated embeddings."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None
    ) -> Tensor:
        """Gather; ``span``: the first row of these fields, and the first after them."""
        check_not_in_ddp(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        ctx.save_for_backward(starts, ids, gate)
        ctx.weight, ctx.span = weight, span
        out: Tensor = backend_for(weight).gather(weight, starts, ids, gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Reduce the gradient by rows."""
        starts, ids, gate = ctx.saved_tensors
        gate_grad = _add_row_grad(ctx.weight, starts, ctx.span, ids, gate, grad)
        return None, None, None, None, gate_grad


class EmbeddingBagLookup(torch.autograd.Function):
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
        check_not_in_ddp(weight)
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
        _add_row_grad(ctx.weight, whole, ctx.span, (rows - starts[0])[:, None], None, each[:, None])
        return None, None, None, None, None, None, gate_grad, None


def _of_each(starts: Tensor, counts: tuple[int, ...], ids: Tensor) -> Tensor:
    """Return the first row (V,) of the field of every id; refuse an id outside its field."""
    each = torch.tensor(counts, device=ids.device)
    sizes = (starts[1:] - starts[:-1]).repeat_interleave(each, output_size=len(ids))
    if not bool(((ids >= 0) & (ids < sizes)).all()):
        for number, own in enumerate(ids.split(counts)):
            check_ids(starts[number : number + 2], own[:, None])
    return starts[:-1].repeat_interleave(each, output_size=len(ids))


def check_not_in_ddp(weight: Tensor) -> None:
    """Refuse a table inside DistributedDataParallel, which waits for a dense gradient that never comes."""
    if DistributedDataParallel._active_ddp_module is not None and isinstance(weight, RowParameter):
        raise StateError(
            "DistributedDataParallel averages dense gradients, and that of a Table comes by rows: it would stay "
            "apart on every rank. Train with lpfs.fit, without a wrapper, started by torchrun: see "
            "docs/distributed.md"
        )


def _add_row_grad(
    weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None, grad: Tensor
) -> Tensor | None:
    if weight.requires_grad and not isinstance(weight, RowParameter):
        raise StateError(
            "the weight of this Table is an ordinary parameter (load_state_dict with assign=True makes it so): it "
            "would never train. Load without assign=True"
        )
    rows, gate_grad = backend_for(weight).reduce(weight, starts, ids, gate, grad.contiguous())
    if isinstance(weight, RowParameter) and weight.requires_grad and ids.numel():
        add_grad(weight, RowGrad(rows.rows, rows.values, span))
    result: Tensor | None = gate_grad
    return result


class Table(nn.Module):
    """The embeddings of all fields of one width: field after field, row after row.

    Gradients are collected by rows (:class:`RowParameter`): train it with an optimizer of
    ``lpfs.embeddings.optim``, which works on any other parameter too.

    Args:
        sizes: how many ids each field has: first the fields with one id a row, then the bags.
        dim: width of a row.
        bags: how many of the fields, the last ones, are bags.
        mean: a bag gives the mean of its rows, or their sum.

    >>> table = Table([10, 5], dim=4)
    >>> table(torch.tensor([[9, 0], [3, 4]], dtype=torch.int32)).shape
    torch.Size([2, 2, 4])

    """

    starts: Tensor

    def __init__(self, sizes: Sequence[int], dim: int, *, bags: int = 0, mean: bool = True) -> None:
        super().__init__()
        self.sizes, self.dim, self.mean = tuple(sizes), dim, mean
        self.fields = len(self.sizes) - bags
        if dim < 1 or any(each < 1 for each in self.sizes) or self.fields < 0:
            raise InputError(f"a table needs a width and sizes of at least 1, found {dim} and {list(sizes)}")
        self._first = tuple(accumulate((0, *self.sizes)))
        self.register_buffer("starts", torch.tensor(self._first), persistent=False)
        self.weight = RowParameter(torch.empty(self._first[-1], dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every row anew: uniform in ±1/√n for a field of n ids."""
        for field, size in enumerate(self.sizes):
            self.rows(field).uniform_(-(size**-0.5), size**-0.5)

    def rows(self, field: int) -> Tensor:
        """Return the rows of one field, as a view of the weight."""
        return self.weight.detach()[self._first[field] : self._first[field + 1]]

    def forward(self, ids: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (B, F, D) for ids (B, F), each field times its gate (F,)."""
        if ids.ndim != 2 or ids.shape[1] != self.fields:
            raise InputError(f"expected ids (B, {self.fields}), found {tuple(ids.shape)}")
        return self._lookup(EmbeddingLookup, 0, self.fields, ids, gate)

    def bags(self, bags: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None = None) -> Tensor:
        """Return (B, F, D) for all bags: of each its ids (V,) and where those of a row begin (B,); gates (F,)."""
        if len(bags) != len(self.sizes) - self.fields:
            raise InputError(f"expected {len(self.sizes) - self.fields} bags, found {len(bags)}")
        return self._bags(self.fields, bags, gate)

    def bag(self, number: int, ids: Tensor, offsets: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (B, D) for bag ``number``: ids (V,), where each row's begin (B,), and the gate (1,)."""
        return self._bags(self.fields + number, [(ids, offsets)], gate)[:, 0]

    def _bags(self, first: int, bags: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None) -> Tensor:
        counts = tuple(len(ids) for ids, _ in bags)
        before = accumulate((0, *counts))
        offsets = torch.stack([at.long() + base for (_, at), base in zip(bags, before, strict=False)])
        ids = torch.cat([ids for ids, _ in bags])
        return self._lookup(EmbeddingBagLookup, first, first + len(bags), counts, ids, offsets, gate, self.mean)

    def _lookup(self, how: type[torch.autograd.Function], first: int, last: int, *given: Any) -> Tensor:
        """Look up in the fields from ``first`` to before ``last``."""
        span = (self._first[first], self._first[last])
        out: Tensor = how.apply(self.weight, self.starts[first : last + 1], span, *given)
        return out

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the table."""
        return f"{len(self.sizes)} fields, {self.weight.shape[0]:,} rows, dim={self.dim}"
