"""LeAP-like: ShuffleGate with a penalty that is weighted by how much a shuffle changes a field."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpfs.methods.masks import MEAN_DECAY
from lpfs.methods.shufflegate import ShuffleGate, ShuffleGateMethod, ShuffleGateOptions


class LeAP(ShuffleGate):
    r"""The gate of ShuffleGate with a weight on the penalty of each field,

    .. math:: \lambda \sum_n w_n g_n, \qquad w_n = \frac{N D_n}{\sum_m D_m}, \qquad
              D_n = \mathbb{E}\,\|e_n - e_{n,\pi}\|_2

    D_n is a running mean over batches (decay 0.99) without a gradient: fields whose embeddings differ much between
    rows resist an equal penalty, and rare ones do not. The weights have a mean of 1.
    """  # fmt: skip

    divergence: Tensor

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: ShuffleGateOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.register_buffer("divergence", torch.zeros(len(names)))
        self.batch_divergence: Tensor | None = None  # (N,) of this step

    def mix(self, tokens: Tensor, others: Tensor, numbers: Tensor) -> Tensor:
        distances = (tokens.detach() - others).float().norm(dim=2).mean(0)  # (P,)
        divergence = torch.zeros_like(self.divergence) if self.batch_divergence is None else self.batch_divergence
        self.batch_divergence = divergence.index_copy(0, numbers, distances)
        return super().mix(tokens, others, numbers)

    def update_means(self) -> None:
        if self.batch_divergence is not None:
            self.divergence.lerp_(self.batch_divergence, 1 - MEAN_DECAY)
            self.batch_divergence = None

    def weights(self) -> Tensor:
        """Return w (N,); all 1 before the first step."""
        mean = self.divergence.mean()
        return torch.where(mean > 0, self.divergence / mean.clamp(min=1e-30), torch.ones_like(self.divergence))

    def penalty(self, rows: int) -> Tensor:
        return self.options.strength * (self.weights() * self.gates()).sum()


class LeAPMethod(ShuffleGateMethod):
    """A method like LeAP: ShuffleGate with a penalty adapted to the permutation divergence of each field.

    LeAP, 2026 (arXiv 2606.01111). Its public code has the gates of ShuffleGate under another name; the adaptive
    penalty by "permutation divergence", which its abstract announces, is not in that code. The norm, the memory and
    the weights here are this package's reading, so results say little about the authors' method.
    """

    mask_class = LeAP
