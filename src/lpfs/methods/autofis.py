"""AutoFIS: a multiplier on every cross, trained by generalized regularized dual averaging."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.gates.optimizer import soft_threshold
from lpfs.gates.optimizer_state import rescale_state
from lpfs.methods.base import Method, MethodOptions, Positive, SearchCost, SearchTask, rank_fields
from lpfs.methods.group_sparsity import FirstLayer, first_layer
from lpfs.methods.training import HoldoutCallback, holdout_grads
from lpfs.models.dlrm import DLRMCross
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import device_of


@dataclass(frozen=True)
class AutoFISOptions(MethodOptions):
    """η, c and μ of the optimizer of the multipliers; c None: the value that brings α to zero at the end."""

    lr: Positive = 0.1
    c: Positive | None = None
    mu: Positive = 0.8

    def threshold(self, step: Tensor, steps: int) -> Tensor:
        """Return c·η^½·(tη)^μ; if c is None, it is 1 at the end of a search of ``steps``."""
        full = self.lr**0.5 * (steps * self.lr) ** self.mu
        return (1.0 if self.c is None else self.c * full) * (step / steps) ** self.mu


class AutoFIS(Method):
    r"""A multiplier α on every cross, trained by an optimizer that produces zeros (generalized RDA).

    .. math:: v \leftarrow v + \eta\,\partial L/\partial\alpha, \qquad
              \alpha = \mathrm{sign}(\alpha_0 - v)\,\big(|\alpha_0 - v| - c\,\eta^{1/2} (t\eta)^\mu\big)_+

    Liu et al., AutoFIS: Automatic Feature Interaction Selection in Factorization Models for Click-Through Rate
    Prediction, 2020; Chao and Cheng, A Generalization of Regularized Dual Averaging, 2019. The definition is from
    memory, so treat comparisons with care: the paper normalizes every interaction (batch norm) and starts α at
    about 0.6; here α starts at 1, so that a trained model predicts the same at the start of the search, and the
    embeddings that the crosses are made of have a multiplier too, since they can be dropped as well. α multiplies
    a part where its gate would be.

    The search is for crosses: it needs the backbone dlrm_cross. The score of a part is |α₀ - v| less the threshold,
    which is |α| if that is not zero. At the end α is folded into the columns of the first layer that use the part.
    """

    Options = AutoFISOptions
    options: AutoFISOptions
    cuda_graph = True
    trial_options = ({"lr": 0.03}, {"lr": 0.3}, {"mu": 0.6}, {"mu": 1.0})

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, DLRMCross):
            raise InputError(
                f"{self.name} selects crosses of fields, and {type(model).__name__} has none that can be dropped "
                "separately; use the backbone dlrm_cross"
            )

    def search(self, task: SearchTask) -> Selection:
        model = task.model
        self.check_model(model)
        assert isinstance(model, DLRMCross)
        self.check(task.target, model.names, task.steps)
        multipliers = Multipliers(task, model, self.options, cost := SearchCost())
        model.crosses.gate = lambda: multipliers.alpha
        try:
            task.fit(multipliers, cost)
        finally:
            model.crosses.gate = None
        multipliers.fold_into(first_layer(model, self.name), task.optimizer)
        facts = {"steps": task.steps, "own_count": multipliers.count_alive(), **cost.to_dict()}
        return rank_fields(task, self.name, multipliers.scores(), history=multipliers.history, **facts)


class Multipliers(HoldoutCallback):
    """α (N,) of the parts of a model, and their optimizer."""

    saved = ("alpha", "total", "count")

    def __init__(self, task: SearchTask, model: DLRMCross, options: AutoFISOptions, cost: SearchCost) -> None:
        super().__init__(task.steps, task.holdout, cost)
        self.names, self.options = model.names, options
        self.alpha = torch.ones(len(model.names), device=device_of(model), requires_grad=True)
        self.total = torch.zeros_like(self.alpha, requires_grad=False)  # v
        self.count = self.total.new_zeros(())  # t
        self.alpha.grad = torch.zeros_like(self.total)

    def count_alive(self) -> int:
        """Return the number of non-zero α."""
        return int((self.alpha.detach() != 0).sum())

    def within_step(self, state: State) -> None:
        if self.batch is not None:
            (grad,) = holdout_grads(state, self.batch, [self.alpha])
            assert self.alpha.grad is not None
            self.alpha.grad.copy_(grad)  # in place: a captured step writes to this memory
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Take a step of the generalized RDA."""
        assert self.alpha.grad is not None
        self.count.add_(1)
        self.total.add_(self.alpha.grad, alpha=self.options.lr)
        self.alpha.grad.zero_()
        self.alpha.copy_(soft_threshold(1 - self.total, self.options.threshold(self.count, self.steps)))

    def after_step(self, state: State) -> None:
        if self.should_record(state.step):
            self.record(state, alive=self.count_alive())

    def scores(self) -> dict[str, float]:
        """Return |α| of the non-zero ones, and of the others how far they are below the threshold."""
        margins = (1 - self.total).abs() - self.options.threshold(self.count, self.steps)
        return dict(zip(self.names, margins.tolist(), strict=True))

    def fold_into(self, layer: FirstLayer, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the columns of each part, and their optimizer state, by its α."""
        layer.multiply(self.alpha.detach())
        for columns, alpha in zip(layer.columns(), self.alpha.tolist(), strict=True):
            rescale_state(optimizer, layer.weight, alpha, (1, int(columns[0]), int(columns[-1]) + 1))
