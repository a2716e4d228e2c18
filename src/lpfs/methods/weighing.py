"""Weighing: what the methods share that give every field of every row a weight computed from the row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpfs.methods.masks import Needs, TokenMask

FADING = 0.99  # of the mean weight of a field, a step


class Weighing(TokenMask):
    """Embeddings times weights (B, N); importance is the mean weight of a field over the last rows.

    A subclass computes the weights in :meth:`weights`.
    """

    needs: Needs = "all fields"
    mean: Tensor
    mass: Tensor

    def __init__(self, names: Sequence[str], steps: int, seed: int) -> None:
        super().__init__(names, steps, seed)
        self.register_buffer("mean", torch.zeros(len(names)))
        self.register_buffer("mass", torch.zeros(()))
        self.seen: Tensor | None = None  # mean weights (N,) of the rows of this step

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the weight of every field of every row (B, N) for embeddings (B, N, D)."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the weighed embeddings (B, N, D); parts are fields here, in their order."""
        weights = self.weights(tokens)
        if self.training:
            self.seen = weights.detach().mean(0)
        return tokens * weights[:, :, None].to(tokens.dtype)

    def at(self, step: int) -> None:
        """Take the rows of the step that is done into the mean."""
        super().at(step)
        if self.seen is not None:
            self.mean.lerp_(self.seen.to(self.mean.dtype), 1 - FADING)
            self.mass.lerp_(torch.ones_like(self.mass), 1 - FADING)
            self.seen = None

    def scores(self) -> Tensor:
        """Return the mean weights (N,)."""
        return self.mean / self.mass.clamp(min=1 - FADING)
