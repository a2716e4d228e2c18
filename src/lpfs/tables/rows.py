"""Gradients by rows: a weight (R, D) of which a batch touches a few rows never gets a gradient of its own size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RowGrad:
    """The gradient of some rows of a weight: ``values[i]`` (D,) belongs to row ``rows[i]``.

    ``rows`` (U,) has no row twice. On a GPU its length is that of the batch, whatever the number of different
    rows, so that nothing waits for a count: what is left over has row -1.
    """

    rows: Tensor
    values: Tensor

    def compact(self) -> RowGrad:
        """Return the same without the places that are left over."""
        used = self.rows >= 0
        return self if bool(used.all()) else RowGrad(self.rows[used], self.values[used])


class RowParameter(nn.Parameter):
    """A weight (R, D) that collects its gradient as :class:`RowGrad`; ``grad`` stays None."""

    row_grads: list[RowGrad]

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> RowParameter:
        """Make the parameter with an empty list."""
        self: RowParameter = super().__new__(cls, data, requires_grad)
        self.row_grads = []
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowParameter, (self.detach(), self.requires_grad)


def row_parameters(parameters: Iterable[Tensor]) -> list[RowParameter]:
    """Return those of the parameters that collect their gradient by rows."""
    return [each for each in parameters if isinstance(each, RowParameter)]


def forget(parameters: Iterable[Tensor]) -> None:
    """Forget gradients: ``grad`` of every parameter, and what was collected by rows."""
    for each in parameters:
        each.grad = None
        if isinstance(each, RowParameter):
            each.row_grads.clear()


def collected(weight: RowParameter) -> RowGrad | None:
    """Return the whole gradient of a weight with no row twice, however many lookups it comes from."""
    pieces = weight.row_grads
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    rows = torch.cat([each.compact().rows for each in pieces])
    values = torch.cat([each.compact().values for each in pieces])
    unique, where = torch.unique(rows, return_inverse=True)
    return RowGrad(unique, values.new_zeros(len(unique), values.shape[1]).index_add_(0, where, values))
