"""AutoFIS: a multiplier on every cross, trained by generalized regularized dual averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._validation import check_options
from lpfs.errors import InputError
from lpfs.gates.optimizer import soft_threshold
from lpfs.gates.optimizer_state import rescale_state
from lpfs.methods.base import HistoryCallback, Method, SearchCost, SearchTask, rank_fields
from lpfs.methods.group_sparsity import FirstLayer, first_layer
from lpfs.methods.training import HoldoutBatches, holdout_grad
from lpfs.models.dlrm_cross import DLRMCross
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import on_device


@dataclass(frozen=True)
class AutoFISOptions:
    """η, c and μ of the optimizer of the multipliers; c None: the value that brings α to zero at the end."""

    lr: float = 0.1
    c: float | None = None
    mu: float = 0.8

    def __post_init__(self) -> None:
        check_options(self, positive=("lr", "mu") if self.c is None else ("lr", "mu", "c"))

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

    The search is for crosses: it needs the backbone dlrm_cross. The score of a part is |α₀ - v| less the
    threshold, which is |α| if that is not zero. At the end α is folded into the columns of the first layer that
    use the part.
    """

    Options = AutoFISOptions
    options: AutoFISOptions
    trial_options = ({"lr": 0.03}, {"lr": 0.3}, {"mu": 0.6}, {"mu": 1.0})

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError if the model has no crosses that can be dropped."""
        if not isinstance(model, DLRMCross):
            raise InputError(
                f"{self.name} selects crosses of fields, and {type(model).__name__} has none that can be dropped "
                "separately; use the backbone dlrm_cross"
            )

    def search(self, task: SearchTask) -> Selection:
        """Train the model and its multipliers together, in place; return the parts with the largest."""
        model = task.model
        self.check_model(model)
        assert isinstance(model, DLRMCross)
        self.check(task.target, model.names, task.steps)
        cost = SearchCost()
        multipliers = Multipliers(task, model, self.options, cost)
        model.crosses.gate = multipliers.gate
        try:
            task.fit(multipliers, cost)
        finally:
            model.crosses.gate = None
        multipliers.fold_into(first_layer(model, self.name), task.optimizer)
        facts = {"steps": task.steps, "own_count": multipliers.count_alive(), **cost.to_dict()}
        selection = rank_fields(task, self.name, multipliers.scores(), **facts)
        return replace(selection, history=tuple(multipliers.history))


class Multipliers(HistoryCallback):
    """α (N,) of the parts of a model, and their optimizer."""

    def __init__(self, task: SearchTask, model: DLRMCross, options: AutoFISOptions, cost: SearchCost) -> None:
        super().__init__(task.steps)
        self.names, self.options, self.cost = model.names, options, cost
        self.holdout = None if task.holdout is None else HoldoutBatches(task.holdout)
        device = next(model.parameters()).device
        self.alpha = torch.ones(len(model.names), device=device, requires_grad=True)
        self.total = torch.zeros(len(model.names), device=device)  # v
        self.count = torch.zeros((), device=device)  # t

    def gate(self) -> Tensor:
        """Return α, for the module that multiplies by it."""
        return self.alpha

    def count_alive(self) -> int:
        """Return the number of non-zero α."""
        return int((self.alpha.detach() != 0).sum())

    def within_step(self, state: State) -> None:
        """Update α, by its gradient on holdout rows if there are some."""
        if self.holdout is not None:
            batch = on_device(self.holdout.next(), self.alpha.device)
            self.cost.add(forwards=len(batch), backwards=len(batch))
            self.alpha.grad = holdout_grad(state, batch, self.alpha, state.model.parameters())
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
        """Record the state of the search every few steps."""
        if self.should_record(state.step):
            self.record(state, alive=self.count_alive())

    def on_end(self, state: State) -> None:
        """Release the holdout rows."""
        if self.holdout is not None:
            self.holdout.close()

    def scores(self) -> dict[str, float]:
        """Return |α| of the non-zero ones, and of the others how far they are below the threshold."""
        margins = (1 - self.total).abs() - self.options.threshold(self.count, self.steps)
        return dict(zip(self.names, margins.tolist(), strict=True))

    def fold_into(self, layer: FirstLayer, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the columns of each part, and their optimizer state, by its α."""
        layer.multiply(self.alpha.detach())
        for columns, alpha in zip(layer.columns(), self.alpha.tolist(), strict=True):
            first, last = int(columns[0]), int(columns[-1])
            rescale_state(optimizer, layer.weight, alpha, (1, first, last + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs."""
        tensors = {name: getattr(self, name).detach().clone() for name in ("alpha", "total", "count")}
        holdout = {} if self.holdout is None else {"holdout": self.holdout.state_dict()}
        return {**tensors, "history": list(self.history), **holdout}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for name in ("alpha", "total", "count"):
            getattr(self, name).copy_(values[name])
        self.history = list(values["history"])
        if self.holdout is not None:
            self.holdout.load_state_dict(values["holdout"])
