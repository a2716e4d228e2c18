"""ShuffleGate: a field fades into its own values from other rows of the batch, as far as it is not needed.

ShuffleGate: An Efficient and Self-Polarizing Feature Selection Method for Large-Scale Deep Models in Industry,
2025. Defined as public code has it; λ and the rate of θ are not known from there, the defaults are this package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.masks import TokenMask
from lpfs.methods.ranking import need_number_or_penalty, strength_of
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of θ, steps between two moves of it, λ of the penalty, sharpness of the gate."""

    lr: float = 0.01
    every: int = 1
    strength: float = 0.1
    sharpness: float = 5.0

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr", "sharpness"), least_zero=("strength",), whole=("every",))


class ShuffleGate(TokenMask):
    r"""A gate a field between its embedding and one of another row, without a gradient,

    .. math:: g\,e + (1 - g)\,\mathrm{stopgrad}(e_{\pi}), \qquad g = \sigma(5\theta),
              \quad \theta_0 = 1, \qquad \text{penalty } \lambda\,\tfrac1N\textstyle\sum_n g_n

    with an order π of the batch drawn anew for every field and step. Importance is g; the method keeps g > ½.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Options) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.theta = nn.Parameter(torch.ones(len(names)))

    def gates(self) -> Tensor:
        """Return g (N,)."""
        return (self.options.sharpness * self.theta).sigmoid()

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the mix (B, P, D); the embeddings as they are where nothing is trained."""
        if not self.training:
            return tokens
        order = self.uniform(*tokens.shape[:2]).argsort(0)[:, :, None]  # (B, P, 1)
        others = tokens.detach().gather(0, order.expand_as(tokens))
        gates = self.gates()[numbers][:, None].to(tokens.dtype)  # (P, 1)
        return torch.lerp(others, tokens, gates)

    def penalty(self, rows: int) -> Tensor:
        """Return λ times the mean gate."""
        return self.options.strength * self.gates().mean()

    def scores(self) -> Tensor:
        """Return g (N,)."""
        return self.gates().detach()

    def own(self) -> Tensor:
        """Return where g > ½ (N,)."""
        return self.theta.detach() > 0


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("shufflegate", wish)


def search(task: Task) -> Selection:
    """Train the weights on the search's rows, the gates on held-out ones; keep the K highest, or those above ½."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    options = replace(options, strength=strength_of(task.wish, options.strength))
    return learn(
        task,
        "shufflegate",
        lambda model: ShuffleGate(tuple(model.sites()), task.steps, task.seed, options),
        lr=options.lr,
        held=True,
        every=options.every,
    )
