"""STG: stochastic gates, a clipped Gaussian a field.

Yamada et al., Feature Selection using Stochastic Gates, 2020. Defined as its public code has it, where λ is 0.1
on the mean over the features; here it is on their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.masks import FieldMask
from lpfs.methods.ranking import need_number_or_penalty, strength_of
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of μ, λ of the penalty, and σ of the noise."""

    lr: float = 0.01
    strength: float = 0.005
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr", "sigma"), least_zero=("strength",))


class STG(FieldMask):
    r"""A gate a field, open by chance,

    .. math:: z = \mathrm{clamp}(\mu + \tfrac12 + \sigma\xi,\, 0,\, 1), \quad \xi \sim N(0, 1), \qquad
              \text{penalty } \lambda \sum_n \Phi\big((\mu_n + \tfrac12) / \sigma\big)

    with μ = 0 at the start. Importance is μ; the method itself keeps μ > -½.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Options) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.mu = nn.Parameter(torch.zeros(len(names)))

    def forward(self) -> Tensor:
        """Return the gates (N,); without noise where nothing is trained."""
        noise = self.options.sigma * self.normal(len(self.names)) if self.training else 0.0
        return (self.mu + 0.5 + noise).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        """Return λ times how many gates are expected to be open."""
        chances: Tensor = torch.special.ndtr((self.mu + 0.5) / self.options.sigma)
        return self.options.strength * chances.sum()

    def scores(self) -> Tensor:
        """Return μ (N,)."""
        return self.mu.detach().clone()

    def own(self) -> Tensor:
        """Return where the gate without noise is above zero (N,)."""
        return self.mu.detach() > -0.5


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("stg", wish)


def search(task: Task) -> Selection:
    """Train stochastic gates with the weights; keep the K highest, or with ``penalty`` those that are open."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    options = replace(options, strength=strength_of(task.wish, options.strength))
    return learn(
        task, "stg", lambda model: STG(tuple(model.sites()), task.steps, task.seed, options), lr=options.lr
    )
