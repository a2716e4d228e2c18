"""DCNv2: cross layers that learn feature products of bounded degree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs, Pooling
from lpfs.models.layers import Layout, dense_layers
from lpfs.schema import Schema

MAX_LAYERS = 1000


class DCNv2(Model):
    r"""Deep & Cross Network V2 (Wang et al. 2021), on the concatenation x₀ of the gated embeddings.

    .. math:: x_{l+1} = x_0 \odot (W_l x_l + b_l) + x_l, \qquad
              y = \mathrm{top}(x_L) \text{ (stacked)}, \quad \mathrm{top}(x_0) + V x_L \text{ (parallel)}

    A dropped field is zero in x₀ and in every layer, so its rows and columns of W can be removed.

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        layers: number of cross layers.
        rank: rank of W = U V with two thin matrices; 0 for one full matrix.
        structure: dense layers on top of the cross layers (``stacked``) or in parallel (``parallel``).
        hidden: widths of the hidden layers.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        layers: int = 3,
        rank: int = 0,
        structure: Literal["stacked", "parallel"] = "stacked",
        hidden: Sequence[int] = (256, 128),
        pooling: Pooling = "mean",
        silent: Sequence[str] = (),
    ) -> None:
        config = {"dim": dim, "layers": layers, "rank": rank, "structure": structure, "hidden": hidden}
        super().__init__(schema, silent, {**config, "pooling": pooling})
        if structure not in ("stacked", "parallel"):
            raise InputError(f"structure must be stacked or parallel, found {structure!r}")
        if not 1 <= layers <= MAX_LAYERS or rank < 0:
            raise InputError(f"layers must be 1 to {MAX_LAYERS} and rank at least 0, found {layers} and {rank}")
        self.inputs = Inputs(self.reads, self.reads.names, dim, pooling=pooling, slots=self.slots())
        width = len(schema) * dim
        self.crosses = nn.ModuleList(_cross_layer(width, rank) for _ in range(layers))
        self.top = dense_layers(width, hidden, self.outputs_count)
        self.beside = nn.Linear(width, self.outputs_count, bias=False) if structure == "parallel" else None

    def outputs(self, batch: Batch) -> Tensor:
        start = crossed = self.inputs(batch).flatten(1)  # (B, N·D)
        for layer in self.crosses:
            crossed = torch.addcmul(crossed, start, layer(crossed))
        out: Tensor = self.top(crossed) if self.beside is None else self.top(start) + self.beside(crossed)
        return out

    def layout(self) -> Layout:
        fields = [(name, self.inputs.dim) for name in self.slots()]
        readers = ["top.0.weight"] if self.beside is None else ["top.0.weight", "beside.weight"]
        result = {**super().layout(), **{reader: {1: fields} for reader in readers}}
        for number, layer in enumerate(self.crosses):
            if isinstance(layer, nn.Linear):
                result[f"crosses.{number}.weight"] = {0: fields, 1: fields}
                result[f"crosses.{number}.bias"] = {0: fields}
            else:
                result[f"crosses.{number}.0.weight"] = {1: fields}
                result[f"crosses.{number}.1.weight"] = result[f"crosses.{number}.1.bias"] = {0: fields}
        return result


def _cross_layer(width: int, rank: int) -> nn.Module:
    if not rank:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
