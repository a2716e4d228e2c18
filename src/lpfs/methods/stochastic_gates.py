"""Stochastic gates: a factor per field, sampled from a trained distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.methods.base import Count, Fraction, MethodOptions, NonNegative, Positive, SearchTask
from lpfs.methods.masks import FieldMask
from lpfs.methods.training import MaskMethod
from lpfs.models.base import Model

MIN_TEMPERATURE = 0.01  # of AutoField
MIN_KEEP = 0.01  # of δ in the division of FSCD
MAX_LOGIT = math.log(100.0)  # of log a of hard concrete gates
START_NOISE = 0.01  # standard deviation of log a at the start
AVERAGE_DECAY = 0.999  # per step, of the mean of log a
PUBLIC_STEPS = 20_000  # steps of a search that the public settings of AutoField are made for


@dataclass(frozen=True)
class STGOptions(MethodOptions):
    """Learning rate of μ, λ of the penalty, and σ of the noise."""

    lr: Positive = 0.01
    strength: NonNegative = 0.005
    sigma: Positive = 0.5


class STG(FieldMask):
    r"""A random gate per field,

    .. math:: z = \mathrm{clamp}(\mu + \tfrac12 + \sigma\xi,\, 0,\, 1), \quad \xi \sim N(0, 1), \qquad
              \text{penalty } \lambda \sum_n \Phi\big((\mu_n + \tfrac12) / \sigma\big)

    with μ = 0 at the start. The score is μ; the method itself keeps μ > -½.
    """  # fmt: skip

    options: STGOptions

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: STGOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.mu = nn.Parameter(torch.zeros(len(names)))

    def forward(self) -> Tensor:
        if not self.training:
            return (self.mu + 0.5).clamp(0, 1)
        noise = torch.randn(len(self.names), generator=self.draw, device=self.draw.device)
        return (self.mu + 0.5 + self.options.sigma * noise).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        probabilities: Tensor = torch.special.ndtr((self.mu + 0.5) / self.options.sigma)
        return self.options.strength * probabilities.sum()

    def scores(self) -> Tensor:
        return self.mu.detach().clone()

    def selected(self) -> Tensor:
        return self.mu.detach() > -0.5


class STGMethod(MaskMethod):
    """Stochastic gates, a clipped Gaussian per field, trained with the weights.

    Yamada et al., Feature Selection using Stochastic Gates, 2020. Defined as in its public code, where λ is 0.1
    on the mean over the features; here it is on their sum.
    """

    Options = STGOptions
    mask_class = STG
    targets = ("keep", "penalty")


@dataclass(frozen=True)
class ConcreteOptions(MethodOptions):
    """Learning rate of the logits, λ of the penalty, temperature t of the samples, and the first probability."""

    lr: Positive = 0.01
    strength: NonNegative = 0.005
    temperature: Positive = 0.1
    start: Fraction = 0.5


class ConcreteMask(FieldMask):
    """Base of masks with a logit per field, sampled from a concrete distribution."""

    options: ConcreteOptions

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: ConcreteOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.logit = nn.Parameter(torch.full((len(names),), options.start).logit())

    def sample(self) -> Tensor:
        """Return σ((logit + logit u) / t) (N,), u uniform."""
        noise = self.uniform(len(self.names)).logit()
        return ((self.logit + noise) / self.options.temperature).sigmoid()


@dataclass(frozen=True)
class HardConcreteOptions(ConcreteOptions):
    """Learning rate of log a, λ, temperature t, the first probability, and the stretch from γ < 0 to ζ > 1."""

    temperature: Positive = 2 / 3
    start: Fraction = 0.8
    low: float = -0.1
    high: Positive = 1.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < 0 < 1 < self.high:
            raise InputError(f"low must be below 0 and high above 1, found {self.low!r} and {self.high!r}")


class HardConcrete(ConcreteMask):
    r"""A gate per field that is exactly 0 or 1 with some probability,

    .. math:: s = \sigma\big((\log a + \mathrm{logit}\,u)/t\big), \quad
              z = \mathrm{clamp}(s(\zeta - \gamma) + \gamma,\, 0,\, 1), \qquad
              \text{penalty } \lambda\sum_n \sigma\big(\log a_n - t\log(-\gamma/\zeta)\big)

    with log a drawn from N(logit 0.8, 0.01²) at the start and clamped to ±log 100 after every step. Evaluation, the
    score and the selection use the running mean of log a (decay 0.999). The score is log a; the method itself keeps
    gates that are open without noise, σ(log a)(ζ-γ) + γ > 0.
    """  # fmt: skip

    options: HardConcreteOptions
    average: Tensor
    mass: Tensor

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: HardConcreteOptions) -> None:
        super().__init__(names, steps, seed, options)
        with torch.no_grad():
            self.logit.add_(START_NOISE * torch.randn(len(names), generator=self.draw))
        self.register_buffer("average", torch.zeros(len(names)))
        self.register_buffer("mass", torch.zeros(()))

    @torch.no_grad()
    def update_means(self) -> None:
        self.logit.clamp_(-MAX_LOGIT, MAX_LOGIT)
        self.average.lerp_(self.logit, 1 - AVERAGE_DECAY)
        self.mass.lerp_(torch.ones_like(self.mass), 1 - AVERAGE_DECAY)

    def mean_logit(self) -> Tensor:
        """Return the running mean of log a; log a itself before the first step."""
        return torch.where(self.mass > 0, self.average / self.mass.clamp(min=1e-9), self.logit.detach())

    def stretched(self, probability: Tensor) -> Tensor:
        """Return s(ζ-γ) + γ."""
        return probability * (self.options.high - self.options.low) + self.options.low

    def forward(self) -> Tensor:
        return self.stretched(self.sample() if self.training else self.mean_logit().sigmoid()).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        shift = self.options.temperature * math.log(-self.options.low / self.options.high)
        return self.options.strength * (self.logit - shift).sigmoid().sum()

    def scores(self) -> Tensor:
        return self.mean_logit().clone()

    def selected(self) -> Tensor:
        return self.stretched(self.mean_logit().sigmoid()) > 0


class HardConcreteMethod(MaskMethod):
    """A stretched and clipped concrete gate per field under an expected ℓ0 penalty, trained with the weights.

    Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018, with its gates on fields
    instead of weights. Defined as in its public code: the first probability on inputs, the clamp and the averaged
    parameters are those of the code. Differences: λ is per gate, while the code counts outgoing weights, divides by
    the number of rows and adds a weight decay; log a has Adam with a rate of 0.01 (the code: 0.001 for everything)
    beside a pretrained, centered model.
    """

    Options = HardConcreteOptions
    mask_class = HardConcrete
    targets = ("keep", "penalty")


@dataclass(frozen=True)
class FSCDOptions(ConcreteOptions):
    """Learning rate of the keep variables, λ of the penalty, temperature, and the first keep probability."""

    strength: NonNegative = 1.0


class FSCD(ConcreteMask):
    r"""A keep variable per field,

    .. math:: z_n = \sigma\big((\mathrm{logit}\,\delta_n + \mathrm{logit}\,u) / t\big), \qquad
              e_n \leftarrow \frac{z_n}{\delta_n}\, e_n, \qquad
              \text{penalty } \frac{\lambda}{B} \sum_n c_n z_n

    with c of mean 1: the costs of the fields (see :func:`lpfs.methods.target.complexity_costs`), or all equal,
    as in the comparison of the LPFS paper. δ is clipped at 0.01 from below in the division, so that e_n has the same
    mean whatever δ is; without noise the factor is 1. The score is δ.
    """  # fmt: skip

    costs: Tensor

    def __init__(
        self, names: Sequence[str], steps: int, seed: int, options: FSCDOptions, costs: Sequence[float] | None = None
    ) -> None:
        super().__init__(names, steps, seed, options)
        weights = torch.ones(len(names)) if costs is None or not any(costs) else torch.tensor(list(costs))
        self.register_buffer("costs", (weights / weights.mean()).float(), persistent=False)
        self.sampled: Tensor | None = None

    def forward(self) -> Tensor:
        if not self.training:
            return torch.ones_like(self.logit)
        self.sampled = self.sample()
        return self.sampled / self.logit.sigmoid().clamp(min=MIN_KEEP)

    def penalty(self, rows: int) -> Tensor | None:
        return None if self.sampled is None else self.options.strength / rows * (self.costs * self.sampled).sum()

    def scores(self) -> Tensor:
        return self.logit.detach().sigmoid()


class FSCDMethod(MaskMethod):
    """Keep variables sampled from a concrete distribution, under a penalty weighted by the costs of the fields.

    Ma et al., Towards a Better Tradeoff between Effectiveness and Efficiency in Pre-Ranking: A Learnable Feature
    Selection based Approach, 2021. Defined as in a former version of the public code of EasyRec: samples divided by
    their mean, a penalty divided by the rows of the batch, evaluation without the mask. Differences: there all
    parameters share one optimizer and start untrained, here the keep variables have Adam beside a pretrained,
    centered model; there a cost is 1·complexity + 0.01·width + 1e-7·keys, here costs are scaled to mean 1.
    """

    Options = FSCDOptions
    mask_class = FSCD

    def make_mask(self, model: Model, task: SearchTask, options: FSCDOptions) -> FSCD:
        names, costs = tuple(model.sites()), task.target.costs
        return FSCD(names, task.steps, task.seed, options, None if costs is None else costs.weights(names, names))


@dataclass(frozen=True)
class VariationalDropoutOptions(ConcreteOptions):
    """Learning rate of θ, λ of the penalty, temperature of the samples, and the first drop probability."""

    strength: NonNegative = 0.01


class VariationalDropout(ConcreteMask):
    r"""A drop probability per field, p = σ(θ); the factor is

    .. math:: 1 - \sigma\big((\mathrm{logit}\,p + \mathrm{logit}\,u) / 0.1\big), \qquad
              \text{penalty } \frac{\lambda}{B} \sum_n (1 - p_n)

    The score is 1 - p.
    """  # fmt: skip

    def forward(self) -> Tensor:
        return 1 - (self.sample() if self.training else self.logit.sigmoid())

    def penalty(self, rows: int) -> Tensor:
        return self.options.strength / rows * (1 - self.logit.sigmoid()).sum()

    def scores(self) -> Tensor:
        return 1 - self.logit.detach().sigmoid()


class VariationalDropoutMethod(MaskMethod):
    """Variational dropout of fields: a drop probability per field, trained with the weights.

    Chang et al., Dropout Feature Ranking for Deep Learning Models, 2017; defined as in the public code of EasyRec.
    """

    Options = VariationalDropoutOptions
    mask_class = VariationalDropout


@dataclass(frozen=True)
class AutoFieldOptions(MethodOptions):
    """Learning rate of the logits, steps between updates, and decrease of τ per step, for 20,000 steps."""

    lr: Positive = 0.001
    every: Count = 10
    cooling: NonNegative = 5e-5


class AutoField(FieldMask):
    r"""Two logits per field, drop and keep; the factor is the keep probability of a sample

    .. math:: p = \mathrm{softmax}((\log\mathrm{softmax}(a) + G) / \tau)_{keep}, \qquad
              G = -\log(-\log u), \quad \tau = \max(0.01,\; 1 - 5\cdot 10^{-5}\, t)

    The score is softmax(a) of keeping.
    """  # fmt: skip

    options: AutoFieldOptions
    tau: Tensor  # where a captured step reads it

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: AutoFieldOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.register_buffer("tau", torch.ones(()), persistent=False)
        self.logits = nn.Parameter(torch.zeros(len(names), 2))

    @property
    def temperature(self) -> float:
        """τ at this step."""
        return max(MIN_TEMPERATURE, 1.0 - speedup(self.steps) * self.options.cooling * self.step)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        self.tau.fill_(self.temperature)

    def forward(self) -> Tensor:
        logs = self.logits.log_softmax(1)
        if not self.training:
            return logs.exp()[:, 1]
        noise = -(-self.uniform(len(self.names), 2).log()).log()
        return ((logs + noise) / self.tau).softmax(1)[:, 1]

    def scores(self) -> Tensor:
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

    def learning_rate(self, task: SearchTask) -> float:
        return speedup(task.steps) * self.options.lr


def speedup(steps: int) -> float:
    """Return how much faster the logits learn, and τ falls, than in a search of ``PUBLIC_STEPS``."""
    return max(1.0, PUBLIC_STEPS / steps)
