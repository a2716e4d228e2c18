r"""AutoFIS: a multiplier on every cross, moved by an optimizer that makes zeros by itself (generalised RDA).

.. math:: v \leftarrow v + \eta\,\partial L/\partial\alpha, \qquad
          \alpha = \mathrm{sign}(\alpha_0 - v)\,\big(|\alpha_0 - v| - c\,\eta^{1/2} (t\eta)^\mu\big)_+

Liu et al., AutoFIS: Automatic Feature Interaction Selection in Factorization Models for Click-Through Rate
Prediction, 2020; Chao and Cheng, A Generalization of Regularized Dual Averaging, 2019. Defined here from
memory, so treat comparisons with care: the paper normalises every interaction (batch norm) and starts α at
about 0.6; here α starts at 1, so that a trained model predicts the same when the search begins, and the
embeddings that the crosses are made of have a multiplier too, since they can be dropped as well. α multiplies
the part where its gate would sit.

The search is for crosses: it needs the backbone dlrm_cross. A part's score is |α₀ - v| less the threshold,
which is |α| where that is not zero. At the end α is put into the columns of the first layer that read the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.gates.prox import soft_threshold
from lpfs.gates.state import rescale_state
from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import FirstLayer, first_layer
from lpfs.methods.held import Held, held_grad
from lpfs.methods.polarize import RECORDS
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models.dlrm_cross import DLRMCross
from lpfs.schema import Selection, known_keys
from lpfs.train.callbacks import Callback, State
from lpfs.train.evaluate import on_device


@dataclass(frozen=True)
class Options:
    """Settings: η, c and μ of the multipliers' optimizer; c None: what brings α to zero by the end."""

    lr: float = 0.1
    c: float | None = None
    mu: float = 0.8

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr", "mu") if self.c is None else ("lr", "mu", "c"))

    def threshold(self, step: Tensor, steps: int) -> Tensor:
        """Return c·η^½·(tη)^μ; it is 1 at the end of a search of ``steps`` where c is None."""
        full = self.lr**0.5 * (steps * self.lr) ** self.mu
        return (1.0 if self.c is None else self.c * full) * (step / steps) ** self.mu


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("autofis", wish)


def check_model(model: nn.Module) -> DLRMCross:
    """Refuse a backbone on which this is not defined; the model may be one without numbers."""
    if not isinstance(model, DLRMCross):
        raise InputError(
            f"autofis chooses crosses of fields, and {type(model).__name__} has none that can be dropped one by "
            "one; use the backbone dlrm_cross"
        )
    return model


def search(task: Task) -> Selection:
    """Train the model and its multipliers together, in place; return the parts with the largest."""
    options = Options(**known_keys(Options, task.options))
    need_number("autofis", task.wish)
    model = check_model(task.model)
    task.wish.check(model.names)
    effort = Effort()
    driver = Multipliers(task, model, options, effort)
    model.crosses.gate = driver.gate
    try:
        task.fit(driver, effort)
    finally:
        model.crosses.gate = None
    driver.put_into(first_layer(model, "autofis"), task.optimizer)
    own = int((driver.alpha.detach() != 0).sum())
    found = ranked(task, "autofis", driver.scores(), steps=task.steps, own_count=own, **effort.told())
    return replace(found, history=tuple(driver.history))


class Multipliers(Callback):
    """α (N,) of the parts of a model, and their optimizer."""

    def __init__(self, task: Task, model: DLRMCross, options: Options, effort: Effort) -> None:
        self.names, self.steps, self.options, self.effort = model.names, task.steps, options, effort
        self.held = None if task.held is None else Held(task.held)
        device = next(model.parameters()).device
        self.alpha = torch.ones(len(model.names), device=device, requires_grad=True)
        self.total = torch.zeros(len(model.names), device=device)  # v
        self.count = torch.zeros((), device=device)  # t
        self.every = max(1, task.steps // RECORDS)
        self.history: list[dict[str, Any]] = []

    def gate(self) -> Tensor:
        """Return α, for the module that multiplies by it."""
        return self.alpha

    def within_step(self, state: State) -> None:
        """Move α, by its gradient on held-out rows if there are some."""
        if self.held is not None:
            batch = on_device(self.held.next(), self.alpha.device)
            self.effort.add(forwards=len(batch), backwards=len(batch))
            self.alpha.grad = held_grad(state, batch, self.alpha, state.model.parameters())
        self.move()

    @torch.no_grad()
    def move(self) -> None:
        """Take a step of the generalised RDA."""
        assert self.alpha.grad is not None
        self.count.add_(1)
        self.total.add_(self.alpha.grad, alpha=self.options.lr)
        self.alpha.grad.zero_()
        self.alpha.copy_(soft_threshold(1 - self.total, self.options.threshold(self.count, self.steps)))

    def after_step(self, state: State) -> None:
        """Write down where the search stands, now and then."""
        if state.step % self.every == 0 or state.step == self.steps:
            loss = float("nan") if state.loss is None else float(state.loss.detach())
            alive = int((self.alpha.detach() != 0).sum())
            self.history.append({"step": state.step, "loss": loss, "alive": alive})

    def on_end(self, state: State) -> None:
        """Let go of the held-out rows."""
        if self.held is not None:
            self.held.close()

    def scores(self) -> dict[str, float]:
        """Return |α| of those that are not zero, and how far the others are below."""
        found = (1 - self.total).abs() - self.options.threshold(self.count, self.steps)
        return dict(zip(self.names, found.tolist(), strict=True))

    def put_into(self, layer: FirstLayer, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the columns that read each part by its α; the optimizer's state follows."""
        layer.multiply(self.alpha.detach())
        for columns, alpha in zip(layer.columns(), self.alpha.tolist(), strict=True):
            first, last = int(columns[0]), int(columns[-1])
            rescale_state(optimizer, layer.weight, alpha, (1, first, last + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        numbers = {name: getattr(self, name).detach().clone() for name in ("alpha", "total", "count")}
        held = {} if self.held is None else {"held": self.held.state_dict()}
        return {**numbers, "history": list(self.history), **held}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        for name in ("alpha", "total", "count"):
            getattr(self, name).copy_(values[name])
        self.history = list(values["history"])
        if self.held is not None:
            self.held.load_state_dict(values["held"])
