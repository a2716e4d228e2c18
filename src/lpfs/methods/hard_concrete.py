"""Hard concrete: a stretched and clipped concrete gate a field, under an expected ℓ0 penalty.

Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018, with its gates on fields instead
of weights. The definition is recalled from memory, not read in its paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.masks import FieldMask
from lpfs.methods.ranking import need_number_or_penalty, strength_of
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of log a, λ, temperature t, the stretch from γ < 0 to ζ > 1, where the probability starts."""

    lr: float = 0.01
    strength: float = 0.005
    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1
    start: float = 0.5

    def __post_init__(self) -> None:
        positive = ("lr", "temperature", "high")
        check_numbers(self, positive=positive, least_zero=("strength",), share=("start",))
        if isinstance(self.low, bool) or not isinstance(self.low, int | float) or not self.low < 0 < 1 < self.high:
            raise InputError(f"the stretch must go from below 0 to above 1, found {self.low!r} to {self.high!r}")


class HardConcrete(FieldMask):
    r"""A gate a field that is exactly 0 or 1 with some probability,

    .. math:: s = \sigma\big((\log a + \mathrm{logit}\,u)/t\big), \quad
              z = \mathrm{clamp}(s(\zeta - \gamma) + \gamma,\, 0,\, 1), \qquad
              \text{penalty } \lambda\sum_n \sigma\big(\log a_n - t\log(-\gamma/\zeta)\big)

    Importance is log a; the method itself keeps what is open without noise, σ(log a)(ζ-γ) + γ > 0.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Options) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.log_a = nn.Parameter(torch.full((len(names),), options.start).logit())

    def stretched(self, chance: Tensor) -> Tensor:
        """Return s(ζ-γ) + γ."""
        return chance * (self.options.high - self.options.low) + self.options.low

    def forward(self) -> Tensor:
        """Return the gates (N,); without noise where nothing is trained."""
        if not self.training:
            return self.stretched(self.log_a.sigmoid()).clamp(0, 1)
        noise = self.uniform(len(self.names)).logit()
        return self.stretched(((self.log_a + noise) / self.options.temperature).sigmoid()).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        """Return λ times how many gates are expected not to be zero."""
        shift = self.options.temperature * math.log(-self.options.low / self.options.high)
        return self.options.strength * (self.log_a - shift).sigmoid().sum()

    def scores(self) -> Tensor:
        """Return log a (N,)."""
        return self.log_a.detach().clone()

    def own(self) -> Tensor:
        """Return which gates are open without noise (N,)."""
        return self.stretched(self.log_a.detach().sigmoid()) > 0


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("hard_concrete", wish)


def search(task: Task) -> Selection:
    """Train the gates with the weights; keep the K highest, or with ``penalty`` those that are open."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    options = replace(options, strength=strength_of(task.wish, options.strength))
    return learn(
        task,
        "hard_concrete",
        lambda model: HardConcrete(tuple(model.sites()), task.steps, task.seed, options),
        lr=options.lr,
    )
