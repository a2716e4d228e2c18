"""The reference backend of embedding tables: torch operations only, on any device and for any dtype."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from lpfs.embeddings.row_grad import RowGrad
from lpfs.errors import InputError

Betas: TypeAlias = tuple[float, float]
Gradients: TypeAlias = tuple[RowGrad, Tensor | None]  # by rows, of the gates


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    """Return g_f · W[start_f + id] as (B, F, D), for ids (B, F) and first rows ``starts`` (F + 1,)."""
    check_ids(starts, ids)
    out = weight.detach().index_select(0, (ids + starts[:-1]).reshape(-1)).view(*ids.shape, weight.shape[1])
    return out if gate is None else out * gate[:, None]


def reduce(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor) -> Gradients:
    r"""Return the gradient by rows and that of the gates, from the gradient (B, F, D) of the gated embeddings.

    With a_r the sum of ``grad`` over all lookups of row r of field f,

    .. math:: \partial L/\partial W_r = g_f a_r, \qquad \partial L/\partial g_f = \sum_r \langle W_r, a_r\rangle

    The second does not vanish at g = 0, so that a zero gate can become non-zero again.
    """
    rows, positions = torch.unique((ids + starts[:-1]).reshape(-1), return_inverse=True)
    summed = grad.new_zeros(len(rows), weight.shape[1])
    summed.index_add_(0, positions, grad.reshape(-1, weight.shape[1]))
    if gate is None:
        return RowGrad(rows, summed), None
    field = torch.searchsorted(starts, rows, right=True) - 1
    products = (weight.detach().index_select(0, rows) * summed).sum(1)
    gate_grad = torch.zeros_like(gate).index_add_(0, field, products)
    return RowGrad(rows, summed * gate.index_select(0, field)[:, None]), gate_grad


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """Update the rows with Adagrad: s += g², w -= lr · g / (√s + eps)."""
    rows, values = grad.rows, grad.values
    sums = total.index_select(0, rows).addcmul_(values, values)
    total.index_copy_(0, rows, sums)
    weight.index_add_(0, rows, values / (sums.sqrt_() + eps), alpha=-float(lr))


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """Update the rows with Adagrad, one sum per row: s += mean g², w -= lr · g / (√s + eps); ``total`` is (R,)."""
    rows, values = grad.rows, grad.values
    sums = total.index_select(0, rows).add_(values.square().mean(1))
    total.index_copy_(0, rows, sums)
    weight.index_add_(0, rows, values / (sums.sqrt_() + eps)[:, None], alpha=-float(lr))


def adam(
    weight: Tensor, mean: Tensor, square: Tensor, grad: RowGrad, lr: float, betas: Betas, eps: float, step: int
) -> None:
    """Update the rows with lazy Adam, as ``torch.optim.SparseAdam``: moments of other rows do not decay."""
    rows, values = grad.rows, grad.values
    first = mean.index_select(0, rows)
    first.add_((values - first).mul_(1 - betas[0]))
    second = square.index_select(0, rows)
    second.add_(values.square().sub_(second).mul_(1 - betas[1]))
    mean.index_copy_(0, rows, first)
    square.index_copy_(0, rows, second)
    weight.index_add_(0, rows, first.div_(second.sqrt_().add_(eps)), alpha=-adam_step_size(lr, betas, step))


def adam_step_size(lr: float, betas: Betas, step: int) -> float:
    """Return lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ)."""
    return float(lr) * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def sgd(weight: Tensor, grad: RowGrad, lr: float) -> None:
    """Update the rows with plain SGD."""
    weight.index_add_(0, grad.rows, grad.values, alpha=-float(lr))


def check_ids(starts: Tensor, ids: Tensor) -> None:
    """Raise InputError with the first id outside its field, which would look up and train rows of another field."""
    sizes = starts.diff()
    valid = (ids >= 0) & (ids < sizes)
    if not bool(valid.all()):
        row, column = (~valid).nonzero()[0].tolist()
        raise InputError(
            f"id {int(ids[row, column])} in row {row}, column {column} is outside its field, which has "
            f"{int(sizes[column])} ids; use a batch of the same schema as the model"
        )
