"""AutoField: the probability of keeping a field, drawn by Gumbel-softmax, learnt on held-out rows.

Wang et al., AutoField: Automating Feature Selection in Deep Recommender Systems, 2022. Defined as public code
has it, for searches of 20,000 steps; in a shorter one the logits move faster, and τ falls faster, in proportion.
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

COLDEST = 0.01
STEPS = 20_000  # of a search that the public settings suit


@dataclass(frozen=True)
class Options:
    """Settings for 20,000 steps: rate of the logits, steps between two moves, fall of the temperature a step."""

    lr: float = 0.001
    every: int = 10
    cooling: float = 5e-5

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr",), least_zero=("cooling",), whole=("every",))


class AutoField(FieldMask):
    r"""Two logits a field, drop and keep; the factor is the keep probability of a draw

    .. math:: p = \mathrm{softmax}((\log\mathrm{softmax}(a) + G) / \tau)_{keep}, \qquad
              G = -\log(-\log u), \quad \tau = \max(0.01,\; 1 - 5\cdot 10^{-5}\, t)

    Importance is softmax(a) of keeping.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, cooling: float = 5e-5) -> None:
        super().__init__(names, steps, seed)
        self.cooling = cooling
        self.logits = nn.Parameter(torch.zeros(len(names), 2))

    @property
    def temperature(self) -> float:
        """τ at this step."""
        return max(COLDEST, 1.0 - self.cooling * self.step)

    def forward(self) -> Tensor:
        """Return the factors (N,): of a draw, or without one where nothing is trained."""
        logs = self.logits.log_softmax(1)
        if not self.training:
            return logs.exp()[:, 1]
        noise = -(-self.uniform(len(self.names), 2).log()).log()
        return ((logs + noise) / self.temperature).softmax(1)[:, 1]

    def scores(self) -> Tensor:
        """Return the probability of keeping (N,)."""
        return self.logits.detach().softmax(1)[:, 1]


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("autofield", wish)


def search(task: Task) -> Selection:
    """Train the weights on the rows of the search and the logits on held-out rows; keep the K likeliest."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    faster = max(1.0, STEPS / task.steps)
    return learn(
        task,
        "autofield",
        lambda model: AutoField(tuple(model.sites()), task.steps, task.seed, faster * options.cooling),
        lr=faster * options.lr,
        held=True,
        every=options.every,
    )
