"""The small net that the selector trains: an embedding for every column, concatenated, then an MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

DIM = 8


class Columns(nn.Module):
    """The embeddings of all columns, (B, N, D): numeric ones first, then categorical ones.

    A number v becomes v·w, or m where it is missing; an id becomes its row of a table. All weights are drawn from
    ``random``, so that nobody else's random numbers are touched.
    """

    starts: Tensor

    def __init__(self, numeric: int, sizes: Sequence[int], random: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, DIM, generator=random) / math.sqrt(DIM))
        self.absent = nn.Parameter(torch.zeros(numeric, DIM))
        self.rows = skip_init(nn.Embedding, max(1, sum(sizes)), DIM)
        nn.init.normal_(self.rows.weight, std=1 / math.sqrt(DIM), generator=random)
        starts = torch.tensor([0, *sizes[:-1]] if sizes else [], dtype=torch.int64)
        self.register_buffer("starts", starts.cumsum(0))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        """Return the embeddings (B, N, D) of numbers (B, C), marks (B, C) or (B, 0), and ids (B, M)."""
        parts = numbers[:, :, None] * self.weight  # (B, C, D)
        if missing.shape[1]:
            parts = parts + missing[:, :, None] * self.absent
        if not ids.shape[1]:
            return parts
        return torch.cat([parts, self.rows(ids + self.starts)], dim=1)


class Net(nn.Module):
    """Columns, concatenated, then an MLP with ReLUs; returns logits (B, outputs)."""

    def __init__(
        self, numeric: int, sizes: Sequence[int], hidden: Sequence[int], outputs: int, random: torch.Generator
    ) -> None:
        super().__init__()
        self.columns = Columns(numeric, sizes, random)
        widths = [(numeric + len(sizes)) * DIM, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [_linear(before, after, random), nn.ReLU()]
        self.top = nn.Sequential(*layers, _linear(widths[-1], outputs, random))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        """Return the logits (B, outputs)."""
        logits: Tensor = self.top(self.columns(numbers, missing, ids).flatten(1))
        return logits


def _linear(before: int, after: int, random: torch.Generator) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, before, after)
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=random)
    nn.init.zeros_(layer.bias)
    return layer
