"""UMEC: the smallest groups of the first layer shrink to zero under a budget, as a min-max problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lpfs.methods.base import HistoryCallback, MethodOptions, Positive, SearchCost, SearchTask, rank_fields
from lpfs.methods.group_sparsity import FirstLayer, FirstLayerMethod, learning_rate_of
from lpfs.schema import Selection
from lpfs.train.callbacks import State

COUNT_FRACTION = 0.3  # of the search in which s reaches N - K; y is zero until then
MAX_SHRINKAGE = 0.01  # y ascends until the smallest groups are multiplied by less than this


@dataclass(frozen=True)
class UMECOptions(MethodOptions):
    """How far s (of N), y and z move in a whole search if their gradient stays at 1."""

    s_rate: Positive = 5.3
    y_rate: Positive = 100.0
    z_rate: Positive = 5.3

    @property
    def reach(self) -> float:
        """Factor on the rates of s and z with which s = (N - K)(1 - cos ωt), ω² = s_rate·z_rate, is N - K in time."""
        return max(1.0, math.pi / 2 / COUNT_FRACTION / math.sqrt(self.s_rate * self.z_rate))


class UMEC(FirstLayerMethod):
    r"""The smallest groups of the first layer shrink to zero under a budget, as a min-max problem.

    .. math:: \min_{W,s}\ \max_{y,z \ge 0}\ L(W) + y\, S_{\lceil s \rceil}(W) + z\,(R(s) - B)

    Shen et al., UMEC: Unified Model and Embedding Compression for Efficient Recommendation Systems, 2021. S_s is the
    sum of the s smallest energies ‖W_n‖² of the first layer's groups, R(s) = 1 - s/N the relative cost of the other
    groups, and B = K/N the budget. After every step of the optimizer the ⌈s⌉ smallest groups shrink by 1/(1 + 2ηy); s
    moves by its gradient, which passes straight through the ceiling, and y and z ascend, never below zero. At the end
    the ⌈s⌉ smallest groups are removed; further training belongs to the stages after the search.

    The search reads the search rows once, from the pretrained model, as the public code makes one more pass. First
    s reaches N - K, within three tenths of the pass and with y = 0; then y ascends until the factors of the smallest
    groups multiply to less than 0.01.

    Differences from the paper: energies are those of the centered embeddings, ‖W_n‖²·ms(e_n - ē_n), since the scale
    moves freely between table and layer, and relative to their mean at the start; the rates of s, y and z are given
    for a whole search (so that they have the same effect in a short one); s never exceeds N - K, the number that the
    budget asks for.
    """

    Options = UMECOptions
    options: UMECOptions
    trial_options = ({"y_rate": 30.0}, {"y_rate": 300.0}, {"y_rate": 10.0}, {"s_rate": 30.0})

    def search(self, task: SearchTask) -> Selection:
        """Train the model under the budget, in place; return the K groups with the most energy."""
        layer, cost = self.centered_layer(task), SearchCost()
        constraint = BudgetConstraint(task, layer, self.options)
        task.fit(constraint, cost)
        energies = layer.energies() * layer.scales(task.model, task.stream).square()
        scores = dict(zip(layer.names, energies.tolist(), strict=True))
        facts = {"steps": task.steps, "own_count": constraint.count_alive(), **cost.to_dict()}
        facts["shrinkage"] = float(constraint.shrinkage)
        selection = rank_fields(task, self.name, scores, history=constraint.history, **facts)
        layer.multiply(torch.tensor(list(selection.gates.values()), device=energies.device))
        return selection


class BudgetConstraint(HistoryCallback):
    """Shrinks the smallest groups and moves s, y and z; all on the device, so that a graph can be captured."""

    saved = ("s", "y", "z", "unit", "scales", "shrinkage")

    def __init__(self, task: SearchTask, layer: FirstLayer, options: UMECOptions) -> None:
        super().__init__(task.steps)
        assert task.target.keep is not None
        self.layer, self.options = layer, options
        self.total, self.keep = len(layer.names), task.target.keep
        device = layer.weight.device
        must_keep = [name in task.target.must_keep for name in layer.names]
        self.must_keep = torch.tensor(must_keep, device=device)  # (N,) never among the smallest
        self.s, self.y, self.z = (torch.zeros((), device=device) for _ in range(3))
        self.shrinkage = torch.ones((), device=device)  # product of the factors of the smallest groups
        self.scales = layer.scales(task.model, task.stream).square()  # (N,) mean squares of the embeddings
        self.unit = (layer.energies() * self.scales).mean().clamp(min=1e-30)

    def count_alive(self) -> int:
        """Return the number of groups that are not shrunk."""
        return self.total - math.ceil(float(self.s))

    def within_step(self, state: State) -> None:
        energies = self.layer.energies() * self.scales / self.unit
        order = energies.masked_fill(self.must_keep, math.inf).argsort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(self.total, device=order.device))
        smallest = rank < self.s.ceil()  # (N,)
        factor = 1 / (1 + 2 * learning_rate_of(state, self.layer.weight) * self.y)
        self.layer.multiply(torch.where(smallest, factor, torch.ones_like(energies)))
        shrunk = torch.where(smallest, energies * factor**2, torch.zeros_like(energies)).mean()  # S, after the step
        following = torch.where(rank == self.s.ceil(), energies, torch.zeros_like(energies)).sum()
        excess = 1 - self.s / self.total - self.keep / self.total  # R(s) - B
        direction = self.z - self.y * following  # negative gradient with respect to s/N
        reach, fewest = self.options.reach, self.total - self.keep
        is_counted = self.s.ceil() >= fewest
        s = self.s + self.total * reach * self.options.s_rate / self.steps * direction
        self.s.copy_(torch.where(is_counted, torch.full_like(s, fewest), s.clamp(0, fewest)))
        self.shrinkage.mul_(factor)
        ascends = is_counted & (self.shrinkage >= MAX_SHRINKAGE)
        self.y.add_(self.options.y_rate / self.steps * shrunk * ascends).clamp_(min=0)
        self.z.add_(reach * self.options.z_rate / self.steps * excess).clamp_(min=0)

    def after_step(self, state: State) -> None:
        if self.should_record(state.step):
            self.record(state, alive=self.count_alive(), y=float(self.y), z=float(self.z))
