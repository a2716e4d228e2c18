"""DenseToken: all numbers of a row through dense layers to one embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from lpfs.gates.parts import PartWeight
from lpfs.models.dense import dense_layers
from lpfs.models.layout import Layout
from lpfs.schema import Field


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
