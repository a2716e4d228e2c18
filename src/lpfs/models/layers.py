"""Layers of the models: dense layers, embeddings of numeric fields, one token for all numeric fields.

Also the weight layout: which slices of a weight belong to which field, so that a smaller model can copy its part.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from lpfs.errors import InputError
from lpfs.gates.sites import PartWeight
from lpfs.schema import Field


def dense_layers(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """Return Linear-ReLU-…-Linear from ``width`` inputs over ``hidden`` to ``out`` outputs.

    >>> dense_layers(8, (4,), 1)
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=1, bias=True)
    )
    """
    if width < 1:
        raise InputError("the dense layers would have no input columns; keep at least one field that reaches them")
    if any(not isinstance(size, int) or size < 1 for size in hidden):
        raise InputError(f"hidden widths must be integers of at least 1, found {list(hidden)}")
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


# the owners along one dim of a weight, in order: (owner, size); an owner is a field, a pair of fields, …
Segments: TypeAlias = Sequence[tuple[Hashable, int]]
# name of a parameter -> dim -> segments; parameters that do not depend on fields are left out
Layout: TypeAlias = Mapping[str, Mapping[int, Segments]]


def indices_to_copy(old: Layout, new: Layout) -> dict[str, dict[int, Tensor]]:
    """Return the indices of the old parameters that a new layout takes, by parameter and dim.

    Dims and parameters that do not change are left out.

    >>> indices_to_copy({"w": {1: [("a", 2), ("b", 1), ("c", 2)]}}, {"w": {1: [("c", 2), ("a", 2)]}})
    {'w': {1: tensor([3, 4, 0, 1])}}
    """
    result: dict[str, dict[int, Tensor]] = {}
    for name, dims in new.items():
        for dim, segments in dims.items():
            if list(segments) == list(old[name][dim]):
                continue
            ranges: dict[Hashable, range] = {}
            start = 0
            for owner, width in old[name][dim]:
                ranges[owner] = range(start, start + width)
                start += width
            indices = [index for owner, _ in segments for index in ranges[owner]]
            result.setdefault(name, {})[dim] = torch.tensor(indices, dtype=torch.long)
    return result


def prefixed(prefix: str, layout: Layout) -> Layout:
    """Return a layout with a prefix before the names of the parameters."""
    return {f"{prefix}.{name}": dims for name, dims in layout.items()}


class DenseToken(nn.Module):
    """One embedding for all numeric fields, from dense layers; its one gate multiplies the last Linear layer.

    The input of the first Linear layer is the numbers, followed by the indicators of missing values.
    """

    parts = 1

    def __init__(self, fields: Sequence[Field], dim: int, *, hidden: Sequence[int], name: str) -> None:
        super().__init__()
        self.names: tuple[str, ...] = (name,)
        self.columns, self.dim = sum(field.dim for field in fields), dim
        self.bottom = dense_layers(2 * self.columns, hidden, dim)

    def forward(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, 1, D) for numbers (B, C), indicators of missing values (B, C), and the gate (1,)."""
        layers = [layer for layer in self.bottom if isinstance(layer, nn.Linear)]
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
        """Return the last Linear layer; the gate multiplies it in forward, so absorbing is bitwise exact."""
        last = f"bottom.{len(self.bottom) - 1}"
        return [PartWeight(f"{last}.{name}", 0, 0, self.dim, exact=True) for name in ("weight", "bias")]

    def layout(self) -> Layout:
        """Return an empty layout: all numeric fields are kept or dropped together."""
        return {}


