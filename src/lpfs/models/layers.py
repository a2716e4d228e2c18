"""Numbers: numeric fields to embeddings, all fields in one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpfs.gates.parts import PartWeight
from lpfs.models.layout import Layout
from lpfs.schema import Field


class Numbers(nn.Module):
    r"""Numeric fields, each with its own weights: a field of w numbers v, some of them missing, gives

    .. math:: e_f = g_f (v W_f + m M_f), \qquad m \in \{0, 1\}^w

    A missing number reads 0. The gate multiplies the weights, which are small, and not what comes out.

    Args:
        fields: the numeric fields, in order; a field's ``dim`` is how many numbers it has.
        dim: width of an embedding.

    """  # fmt: skip

    column_field: Tensor  # (C,) the field of each column
    grouped: Tensor  # (C,) the columns, those of fields of one width side by side
    order: Tensor  # (N,) where each field is then

    def __init__(self, fields: Sequence[Field], dim: int) -> None:
        super().__init__()
        self.names = tuple(each.name for each in fields)
        self.widths = tuple(each.dim for each in fields)
        self.starts = tuple(sum(self.widths[:number]) for number in range(len(fields)))
        self.dim, self.parts = dim, len(fields)
        self.plain = all(width == 1 for width in self.widths)
        total = sum(self.widths)
        self.weight = nn.Parameter(torch.empty(total, dim))
        self.missing = nn.Parameter(torch.empty(total, dim))
        owners = [number for number, width in enumerate(self.widths) for _ in range(width)]
        self.register_buffer("column_field", torch.tensor(owners), persistent=False)
        self.groups = _by_width(self.widths)
        listed = [number for numbers in self.groups.values() for number in numbers]
        columns = [self.starts[number] + k for number in listed for k in range(self.widths[number])]
        self.register_buffer("grouped", torch.tensor(columns), persistent=False)
        self.register_buffer("order", torch.tensor(listed).argsort(), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew: uniform in ±1/√(w·D) for a field of w numbers."""
        for start, width in zip(self.starts, self.widths, strict=True):
            bound = (width * self.dim) ** -0.5
            self.weight[start : start + width].uniform_(-bound, bound)
            self.missing[start : start + width].uniform_(-bound, bound)

    def forward(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, N, D) for the numbers (B, C), which of them are missing (B, C), and gates (N,)."""
        weight: Tensor = self.weight
        absent: Tensor = self.missing
        if gate is not None:
            factor = (gate if self.plain else gate.index_select(0, self.column_field))[:, None].to(weight.dtype)
            weight = weight * factor
            absent = absent * factor
        dense = dense.to(weight.dtype)
        if missing is not None:
            missing = missing.to(weight.dtype)
        out = dense[:, :, None] * weight  # (B, C, D)
        if missing is not None:
            out = torch.addcmul(out, missing[:, :, None], absent)
        return out if self.plain else self._summed(out)

    def _summed(self, out: Tensor) -> Tensor:
        """Add up the columns of each field: all fields of one width at a time, then put in order."""
        out = out.index_select(1, self.grouped)
        pieces, at = [], 0
        for width, numbers in self.groups.items():
            stop = at + width * len(numbers)
            pieces.append(out[:, at:stop].unflatten(1, (len(numbers), width)).sum(2))
            at = stop
        return torch.cat(pieces, 1).index_select(1, self.order)

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the rows of a field; they are multiplied in forward too, so that absorbing is bit-equal."""
        start, stop = self.starts[part], self.starts[part] + self.widths[part]
        return [PartWeight(name, 0, start, stop, exact=True) for name in ("weight", "missing")]

    def layout(self) -> Layout:
        """Say whose rows are whose."""
        rows = list(zip(self.names, self.widths, strict=True))
        return {"weight": {0: rows}, "missing": {0: rows}}

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the numbers."""
        return f"{self.parts} fields, {sum(self.widths)} numbers, dim={self.dim}"


def _by_width(widths: Sequence[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for number, width in enumerate(widths):
        groups.setdefault(width, []).append(number)
    return groups
