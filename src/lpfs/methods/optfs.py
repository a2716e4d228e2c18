"""OptFS: a gate for every value of every field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.methods.base import MethodOptions, NonNegative, Positive, SearchTask
from lpfs.methods.masks import Needs, TokenMask
from lpfs.methods.training import MaskMethod
from lpfs.models.base import Model

DEFAULT_STRENGTH = 0.03  # λ times the square root of the number of values


@dataclass(frozen=True)
class OptFSOptions(MethodOptions):
    """Learning rate of m, λ (None: 0.03/√values), γ that the sharpness τ grows to, and the first m."""

    lr: Positive = 0.01
    strength: NonNegative | None = None
    sharpness: Positive = 2000.0
    start: Positive = 0.5


class OptFS(TokenMask):
    r"""A gate for each value v of each field,

    .. math:: g_v = \sigma(\tau m_v) / \sigma(m_0), \qquad \tau = \gamma^{t/T}, \qquad
              \text{penalty } \lambda \sum_v \sigma(\tau m_v)

    The method keeps the values with m > 0. The score of a field is the share of rows whose value is kept, plus
    half as much for the margin, Σ p_v (⟦m_v > 0⟧ + ½σ(m_v)) / 1.5, with p the frequency of a value in the rows of
    the search. The method itself keeps a field if any value of these rows is kept.
    """  # fmt: skip

    needs: Needs = "fields"
    starts: Tensor
    counts: Tensor
    factor: Tensor  # τ, where a captured step reads it

    def __init__(self, names: Sequence[str], sizes: list[int], steps: int, seed: int, options: OptFSOptions) -> None:
        super().__init__(names, steps, seed, options)
        self.sizes = tuple(sizes)
        self.strength = DEFAULT_STRENGTH / sum(sizes) ** 0.5 if options.strength is None else options.strength
        self.m = nn.Parameter(torch.full((sum(sizes),), options.start))
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("starts", starts, persistent=False)  # (N,) the first value of each field
        self.register_buffer("counts", torch.zeros(sum(sizes), dtype=torch.int64))
        self.first = torch.tensor(options.start).sigmoid().item()  # σ(m₀)
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.step_values: list[Tensor] = []  # values of the rows of this step

    @property
    def tau(self) -> float:
        """τ at this step."""
        return float(self.options.sharpness ** (self.step / self.steps))

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the gated embeddings (B, P, D)."""
        assert ids is not None
        values = self.starts[numbers].expand(tokens.shape[0], -1)  # (B, P)
        values = torch.cat([values[:, : ids.shape[1]] + ids, values[:, ids.shape[1] :]], 1)
        if self.training:
            self.step_values.append(values)
        gates = (self.factor * self.m[values]).sigmoid() / self.first
        return tokens * gates[:, :, None].to(tokens.dtype)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        self.factor.fill_(self.tau)

    def update_means(self) -> None:
        for values in self.step_values:
            self.counts.index_add_(0, values.flatten(), torch.ones_like(values.flatten()))
        self.step_values = []

    def penalty(self, rows: int) -> Tensor:
        return self.strength * (self.factor * self.m).sigmoid().sum()

    def sum_by_field(self, of_values: Tensor) -> Tensor:
        """Return sums over the values of each field (N,)."""
        return torch.stack([values.sum() for values in of_values.split(self.sizes)])

    def scores(self) -> Tensor:
        m, counts = self.m.detach(), self.counts.double()
        kept = self.sum_by_field(counts * ((m > 0) + 0.5 * m.sigmoid()))
        return kept / 1.5 / self.sum_by_field(counts).clamp(min=1)

    def selected(self) -> Tensor:
        return self.sum_by_field(((self.m.detach() > 0) & (self.counts > 0)).double()) > 0


class OptFSMethod(MaskMethod):
    """A gate for every value of every field, trained with the weights.

    Lyu et al., Optimizing Feature Set for Click-Through Rate Prediction, 2023. Defined as in public code; a bag
    and a number have no single value, so each of them has one gate. λ there is 2e-9, on millions of values; the
    default here, 0.03 over the square root of their number, was found on small logs. Rewinding and retraining
    belong to the stages after the search.
    """

    Options = OptFSOptions
    mask_class = OptFS
    targets = ("keep", "penalty")
    trial_options = ({"lr": 0.03}, {"lr": 0.003}, {"sharpness": 200.0}, {"start": 1.0})

    def make_mask(self, model: Model, task: SearchTask, options: OptFSOptions) -> OptFS:
        names = tuple(model.sites())
        return OptFS(names, [value_count(model, name) for name in names], task.steps, task.seed, options)


def value_count(model: Model, name: str) -> int:
    """Return how many values of a part have gates: its ids, or 1 for a bag or numbers."""
    fields = [model.schema[field] for field in model.fields_of_parts()[name]]
    return fields[0].cardinality if len(fields) == 1 and fields[0].kind == "categorical" else 1
