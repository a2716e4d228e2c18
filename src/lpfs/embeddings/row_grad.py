"""Gradients by rows: a batch uses few rows of a weight (R, D), so its gradient holds only these rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.embeddings._backends import backend_for
from lpfs.errors import StateError


@dataclass(frozen=True)
class RowGrad:
    """The gradient of some rows of a weight: ``values[i]`` (D,) belongs to row ``rows[i]``.

    ``rows`` (U,) has no duplicates. On a GPU its length depends only on the shape of the batch, so that no count
    has to be synchronized; unused entries have row -1. All rows are in [span[0], span[1]), the rows of the fields
    that were looked up; None means any row.
    """

    rows: Tensor
    values: Tensor
    span: tuple[int, int] | None = None

    def compact(self) -> RowGrad:
        """Return the gradient without the unused entries, which exist only on a GPU."""
        if self.rows.is_cpu:
            return self
        used = self.rows >= 0
        return RowGrad(self.rows[used], self.values[used], self.span)

    def overlaps(self, other: RowGrad) -> bool:
        """Return whether both may contain the same row."""
        first, second = self.span, other.span
        return first is None or second is None or (first[0] < second[1] and second[0] < first[1])


class RowParameter(nn.Parameter):
    """A weight (R, D) that collects its gradient as :class:`RowGrad`; ``grad`` stays None."""

    row_grads: list[RowGrad]

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> RowParameter:
        self: RowParameter = super().__new__(cls, data, requires_grad)
        self.row_grads = []
        _install_optimizer_check()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowParameter, (self.detach(), self.requires_grad)


def row_parameters(parameters: Iterable[Tensor]) -> list[RowParameter]:
    """Return the parameters that collect their gradient by rows."""
    return [parameter for parameter in parameters if isinstance(parameter, RowParameter)]


def clear_grads(parameters: Iterable[Tensor]) -> None:
    """Clear ``grad`` of every parameter, and the gradients by rows."""
    for parameter in parameters:
        parameter.grad = None
        if isinstance(parameter, RowParameter):
            parameter.row_grads.clear()


def add_grad(weight: RowParameter, piece: RowGrad) -> None:
    """Add the gradient of one lookup; at 16, 32, 64 … pieces they are merged, which limits the memory."""
    weight.row_grads.append(piece)
    count = len(weight.row_grads)
    if count >= 16 and count & (count - 1) == 0:
        merged_row_grads(weight)


def merged_row_grads(weight: RowParameter) -> list[RowGrad]:
    """Merge the gradient of a weight, in place, into pieces without a common row, and return them.

    Lookups of different fields have no row in common. If a field was looked up several times before the step, its
    pieces are summed in the order of the lookups.
    """
    pieces = weight.row_grads
    if len(pieces) > 1:
        groups: list[list[int]] = []  # indices of the pieces that overlap
        for index, piece in enumerate(pieces):
            overlapping = [group for group in groups if any(pieces[member].overlaps(piece) for member in group)]
            groups = [group for group in groups if group not in overlapping]
            groups.append([*sorted(member for group in overlapping for member in group), index])
        pieces[:] = [sum_pieces(weight, [pieces[member] for member in group]) for group in groups]
    return list(pieces)


def sum_pieces(weight: RowParameter, pieces: list[RowGrad]) -> RowGrad:
    """Sum pieces in order, as if their rows were the ids of one large field."""
    if len(pieces) == 1:
        return pieces[0]
    spans = [piece.span or (0, len(weight)) for piece in pieces]
    span = min(start for start, _ in spans), max(stop for _, stop in spans)
    pieces = [piece.compact() for piece in pieces]
    ids = torch.cat([piece.rows for piece in pieces])[:, None] - span[0]
    values = torch.cat([piece.values for piece in pieces])[:, None]
    summed, _ = backend_for(weight).reduce(weight, torch.tensor(span, device=ids.device), ids, None, values)
    return RowGrad(summed.rows, summed.values, span)


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients, including those by rows."""
    return nn.utils.get_total_norm(_gradients(parameters))


def scale_grads(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients, including those by rows, in place."""
    for grad in _gradients(parameters):
        grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    grads = []
    for parameter in parameters:
        if parameter.grad is not None:
            grads.append(parameter.grad)
        if isinstance(parameter, RowParameter):
            for piece in merged_row_grads(parameter):
                if not piece.rows.is_cpu:  # unused entries must not count
                    piece.values.masked_fill_((piece.rows < 0)[:, None], 0)
                grads.append(piece.values)
    return grads


_checked: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # groups at the check


@cache
def _install_optimizer_check() -> None:
    register_optimizer_step_pre_hook(_check_optimizer_knows_rows)


def _check_optimizer_knows_rows(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise StateError in the first step of an optimizer that has a table but no row updates."""
    if _checked.get(optimizer) == len(optimizer.param_groups) or hasattr(optimizer, "knows_rows"):
        return
    if any(row_parameters(group["params"]) for group in optimizer.param_groups):
        raise StateError(
            f"{type(optimizer).__name__} has the weight of a Table, whose gradient is stored by rows, and would never "
            "update it. Use Adagrad, RowWiseAdagrad, Adam or SGD of lpfs.embeddings, which also update other parameters"
        )
    _checked[optimizer] = len(optimizer.param_groups)
