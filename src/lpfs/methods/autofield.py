"""AutoField: a keep probability per field, sampled by Gumbel-softmax, trained on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs._validation import check_options
from lpfs.methods.base import SearchTask
from lpfs.methods.masks import FieldMask
from lpfs.methods.training import MaskMethod
from lpfs.models.base import Model

MIN_TEMPERATURE = 0.01
PUBLIC_STEPS = 20_000  # steps of a search that the public settings are made for


@dataclass(frozen=True)
class AutoFieldOptions:
    """Learning rate of the logits, steps between updates, and decrease of τ per step, for 20,000 steps."""

    lr: float = 0.001
    every: int = 10
    cooling: float = 5e-5

    def __post_init__(self) -> None:
        check_options(self, positive=("lr",), non_negative=("cooling",), count=("every",))


class AutoField(FieldMask):
    r"""Two logits per field, drop and keep; the factor is the keep probability of a sample

    .. math:: p = \mathrm{softmax}((\log\mathrm{softmax}(a) + G) / \tau)_{keep}, \qquad
              G = -\log(-\log u), \quad \tau = \max(0.01,\; 1 - 5\cdot 10^{-5}\, t)

    The score is softmax(a) of keeping.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, cooling: float = 5e-5) -> None:
        super().__init__(names, steps, seed)
        self.cooling = cooling
        self.logits = nn.Parameter(torch.zeros(len(names), 2))

    @property
    def temperature(self) -> float:
        """τ at this step."""
        return max(MIN_TEMPERATURE, 1.0 - self.cooling * self.step)

    def forward(self) -> Tensor:
        """Return the factors (N,): of a sample, or without noise in evaluation mode."""
        logs = self.logits.log_softmax(1)
        if not self.training:
            return logs.exp()[:, 1]
        noise = -(-self.uniform(len(self.names), 2).log()).log()
        return ((logs + noise) / self.temperature).softmax(1)[:, 1]

    def scores(self) -> Tensor:
        """Return the probability of keeping (N,)."""
        return self.logits.detach().softmax(1)[:, 1]


class AutoFieldMethod(MaskMethod):
    """Keep probabilities, sampled by Gumbel-softmax; their logits are trained on held-out rows.

    Wang et al., AutoField: Automating Feature Selection in Deep Recommender Systems, 2022. Defined as in public
    code, for searches of 20,000 steps; in a shorter search the learning rate of the logits is higher and τ falls
    faster, in proportion.
    """

    Options = AutoFieldOptions
    options: AutoFieldOptions
    mask_class = AutoField
    holdout_only = True
    trial_options = ({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"every": 1})

    def __init__(self, name: str, options: AutoFieldOptions | None = None) -> None:
        super().__init__(name, options)
        self.update_every = self.options.every

    def make_mask(self, model: Model, task: SearchTask) -> AutoField:
        """Return the logits of a model."""
        cooling = _speedup(task) * self.options.cooling
        return AutoField(tuple(model.sites()), task.steps, task.seed, cooling)

    def learning_rate(self, task: SearchTask) -> float:
        """Return the learning rate of the logits."""
        return _speedup(task) * self.options.lr


def _speedup(task: SearchTask) -> float:
    return max(1.0, PUBLIC_STEPS / task.steps)
