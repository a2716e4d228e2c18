"""Numbers: numeric fields to embeddings, all fields in one operation.

The dense part of a model: Linear and ReLU in turn.

Layout: which part of which weight belongs to which field, so that a smaller model knows what to take over.

DenseToken: all numbers of a row through dense layers to one embedding.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from lpfs.errors import InputError
from lpfs.gates.parts import PartWeight
from lpfs.schema import Field


def dense_layers(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """Return Linear-ReLU-…-Linear from ``width`` over ``hidden`` to ``out``; the last has no activation.

    >>> dense_layers(8, (4,), 1)
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=1, bias=True)
    )
    """
    if width < 1:
        raise InputError("nothing that reaches the prediction is left: the dense part would read no columns")
    if any(not isinstance(each, int) or each < 1 for each in hidden):
        raise InputError(f"hidden widths must be whole numbers of at least 1, found {list(hidden)}")
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


# along one dim of a weight, who owns what, in order: an owner (a field, a pair of fields, …) and how much
Segments: TypeAlias = Sequence[tuple[Hashable, int]]
# name of a parameter -> dim -> segments; a parameter that is not named does not depend on fields
Layout: TypeAlias = Mapping[str, Mapping[int, Segments]]


def indices_to_copy(old: Layout, new: Layout) -> dict[str, dict[int, Tensor]]:
    """Return, for every parameter of the new layout, which indices of the old one it takes, along each dim.

    A dim that stays whole is not named, nor is a parameter that does.

    >>> taken_over({"w": {1: [("a", 2), ("b", 1), ("c", 2)]}}, {"w": {1: [("c", 2), ("a", 2)]}})
    {'w': {1: tensor([3, 4, 0, 1])}}
    """
    result: dict[str, dict[int, Tensor]] = {}
    for name, dims in new.items():
        for dim, segments in dims.items():
            if list(segments) != list(old[name][dim]):
                result.setdefault(name, {})[dim] = _indices(old[name][dim], segments)
    return result


def prefixed(prefix: str, layout: Layout) -> Layout:
    """Return the layout of a module as seen from its parent."""
    return {f"{prefix}.{name}": dims for name, dims in layout.items()}


def _indices(old: Segments, new: Segments) -> Tensor:
    places: dict[Hashable, range] = {}
    at = 0
    for owner, width in old:
        places[owner] = range(at, at + width)
        at += width
    return torch.tensor([index for owner, _ in new for index in places[owner]], dtype=torch.long)


class DenseToken(nn.Module):
    """One embedding for all numeric fields, under one gate, which multiplies the last Linear.

    The first Linear reads the numbers and then which of them are missing.

    Args:
        fields: the numeric fields, in order.
        dim: width of the embedding.
        hidden: widths of the hidden layers.
        name: of the part.

    """

    parts = 1

    def __init__(self, fields: Sequence[Field], dim: int, *, hidden: Sequence[int], name: str) -> None:
        super().__init__()
        self.names: tuple[str, ...] = (name,)
        self.columns = sum(each.dim for each in fields)
        self.bottom = dense_layers(2 * self.columns, hidden, dim)

    def forward(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, 1, D) for the numbers (B, C), which of them are missing (B, C), and the gate (1,)."""
        layers = [each for each in self.bottom if isinstance(each, nn.Linear)]
        out = dense.to(layers[0].weight.dtype)
        if missing is not None:
            out = torch.cat([out, missing.to(out.dtype)], 1)
        for number, layer in enumerate(layers):
            weight: Tensor = layer.weight
            bias: Tensor = layer.bias
            if number == 0 and missing is None:
                weight = weight[:, : self.columns]
            if number == len(layers) - 1 and gate is not None:
                factor = gate.to(weight.dtype)
                weight, bias = weight * factor, bias * factor
            out = linear(out if number == 0 else relu(out), weight, bias)
        return out[:, None]

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the last Linear, which is multiplied in forward too, so that absorbing is bit-equal."""
        last = len(self.bottom) - 1
        size = self.bottom[last].out_features
        assert isinstance(size, int)
        return [PartWeight(f"bottom.{last}.{name}", 0, 0, size, exact=True) for name in ("weight", "bias")]

    def layout(self) -> Layout:
        """Say nothing: the numeric fields come and go together."""
        return {}


class NumericEmbeddings(nn.Module):
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
