"""Variational dropout of fields, as EasyRec has it: how likely each field may be dropped.

Chang et al., Dropout Feature Ranking for Deep Learning Models, 2017; defined as the public code of EasyRec has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.masks import FieldMask
from lpfs.methods.ranking import need_number
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of θ, λ of the penalty, temperature of the draws, where the drop probability starts."""

    lr: float = 0.01
    strength: float = 0.01
    temperature: float = 0.1
    start: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr", "temperature"), least_zero=("strength",), share=("start",))


class VariationalDropout(FieldMask):
    r"""A drop probability a field, p = σ(θ); the factor is

    .. math:: 1 - \sigma\big((\mathrm{logit}\,p + \mathrm{logit}\,u) / 0.1\big), \qquad
              \text{penalty } \frac{\lambda}{B} \sum_n (1 - p_n)

    Importance is 1 - p.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Options) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.theta = nn.Parameter(torch.full((len(names),), options.start).logit())

    def forward(self) -> Tensor:
        """Return the factors (N,): a draw, or what is expected of it where nothing is trained."""
        if not self.training:
            return 1 - self.theta.sigmoid()
        noise = self.uniform(len(self.names)).logit()
        return 1 - ((self.theta + noise) / self.options.temperature).sigmoid()

    def penalty(self, rows: int) -> Tensor:
        """Return λ/B times how many fields are expected to stay."""
        return self.options.strength / rows * (1 - self.theta.sigmoid()).sum()

    def scores(self) -> Tensor:
        """Return 1 - p (N,)."""
        return 1 - self.theta.detach().sigmoid()


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("variational_dropout", wish)


def search(task: Task) -> Selection:
    """Train drop probabilities with the weights, and keep the K fields that are least likely dropped."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    return learn(
        task,
        "variational_dropout",
        lambda model: VariationalDropout(tuple(model.sites()), task.steps, task.seed, options),
        lr=options.lr,
    )
