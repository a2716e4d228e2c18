"""Gradients by rows: a weight (R, D) of which a batch touches a few rows never gets a gradient of its own size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.errors import StateError


@dataclass(frozen=True)
class RowGrad:
    """The gradient of some rows of a weight: ``values[i]`` (D,) belongs to row ``rows[i]``.

    ``rows`` (U,) has no row twice. On a GPU its length is that of the batch, whatever the number of different
    rows, so that nothing waits for a count: what is left over has row -1. ``span``: all rows are in
    [span[0], span[1]), those of the fields that were looked up; None: anywhere.
    """

    rows: Tensor
    values: Tensor
    span: tuple[int, int] | None = None

    def compact(self) -> RowGrad:
        """Return the same without the places that are left over; only a GPU has some."""
        if self.rows.is_cpu:
            return self
        used = self.rows >= 0
        return RowGrad(self.rows[used], self.values[used], self.span)

    def overlaps(self, other: RowGrad) -> bool:
        """Whether the two may have a row in common."""
        if self.span is None or other.span is None:
            return True
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]


class RowParameter(nn.Parameter):
    """A weight (R, D) that collects its gradient as :class:`RowGrad`; ``grad`` stays None."""

    row_grads: list[RowGrad]

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> RowParameter:
        """Make the parameter with an empty list."""
        self: RowParameter = super().__new__(cls, data, requires_grad)
        self.row_grads = []
        _watch_optimizers()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowParameter, (self.detach(), self.requires_grad)


def row_parameters(parameters: Iterable[Tensor]) -> list[RowParameter]:
    """Return those of the parameters that collect their gradient by rows."""
    return [each for each in parameters if isinstance(each, RowParameter)]


def clear_grads(parameters: Iterable[Tensor]) -> None:
    """Forget gradients: ``grad`` of every parameter, and what was collected by rows."""
    for each in parameters:
        each.grad = None
        if isinstance(each, RowParameter):
            each.row_grads.clear()


def add_grad(weight: RowParameter, piece: RowGrad) -> None:
    """Add the gradient of one lookup; now and then the pieces are summed, so that they never fill the memory."""
    weight.row_grads.append(piece)
    number = len(weight.row_grads)
    if number >= 16 and number & (number - 1) == 0:
        merged_row_grads(weight)


def merged_row_grads(weight: RowParameter) -> list[RowGrad]:
    """Return the gradient of a weight in pieces that have no row in common, and keep it so.

    Lookups of different fields have none, so nothing is to be done; where a field was looked up again before
    the step, the pieces are summed in the order of the lookups.
    """
    if len(weight.row_grads) > 1:
        together: list[list[int]] = []  # which pieces, by number, meet each other
        for number, piece in enumerate(weight.row_grads):
            met = [each for each in together if any(weight.row_grads[one].overlaps(piece) for one in each)]
            together = [each for each in together if each not in met]
            together.append([*sorted(one for each in met for one in each), number])
        weight.row_grads[:] = [sum_pieces(weight, [weight.row_grads[one] for one in each]) for each in together]
    return list(weight.row_grads)


def sum_pieces(weight: RowParameter, pieces: list[RowGrad]) -> RowGrad:
    """Sum pieces, in their order: as if their rows were the ids of one large field."""
    if len(pieces) == 1:
        return pieces[0]
    from lpfs.embeddings._torch import backend_for  # the engines import this file

    spans = [each.span or (0, len(weight)) for each in pieces]
    span = min(each[0] for each in spans), max(each[1] for each in spans)
    parts = [each.compact() for each in pieces]
    ids = torch.cat([each.rows for each in parts])[:, None] - span[0]
    values = torch.cat([each.values for each in parts])[:, None]
    summed, _ = backend_for(weight).reduce(weight, torch.tensor(span, device=ids.device), ids, None, values)
    return RowGrad(summed.rows, summed.values, span)


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, by rows or not."""
    return nn.utils.get_total_norm(_gradients(parameters))


def scale_grads(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients, by rows or not, in place."""
    for each in _gradients(parameters):
        each.mul_(factor.to(each.device) if isinstance(factor, Tensor) else factor)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for each in parameters:
        if each.grad is not None:
            found.append(each.grad)
        if isinstance(each, RowParameter):
            for piece in merged_row_grads(each):
                if not piece.rows.is_cpu:  # what is left over counts for nothing
                    piece.values.masked_fill_((piece.rows < 0)[:, None], 0)
                found.append(piece.values)
    return found


# --------------------------------------------------------------- an optimizer that knows nothing of rows

_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_watching: list[bool] = []


def _watch_optimizers() -> None:
    if not _watching:
        register_optimizer_step_pre_hook(_check_optimizer_knows_rows)
        _watching.append(True)


def _check_optimizer_knows_rows(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the first step of an optimizer that would leave its tables as they are."""
    if _seen.get(optimizer) == len(optimizer.param_groups) or hasattr(optimizer, "knows_rows"):
        return
    if any(row_parameters(group["params"]) for group in optimizer.param_groups):
        kind = type(optimizer).__name__
        raise StateError(
            f"{kind} holds the weight of a Table, whose gradient comes by rows: it would never train. Use "
            "Adagrad, RowWiseAdagrad, Adam or SGD of lpfs.embeddings.optim; other parameters move as with torch's"
        )
    _seen[optimizer] = len(optimizer.param_groups)


# It looks at the parameters alone: who calls it himself need not go the long way of torch's hooks.
_check_optimizer_knows_rows.guards = True  # type: ignore[attr-defined]
