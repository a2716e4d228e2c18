"""Table: one weight for the rows of all fields."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.embeddings.table import BagLookup, Lookup
from lpfs.embeddings.row_grad import RowParameter


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
        return self._look(Lookup, 0, self.fields, ids, gate)

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
        return self._look(BagLookup, first, first + len(bags), counts, ids, offsets, gate, self.mean)

    def _look(self, how: type[torch.autograd.Function], first: int, last: int, *given: Any) -> Tensor:
        """Look up in the fields from ``first`` to before ``last``."""
        span = (self._first[first], self._first[last])
        out: Tensor = how.apply(self.weight, self.starts[first : last + 1], span, *given)
        return out

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the table."""
        return f"{len(self.sizes)} fields, {self.weight.shape[0]:,} rows, dim={self.dim}"
