"""OptFS: a gate for every value of every field.

Lyu et al., Optimizing Feature Set for Click-Through Rate Prediction, 2023. Defined as public code has it; a bag
and a number have no single value, so that each of them has one gate. λ there is 2e-9, on millions of values; the
default here, 0.03 over the root of their number, was found on small logs. Rewinding and retraining are left to
what comes after the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.masks import Needs, TokenMask
from lpfs.methods.ranking import need_number_or_penalty
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.schema import Selection, known_keys

LIGHT = 0.03  # λ times the root of the number of values


@dataclass(frozen=True)
class Options:
    """Settings: rate of m, λ (None: as said above), γ that the sharpness τ grows to, where m starts."""

    lr: float = 0.01
    strength: float | None = None
    sharpness: float = 2000.0
    start: float = 0.5

    def __post_init__(self) -> None:
        given = () if self.strength is None else ("strength",)
        check_numbers(self, positive=("lr", "sharpness", "start"), least_zero=given)


class OptFS(TokenMask):
    r"""A gate for each value v of each field,

    .. math:: g_v = \sigma(\tau m_v) / \sigma(m_0), \qquad \tau = \gamma^{t/T}, \qquad
              \text{penalty } \lambda \sum_v \sigma(\tau m_v)

    The method keeps the values with m > 0. Importance of a field: the share of rows whose value is kept, and half
    as much again how clearly, Σ p_v (⟦m_v > 0⟧ + ½σ(m_v)) / 1.5 with p the frequency of a value in the rows seen.
    A field counts as kept where any value that was seen is.
    """  # fmt: skip

    needs: Needs = "fields"
    starts: Tensor
    counts: Tensor

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], steps: int, seed: int, options: Options
    ) -> None:
        super().__init__(names, steps, seed)
        self.options, self.sizes = options, tuple(sizes)
        self.strength = LIGHT / sum(sizes) ** 0.5 if options.strength is None else options.strength
        self.m = nn.Parameter(torch.full((sum(sizes),), options.start))
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("starts", starts, persistent=False)  # (N,) the first value of each field
        self.register_buffer("counts", torch.zeros(sum(sizes), dtype=torch.int64))
        self.seen: list[Tensor] = []  # the values of the rows of this step

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
            self.seen.append(values)
        first = torch.tensor(self.options.start).sigmoid().item()
        gates = (self.tau * self.m[values]).sigmoid() / first
        return tokens * gates[:, :, None].to(tokens.dtype)

    def at(self, step: int) -> None:
        """Count the values of the step that is done."""
        super().at(step)
        for values in self.seen:
            self.counts.index_add_(0, values.flatten(), torch.ones_like(values.flatten()))
        self.seen = []

    def penalty(self, rows: int) -> Tensor:
        """Return λ Σ σ(τm)."""
        return self.strength * (self.tau * self.m).sigmoid().sum()

    def per_field(self, of_values: Tensor) -> Tensor:
        """Return sums over the values of each field (N,)."""
        return torch.stack([each.sum() for each in of_values.split(self.sizes)])

    def scores(self) -> Tensor:
        """Return the importance of every field (N,)."""
        m, counts = self.m.detach(), self.counts.double()
        kept = self.per_field(counts * ((m > 0) + 0.5 * m.sigmoid()))
        return kept / 1.5 / self.per_field(counts).clamp(min=1)

    def own(self) -> Tensor:
        """Return which fields have a value left (N,)."""
        return self.per_field(((self.m.detach() > 0) & (self.counts > 0)).double()) > 0


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("optfs", wish)


def values_of(model: Model, name: str) -> int:
    """Return how many values with a gate of their own a part has: its ids, or 1 for a bag or numbers."""
    fields = [model.schema[each] for each in model.fields_of_parts()[name]]
    return fields[0].cardinality if len(fields) == 1 and fields[0].kind == "categorical" else 1


def search(task: Task) -> Selection:
    """Train a gate a value with the weights; keep the K fields of which most is kept, or those with any left."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    if task.wish.penalty is not None:
        options = replace(options, strength=task.wish.penalty)

    def make(model: Model) -> OptFS:
        names = tuple(model.sites())
        sizes = [values_of(model, name) for name in names]
        return OptFS(names, sizes, task.steps, task.seed, options)

    return learn(task, "optfs", make, lr=options.lr)
