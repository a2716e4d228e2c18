"""Stochastic gates: a factor per field, sampled from a trained distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lpfs._validation import check_options, is_number
from lpfs.errors import InputError
from lpfs.methods.base import SearchTask, penalty_or_default
from lpfs.methods.masks import FieldMask
from lpfs.methods.training import MaskMethod
from lpfs.models.base import Model


@dataclass(frozen=True)
class STGOptions:
    """Learning rate of μ, λ of the penalty, and σ of the noise."""

    lr: float = 0.01
    strength: float = 0.005
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, positive=("lr", "sigma"), non_negative=("strength",))


class STG(FieldMask):
    r"""A random gate per field,

    .. math:: z = \mathrm{clamp}(\mu + \tfrac12 + \sigma\xi,\, 0,\, 1), \quad \xi \sim N(0, 1), \qquad
              \text{penalty } \lambda \sum_n \Phi\big((\mu_n + \tfrac12) / \sigma\big)

    with μ = 0 at the start. The score is μ; the method itself keeps μ > -½.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: STGOptions) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.mu = nn.Parameter(torch.zeros(len(names)))

    def forward(self) -> Tensor:
        """Return the gates (N,); without noise in evaluation mode."""
        noise = self.options.sigma * self.normal(len(self.names)) if self.training else 0.0
        return (self.mu + 0.5 + noise).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        """Return λ times the expected number of open gates."""
        probabilities: Tensor = torch.special.ndtr((self.mu + 0.5) / self.options.sigma)
        return self.options.strength * probabilities.sum()

    def scores(self) -> Tensor:
        """Return μ (N,)."""
        return self.mu.detach().clone()

    def selected(self) -> Tensor:
        """Return which gates are above zero without noise (N,)."""
        return self.mu.detach() > -0.5


class STGMethod(MaskMethod):
    """Stochastic gates, a clipped Gaussian per field, trained with the weights.

    Yamada et al., Feature Selection using Stochastic Gates, 2020. Defined as in its public code, where λ is 0.1
    on the mean over the features; here it is on their sum.
    """

    Options = STGOptions
    options: STGOptions
    mask_class = STG
    targets = ("keep", "penalty")

    def make_mask(self, model: Model, task: SearchTask) -> STG:
        """Return the gates of a model."""
        options = replace(self.options, strength=penalty_or_default(task.target, self.options.strength))
        return STG(tuple(model.sites()), task.steps, task.seed, options)


@dataclass(frozen=True)
class HardConcreteOptions:
    """Learning rate of log a, λ, temperature t, stretch from γ < 0 to ζ > 1, and the first probability."""

    lr: float = 0.01
    strength: float = 0.005
    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1
    start: float = 0.5

    def __post_init__(self) -> None:
        positive = ("lr", "temperature", "high")
        check_options(self, positive=positive, non_negative=("strength",), fraction=("start",))
        if not is_number(self.low) or not self.low < 0 < 1 < self.high:
            raise InputError(f"low must be below 0 and high above 1, found {self.low!r} and {self.high!r}")


