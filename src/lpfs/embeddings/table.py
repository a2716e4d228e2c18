"""Table: the embeddings of many fields in one weight, and the autograd functions of its lookups.

Gates are applied inside the lookup; the gradient of the weight goes to ``weight.row_grads``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, pad
from torch.nn.parallel import DistributedDataParallel

from lpfs.embeddings._backends import backend_for
from lpfs.embeddings._torch import check_ids
from lpfs.embeddings.row_grad import RowGrad, RowParameter, add_grad
from lpfs.errors import InputError, StateError

UNUSED = 64  # unused ids of a padded bag that are summed together


class EmbeddingLookup(torch.autograd.Function):
    """Gated embeddings (B, F, D) of ids (B, F); ``span`` is the range [start, stop) of rows of these fields.

    ``skip``: whether rows of fields whose constant gate is zero are left out of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None, skip: bool
    ) -> Tensor:
        check_not_in_ddp(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        ctx.save_for_backward(starts, ids, gate)
        ctx.weight, ctx.span, ctx.skip = weight, span, skip
        return cast(Tensor, backend_for(weight).gather(weight, starts, ids, gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        starts, ids, gate = ctx.saved_tensors
        if gate is None or ctx.needs_input_grad[4] or not ctx.skip:
            return None, None, None, None, _add_row_grad(ctx.weight, starts, ctx.span, ids, gate, grad), None
        used = gate.nonzero()[:, 0]
        rows = (ids[:, used] + (starts[used] - starts[0])).reshape(-1, 1)
        grad = (grad[:, used] * gate[used, None]).reshape(-1, 1, grad.shape[2])
        _add_row_grad(ctx.weight, starts[[0, -1]], ctx.span, rows, None, grad)  # of all fields as if they were one
        return None, None, None, None, None, None


class EmbeddingBagLookup(torch.autograd.Function):
    """Gated sums or means (B, F, D) of the bags of F fields; an empty bag gives zeros.

    The ids (V,) are ordered by field, ``counts`` per field; the bags start at offsets (F, B).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, starts: Tensor, span: tuple[int, int], counts: tuple[int, ...], ids: Tensor,
                offsets: Tensor, gate: Tensor | None, mean: bool) -> Tensor:  # fmt: skip
        check_not_in_ddp(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        rows = ids + _first_rows(starts, counts, ids)
        flat = offsets.reshape(-1).to(rows.dtype)
        out = embedding_bag(rows, weight.detach(), flat, mode="mean" if mean else "sum")
        out = out.view(*offsets.shape, weight.shape[1]).transpose(0, 1)
        ctx.save_for_backward(starts, rows, flat, gate, None if gate is None else out)
        ctx.weight, ctx.span, ctx.mean = weight, span, mean
        return out if gate is None else out * gate[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        starts, rows, offsets, gate, out = ctx.saved_tensors
        grad, gate_grad = _before_gates(grad, out, gate)
        sizes = torch.diff(offsets, append=offsets.new_tensor([len(rows)]))
        grad = grad.transpose(0, 1).reshape(len(sizes), grad.shape[2])
        if ctx.mean:
            grad = grad / sizes.clamp(min=1)[:, None]
        grad = grad.repeat_interleave(sizes, 0, output_size=len(rows))  # of every id
        bounds = torch.stack([starts[0], starts[-1]])  # reduce all fields as if they were one
        _add_row_grad(ctx.weight, bounds, ctx.span, (rows - starts[0])[:, None], None, grad[:, None])
        return None, None, None, None, None, None, gate_grad, None


class PaddedBagLookup(torch.autograd.Function):
    """:class:`EmbeddingBagLookup` for padded bags: ids (F, V), offsets (F, B + 1) that end with the number of used ids.

    No length depends on the ids and nothing is read on the host, so that a CUDA graph can capture it; an id outside its
    field gives nan. An unused id gets a gradient of zero.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, offsets: Tensor,
                gate: Tensor | None, mean: bool) -> Tensor:  # fmt: skip
        check_not_in_ddp(weight)
        gate = None if gate is None else gate.to(weight.dtype)
        fields, length = ids.shape
        sizes = starts.diff()[:, None]
        is_wrong = ((ids < 0) | (ids >= sizes)).any()
        rows = ids.clamp(min=0).minimum(sizes - 1) + starts[:-1, None]
        # the unused ids are bags of at most UNUSED ids: one thread sums a bag
        unused = torch.arange(UNUSED, length, UNUSED, device=ids.device).maximum(offsets[:, -1:])
        flat = torch.cat([offsets, unused], 1) + torch.arange(0, fields * length, length, device=ids.device)[:, None]
        out = embedding_bag(rows.view(-1), weight.detach(), flat.view(-1), mode="mean" if mean else "sum")
        out = out.view(fields, -1, weight.shape[1])[:, : offsets.shape[1] - 1].transpose(0, 1)
        out = torch.where(is_wrong, torch.nan, out)
        ctx.save_for_backward(starts, rows, offsets, gate, None if gate is None else out)
        ctx.weight, ctx.span, ctx.mean = weight, span, mean
        return out if gate is None else out * gate[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        starts, rows, offsets, gate, out = ctx.saved_tensors
        grad, gate_grad = _before_gates(grad, out, gate)
        grad = grad.transpose(0, 1)  # (F, B, D)
        if ctx.mean:
            grad = grad / offsets.diff().clamp(min=1)[:, :, None]
        positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows).contiguous()
        bags = torch.searchsorted(offsets, positions, right=True) - 1  # of every id; B for an unused one
        grad = pad(grad, (0, 0, 0, 1)).gather(1, bags[:, :, None].expand(-1, -1, grad.shape[2]))  # of every id
        ids = rows - starts[:-1, None]
        _add_row_grad(ctx.weight, starts, ctx.span, ids.t().contiguous(), None, grad.transpose(0, 1).contiguous())
        return None, None, None, None, None, gate_grad, None


def _before_gates(grad: Tensor, out: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradient (B, F, D) of the sums ``out`` before the gates, and that of the gates (F,)."""
    if gate is None or out is None:
        return grad, None
    return grad * gate[:, None], (grad * out).sum((0, 2))


def _first_rows(starts: Tensor, counts: tuple[int, ...], ids: Tensor) -> Tensor:
    """Return the first row (V,) of the field of every id; raise InputError if an id is outside its field."""
    repeats = torch.tensor(counts, device=ids.device)
    sizes = starts.diff().repeat_interleave(repeats, output_size=len(ids))
    if not bool(((ids >= 0) & (ids < sizes)).all()):
        for field, field_ids in enumerate(ids.split(counts)):
            check_ids(starts[field : field + 2], field_ids[:, None])
    return starts[:-1].repeat_interleave(repeats, output_size=len(ids))


def check_not_in_ddp(weight: Tensor) -> None:
    """Raise StateError for a table inside DistributedDataParallel, which handles dense gradients only."""
    if DistributedDataParallel._active_ddp_module is not None and isinstance(weight, RowParameter):
        raise StateError(
            "DistributedDataParallel averages dense gradients only; the gradient of a Table is stored by rows and "
            "would differ between ranks. Train with lpfs.fit without a wrapper, started by torchrun; see docs/scale.md"
        )


def _add_row_grad(
    weight: Tensor, starts: Tensor, span: tuple[int, int], ids: Tensor, gate: Tensor | None, grad: Tensor
) -> Tensor | None:
    if weight.requires_grad and not isinstance(weight, RowParameter):
        raise StateError(
            "the weight of this Table is an ordinary parameter, probably after load_state_dict(assign=True), and "
            "would never train. Load without assign=True"
        )
    rows, gate_grad = backend_for(weight).reduce(weight, starts, ids, gate, grad)
    if isinstance(weight, RowParameter) and weight.requires_grad and ids.numel():
        add_grad(weight, RowGrad(rows.rows, rows.values, span))
    return cast("Tensor | None", gate_grad)


class Table(nn.Module):
    """The embeddings of all fields of one width, field after field, in one weight.

    Gradients are collected by rows (:class:`RowParameter`): train it with an optimizer of ``lpfs.embeddings``,
    which also updates any other parameter.

    Args:
        sizes: number of ids of each field: first the fields with one id per row, then the bags.
        dim: width of an embedding.
        bags: number of fields, at the end of ``sizes``, that are bags.
        mean: whether a bag gives the mean of its embeddings or their sum.

    >>> table = Table([10, 5], dim=4)
    >>> table(torch.tensor([[9, 0], [3, 4]], dtype=torch.int32)).shape
    torch.Size([2, 2, 4])
    """

    starts: Tensor
    # whether rows of fields with one id whose constant gate is zero are left out of the gradient, so that no optimizer
    # updates them; the gates are read for it, so that a step cannot be captured
    skips_zero_gates = False

    def __init__(self, sizes: Sequence[int], dim: int, *, bags: int = 0, mean: bool = True) -> None:
        super().__init__()
        self.sizes, self.dim, self.mean = tuple(sizes), dim, mean
        self.fields = len(self.sizes) - bags
        if dim < 1 or any(size < 1 for size in self.sizes) or self.fields < 0:
            raise InputError(f"dim and sizes of a Table must be at least 1, found {dim} and {list(sizes)}")
        self._first = tuple(accumulate((0, *self.sizes)))
        self.register_buffer("starts", torch.tensor(self._first), persistent=False)
        self.weight = RowParameter(torch.empty(self._first[-1], dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows uniformly in ±1/√n for a field of n ids."""
        for field, size in enumerate(self.sizes):
            self.rows(field).uniform_(-(size**-0.5), size**-0.5)

    def rows(self, field: int) -> Tensor:
        """Return the rows of one field, as a view of the weight."""
        return self.weight.detach()[self._first[field] : self._first[field + 1]]

    def forward(self, ids: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return embeddings (B, F, D) of ids (B, F), multiplied by the gates (F,) of the fields."""
        if ids.ndim != 2 or ids.shape[1] != self.fields:
            raise InputError(f"expected ids (B, {self.fields}), found {tuple(ids.shape)}")
        return self._lookup(EmbeddingLookup, 0, self.fields, ids, gate, self.skips_zero_gates)

    def bags(
        self, bags: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None = None, *, padded: bool = False
    ) -> Tensor:
        """Return (B, F, D) for all bags, each given as ids (V,) and offsets (B,), with gates (F,).

        Bags that are ``padded`` to one length have B + 1 offsets, the last one the number of used ids.
        """
        if len(bags) != len(self.sizes) - self.fields:
            raise InputError(f"expected {len(self.sizes) - self.fields} bags, found {len(bags)}")
        if not padded:
            return self._bags(self.fields, bags, gate)
        ids, offsets = (torch.stack(tensors).long() for tensors in zip(*bags, strict=True))
        return self._lookup(PaddedBagLookup, self.fields, len(self.sizes), ids, offsets, gate, self.mean)

    def bag(self, number: int, ids: Tensor, offsets: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (B, D) for bag ``number``, given as ids (V,) and offsets (B,), with a gate (1,)."""
        return self._bags(self.fields + number, [(ids, offsets)], gate)[:, 0]

    def _bags(self, first: int, bags: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None) -> Tensor:
        counts = tuple(len(ids) for ids, _ in bags)
        bases = accumulate((0, *counts))
        offsets = torch.stack([start.long() + base for (_, start), base in zip(bags, bases, strict=False)])
        ids = torch.cat([ids for ids, _ in bags])
        return self._lookup(EmbeddingBagLookup, first, first + len(bags), counts, ids, offsets, gate, self.mean)

    def _lookup(self, function: type[torch.autograd.Function], start: int, stop: int, *arguments: Any) -> Tensor:
        """Look up in the fields ``start`` to ``stop`` - 1."""
        span = (self._first[start], self._first[stop])
        return cast(Tensor, function.apply(self.weight, self.starts[start : stop + 1], span, *arguments))

    def extra_repr(self) -> str:
        return f"{len(self.sizes)} fields, {self.weight.shape[0]:,} rows, dim={self.dim}"
