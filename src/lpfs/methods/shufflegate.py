"""ShuffleGate: a gate per field between its value and a value from another row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.methods.base import Count, MethodOptions, NonNegative, Positive
from lpfs.methods.masks import TokenMask
from lpfs.methods.training import MaskMethod


@dataclass(frozen=True)
class ShuffleGateOptions(MethodOptions):
    """Learning rate of θ, steps between its updates, λ of the penalty, and sharpness of the gate."""

    lr: Positive = 0.01
    every: Count = 1
    strength: NonNegative = 0.0025
    sharpness: Positive = 5.0


class ShuffleGate(TokenMask):
    r"""A gate per field between its embedding and that of another row, which gets no gradient,

    .. math:: g\,e + (1 - g)\,\mathrm{stopgrad}(e_{\pi}), \qquad g = \sigma(5\theta),
              \quad \theta_0 = 1, \qquad \text{penalty } \lambda \textstyle\sum_n g_n

    with a new random order π of the batch for every field and step. The score is g; the method keeps g > ½.
    """  # fmt: skip

    options: ShuffleGateOptions

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: ShuffleGateOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.theta = nn.Parameter(torch.ones(len(names)))

    def gates(self) -> Tensor:
        """Return g (N,)."""
        return (self.options.sharpness * self.theta).sigmoid()

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the mixed embeddings (B, P, D); the embeddings unchanged in evaluation mode."""
        if not self.training:
            return tokens
        order = self.uniform(*tokens.shape[:2]).argsort(0)[:, :, None]  # (B, P, 1)
        others = tokens.detach().gather(0, order.expand_as(tokens))
        return self.mix(tokens, others, numbers)

    def mix(self, tokens: Tensor, others: Tensor, numbers: Tensor) -> Tensor:
        """Return embeddings and those of other rows (B, P, D), mixed by the gates of the parts ``numbers`` (P,)."""
        gates = self.gates()[numbers][:, None].to(tokens.dtype)  # (P, 1)
        return torch.lerp(others, tokens, gates)

    def penalty(self, rows: int) -> Tensor:
        return self.options.strength * self.gates().sum()

    def scores(self) -> Tensor:
        return self.gates().detach()

    def selected(self) -> Tensor:
        return self.theta.detach() > 0


class ShuffleGateMethod(MaskMethod):
    """A gate that mixes a field with its values from other rows; weights and gates are trained on separate rows.

    ShuffleGate: An Efficient and Self-Polarizing Feature Selection Method for Large-Scale Deep Models in
    Industry, 2025. Defined as in public code, where λ is on the mean of g (0.1 for 9 fields of MovieLens-1M, 0.00125
    for Ali-CCP, 0.005 for Avazu, 0.02 for 39 fields of Criteo) and the pull on one gate shrinks with the number of
    fields. Here λ is per gate, with a default between those values. Other differences: the public code trains θ and
    untrained weights with Adam at 0.001, and stops early on the AUC of shuffled batches; here θ has a rate of 0.01
    for short searches from a pretrained, centered model.
    """

    Options = ShuffleGateOptions
    mask_class = ShuffleGate
    targets = ("keep", "penalty")
    holdout_only = True