class HardConcrete(FieldMask):
    r"""A gate per field that is exactly 0 or 1 with some probability,

    .. math:: s = \sigma\big((\log a + \mathrm{logit}\,u)/t\big), \quad
              z = \mathrm{clamp}(s(\zeta - \gamma) + \gamma,\, 0,\, 1), \qquad
              \text{penalty } \lambda\sum_n \sigma\big(\log a_n - t\log(-\gamma/\zeta)\big)

    The score is log a; the method itself keeps gates that are open without noise, σ(log a)(ζ-γ) + γ > 0.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: HardConcreteOptions) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.log_a = nn.Parameter(torch.full((len(names),), options.start).logit())

    def stretched(self, probability: Tensor) -> Tensor:
        """Return s(ζ-γ) + γ."""
        return probability * (self.options.high - self.options.low) + self.options.low

    def forward(self) -> Tensor:
        """Return the gates (N,); without noise in evaluation mode."""
        if not self.training:
            return self.stretched(self.log_a.sigmoid()).clamp(0, 1)
        noise = self.uniform(len(self.names)).logit()
        return self.stretched(((self.log_a + noise) / self.options.temperature).sigmoid()).clamp(0, 1)

    def penalty(self, rows: int) -> Tensor:
        """Return λ times the expected number of non-zero gates."""
        shift = self.options.temperature * math.log(-self.options.low / self.options.high)
        return self.options.strength * (self.log_a - shift).sigmoid().sum()

    def scores(self) -> Tensor:
        """Return log a (N,)."""
        return self.log_a.detach().clone()

    def selected(self) -> Tensor:
        """Return which gates are open without noise (N,)."""
        return self.stretched(self.log_a.detach().sigmoid()) > 0


class HardConcreteMethod(MaskMethod):
    """A stretched and clipped concrete gate per field under an expected ℓ0 penalty, trained with the weights.

    Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018, with its gates on fields
    instead of weights. The definition is from memory and was not compared with the paper.
    """

    Options = HardConcreteOptions
    options: HardConcreteOptions
    mask_class = HardConcrete
    targets = ("keep", "penalty")

    def make_mask(self, model: Model, task: SearchTask) -> HardConcrete:
        """Return the gates of a model."""
        options = replace(self.options, strength=penalty_or_default(task.target, self.options.strength))
        return HardConcrete(tuple(model.sites()), task.steps, task.seed, options)


@dataclass(frozen=True)
class FSCDOptions:
    """Learning rate of the keep variables, λ of the penalty, temperature, and the first keep probability."""

    lr: float = 0.01
    strength: float = 0.005
    temperature: float = 0.1
    start: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, positive=("lr", "temperature"), non_negative=("strength",), fraction=("start",))


class FSCD(FieldMask):
    r"""A keep variable per field,

    .. math:: z_n = \sigma\big((\mathrm{logit}\,\delta_n + \mathrm{logit}\,u) / t\big), \qquad
              \text{penalty } \lambda \sum_n c_n z_n

    with c of mean 1: the costs of the fields (see :func:`lpfs.methods.target.complexity_costs`), or all equal,
    as in the comparison of the LPFS paper. The score is δ.
    """  # fmt: skip

    costs: Tensor

    def __init__(
        self, names: Sequence[str], steps: int, seed: int, options: FSCDOptions, costs: Sequence[float] | None = None
    ) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.logit = nn.Parameter(torch.full((len(names),), options.start).logit())
        weights = torch.ones(len(names)) if costs is None or not any(costs) else torch.tensor(list(costs))
        self.register_buffer("costs", (weights / weights.mean()).float(), persistent=False)
        self.sampled: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the factors (N,): a sample, or without noise in evaluation mode."""
        if not self.training:
            return (self.logit / self.options.temperature).sigmoid()
        noise = self.uniform(len(self.names)).logit()
        self.sampled = ((self.logit + noise) / self.options.temperature).sigmoid()
        return self.sampled

    def penalty(self, rows: int) -> Tensor | None:
        """Return λ Σ c z of the sample of this step."""
        return None if self.sampled is None else self.options.strength * (self.costs * self.sampled).sum()

    def scores(self) -> Tensor:
        """Return δ (N,)."""
        return self.logit.detach().sigmoid()


class FSCDMethod(MaskMethod):
    """Keep variables sampled from a concrete distribution, under a penalty weighted by the costs of the fields.

    Ma et al., Towards a Better Tradeoff between Effectiveness and Efficiency in Pre-Ranking: A Learnable Feature
    Selection based Approach, 2021. The definition is from memory and was not compared with the paper.
    """

    Options = FSCDOptions
    options: FSCDOptions
    mask_class = FSCD

    def make_mask(self, model: Model, task: SearchTask) -> FSCD:
        """Return the keep variables of a model."""
        names, costs = tuple(model.sites()), task.target.costs
        weights = None if costs is None else costs.weights(names, names)
        return FSCD(names, task.steps, task.seed, self.options, weights)


@dataclass(frozen=True)
class VariationalDropoutOptions:
    """Learning rate of θ, λ of the penalty, temperature of the samples, and the first drop probability."""

    lr: float = 0.01
    strength: float = 0.01
    temperature: float = 0.1
    start: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, positive=("lr", "temperature"), non_negative=("strength",), fraction=("start",))


class VariationalDropout(FieldMask):
    r"""A drop probability per field, p = σ(θ); the factor is

    .. math:: 1 - \sigma\big((\mathrm{logit}\,p + \mathrm{logit}\,u) / 0.1\big), \qquad
              \text{penalty } \frac{\lambda}{B} \sum_n (1 - p_n)

    The score is 1 - p.
    """  # fmt: skip

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: VariationalDropoutOptions) -> None:
        super().__init__(names, steps, seed)
        self.options = options
        self.theta = nn.Parameter(torch.full((len(names),), options.start).logit())

    def forward(self) -> Tensor:
        """Return the factors (N,): a sample, or its expected value in evaluation mode."""
        if not self.training:
            return 1 - self.theta.sigmoid()
        noise = self.uniform(len(self.names)).logit()
        return 1 - ((self.theta + noise) / self.options.temperature).sigmoid()

    def penalty(self, rows: int) -> Tensor:
        """Return λ/B times the expected number of kept fields."""
        return self.options.strength / rows * (1 - self.theta.sigmoid()).sum()

    def scores(self) -> Tensor:
        """Return 1 - p (N,)."""
        return 1 - self.theta.detach().sigmoid()


class VariationalDropoutMethod(MaskMethod):
    """Variational dropout of fields: a drop probability per field, trained with the weights.

    Chang et al., Dropout Feature Ranking for Deep Learning Models, 2017; defined as in the public code of EasyRec.
    """

    Options = VariationalDropoutOptions
    options: VariationalDropoutOptions
    mask_class = VariationalDropout

    def make_mask(self, model: Model, task: SearchTask) -> VariationalDropout:
        """Return the drop probabilities of a model."""
        return VariationalDropout(tuple(model.sites()), task.steps, task.seed, self.options)
