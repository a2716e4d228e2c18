"""FSCD: fields dropped by a concrete draw, under a penalty that knows what each field costs.

Ma et al., Towards a Better Tradeoff between Effectiveness and Efficiency in Pre-Ranking: A Learnable Feature
Selection based Approach, 2021. The definition is recalled from memory, not read in its paper.
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
    """Settings: rate of the keep variables, λ of the penalty, temperature, where the keep probability starts."""

    lr: float = 0.01
    strength: float = 0.005
    temperature: float = 0.1
    start: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr", "temperature"), least_zero=("strength",), share=("start",))


class FSCD(FieldMask):
    r"""A keep variable a field,

    .. math:: z_n = \sigma\big((\mathrm{logit}\,\delta_n + \mathrm{logit}\,u) / t\big), \qquad
              \text{penalty } \lambda \sum_n c_n z_n

    with c of mean 1: what the fields cost (see :func:`lpfs.methods.costs.complexity`), or all equal, as in the
    comparison of the LPFS paper. Importance is δ.
    """  # fmt: skip

    costs: Tensor

    def __init__(
        self, names: Sequence[str], steps: int, seed: int, options: Options, costs: Sequence[float] | None = None
    ) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.logit = nn.Parameter(torch.full((len(names),), options.start).logit())
        weights = torch.ones(len(names)) if costs is None or not any(costs) else torch.tensor(list(costs))
        self.register_buffer("costs", (weights / weights.mean()).float(), persistent=False)
        self.drawn: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the factors (N,): a draw, or what is likeliest where nothing is trained."""
        if not self.training:
            return (self.logit / self.options.temperature).sigmoid()
        noise = self.uniform(len(self.names)).logit()
        self.drawn = ((self.logit + noise) / self.options.temperature).sigmoid()
        return self.drawn

    def penalty(self, rows: int) -> Tensor | None:
        """Return λ Σ c z of the draw of this step."""
        return None if self.drawn is None else self.options.strength * (self.costs * self.drawn).sum()

    def scores(self) -> Tensor:
        """Return δ (N,)."""
        return self.logit.detach().sigmoid()


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("fscd", wish)


def search(task: Task) -> Selection:
    """Train keep variables with the weights, and keep the K fields with the highest δ."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    costs = task.wish.costs

    def make(names: Sequence[str]) -> FSCD:
        each = None if costs is None else costs.weights(names, names)
        return FSCD(names, task.steps, task.seed, options, each)

    return learn(task, "fscd", lambda model: make(tuple(model.sites())), lr=options.lr)