class NumericEmbeddings(nn.Module):
    r"""Embeddings of numeric fields, each with its own weights; for a field of w numbers v:

    .. math:: e_f = g_f (v W_f + m M_f), \qquad m \in \{0, 1\}^w

    m marks the missing numbers, whose v is 0. The gate multiplies the weights, which are smaller than the result.
    """

    column_field: Tensor  # (C,) index of the field of each column
    grouped: Tensor  # (C,) the columns, sorted by the width of their field
    order: Tensor  # (N,) position of each field in that order

    def __init__(self, fields: Sequence[Field], dim: int) -> None:
        super().__init__()
        self.names = tuple(field.name for field in fields)
        self.widths = tuple(field.dim for field in fields)
        self.starts = tuple(sum(self.widths[:number]) for number in range(len(fields)))
        self.dim, self.parts = dim, len(fields)
        self.plain = all(width == 1 for width in self.widths)
        total = sum(self.widths)
        self.weight = nn.Parameter(torch.empty(total, dim))
        self.missing = nn.Parameter(torch.empty(total, dim))
        owners = [number for number, width in enumerate(self.widths) for _ in range(width)]
        self.register_buffer("column_field", torch.tensor(owners), persistent=False)
        self.groups: dict[int, list[int]] = {}  # indices of the fields of each width
        for number, width in enumerate(self.widths):
            self.groups.setdefault(width, []).append(number)
        order = [number for numbers in self.groups.values() for number in numbers]
        columns = [self.starts[number] + k for number in order for k in range(self.widths[number])]
        self.register_buffer("grouped", torch.tensor(columns), persistent=False)
        self.register_buffer("order", torch.tensor(order).argsort(), persistent=False)
        self.reset_parameters()

    @classmethod
    def join(cls, modules: Sequence[NumericEmbeddings]) -> NumericEmbeddings:
        """Return one module for the fields of all modules, in order, with copies of their weights."""
        fields = [
            Field(name, "numeric", dim=width)
            for module in modules
            for name, width in zip(module.names, module.widths, strict=True)
        ]
        with torch.random.fork_rng(devices=[]):
            joined = cls(fields, modules[0].dim)
        joined.weight = nn.Parameter(torch.cat([module.weight.detach() for module in modules]))
        joined.missing = nn.Parameter(torch.cat([module.missing.detach() for module in modules]))
        return joined

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weights uniformly in ±1/√(w·D) for a field of w numbers."""
        for start, width in zip(self.starts, self.widths, strict=True):
            bound = (width * self.dim) ** -0.5
            self.weight[start : start + width].uniform_(-bound, bound)
            self.missing[start : start + width].uniform_(-bound, bound)

    def forward(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, N, D) for numbers (B, C), indicators of missing values (B, C), and gates (N,)."""
        weight: Tensor = self.weight
        absent: Tensor = self.missing
        if gate is not None:
            factor = (gate if self.plain else gate.index_select(0, self.column_field))[:, None].to(weight.dtype)
            weight, absent = weight * factor, absent * factor
        out = dense.to(weight.dtype)[:, :, None] * weight  # (B, C, D)
        if missing is not None:
            out = torch.addcmul(out, missing.to(weight.dtype)[:, :, None], absent)
        return out if self.plain else self._sum_columns(out)

    def _sum_columns(self, out: Tensor) -> Tensor:
        """Sum the columns of each field, all fields of one width at a time, and restore the order of fields."""
        out = out.index_select(1, self.grouped)
        pieces, start = [], 0
        for width, numbers in self.groups.items():
            stop = start + width * len(numbers)
            pieces.append(out[:, start:stop].unflatten(1, (len(numbers), width)).sum(2))
            start = stop
        return torch.cat(pieces, 1).index_select(1, self.order)

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the rows of a field; the gate multiplies them in forward, so absorbing is bitwise exact."""
        start, stop = self.starts[part], self.starts[part] + self.widths[part]
        return [PartWeight(name, 0, start, stop, exact=True) for name in ("weight", "missing")]

    def layout(self) -> Layout:
        """Return which rows belong to which field."""
        rows = list(zip(self.names, self.widths, strict=True))
        return {"weight": {0: rows}, "missing": {0: rows}}

    def extra_repr(self) -> str:
        return f"{self.parts} fields, {sum(self.widths)} numbers, dim={self.dim}"
