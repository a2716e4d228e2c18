"""Callbacks that train gates in a search and record it.

:class:`GateSearch` serves a known K and a fixed λ. If the number of fields is unknown, a :class:`DescendingSearch`
increases λ as if one field were to be kept, so that the weakest gates become zero one after another, and checks on the
way: the cost of the fields alive (:class:`BudgetSearch`) or the validation AUC (:class:`AucLossSearch`). Once the check
says stop, the dead set is frozen and the other gates converge, as in a search for a known K.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lpfs._console import sparkline
from lpfs.data.batch import Batch
from lpfs.errors import InputError, SearchError
from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.cross_fitting import FoldNetworks
from lpfs.methods.training import HoldoutCallback, holdout_grads
from lpfs.train.callbacks import State
from lpfs.train.evaluate import evaluate

CHECKS = 100  # checks in a search for an unknown number of fields
DESCENT_END = 0.8  # fraction of a search at which the descent ends
UNAFFORDABLE_WEIGHT = 1e9  # weight on λ that exceeds any gradient


class GateSearch(HoldoutCallback):
    """Updates the gates after every step of the model: proximal step, then ε, η and λ.

    The gates are trained on ``holdout``, which the weights of the model are not; with ``networks``, on the folds that
    these are blind to; with neither, on the batch of the step.
    """

    def __init__(
        self,
        gates: Gates,
        prox: ProxSGD,
        holdout: Iterable[Batch] | None = None,
        cost: SearchCost | None = None,
        networks: FoldNetworks | None = None,
    ) -> None:
        super().__init__(gates.steps, holdout, cost or SearchCost())
        self.gates, self.prox, self.networks = gates, prox, networks

    def within_step(self, state: State) -> None:
        if self.networks is not None:
            self.networks.train(self.gates, state.step)
            self.gates.x.grad = self.networks.gradient(self.gates, state.step)
        elif self.batch is not None:
            (self.gates.x.grad,) = holdout_grads(state, self.batch, [self.gates.x])
        self.prox.step()
        self.gates.step()

    def after_step(self, state: State) -> None:
        if self.should_record(state.step):
            self.record_gates(state)

    def record_gates(self, state: State) -> None:
        """Append the gates to the history and to the log."""
        status = self.gates.status()
        values = [round(value, 6) for value in self.gates.values.tolist()]
        facts = {"alive": status.alive, "penalty": status.penalty, "epsilon": status.epsilon}
        state.note("search", {**facts, "gate_lr": status.lr, "values": {"gates": values}})
        if self.networks is not None:
            facts["holdout_loss"] = float(self.networks.loss)
        self.record(state, **facts, lr=status.lr, gates=values)

    def on_end(self, state: State) -> None:
        super().on_end(state)
        if self.networks is not None:
            self.networks.close()

    def facts(self) -> dict[str, Any]:
        """Return the entries of ``Selection.made`` from a search for an unknown number of fields."""
        return {}

    def describe(self, state: State) -> str:
        """Return how many gates are alive, now and before, from the history: reading x would wait for a GPU."""
        total = len(self.gates.names)
        counts = [record["alive"] for record in self.history]
        return f"{counts[-1]} of {total} gates alive {sparkline(counts, total)}" if counts else ""

    def state_dict(self) -> dict[str, Any]:
        is_done = int(self.gates.steps_done) >= self.gates.steps  # the networks are not used again
        networks = {} if self.networks is None or is_done else self.networks.state_dict()
        return {**super().state_dict(), "prox": self.prox.state_dict(), **networks}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.prox.load_state_dict(values["prox"])
        if self.networks is not None and "networks" in values:
            self.networks.load_state_dict(values)
        super().load_state_dict(values)


class DescendingSearch(GateSearch):
    """Zeroes more and more gates until :meth:`decide` returns where to stop."""

    saved: ClassVar[tuple[str, ...]] = ("is_frozen", "last_alive")

    def __init__(
        self, gates: Gates, prox: ProxSGD, task: SearchTask, cost: SearchCost, networks: FoldNetworks | None = None
    ) -> None:
        super().__init__(gates, prox, task.holdout, cost, networks)
        self.check_every, self.is_frozen = max(1, gates.steps // CHECKS), False
        self.last_alive = len(gates.names)  # gates alive at the last check

    def after_step(self, state: State) -> None:
        super().after_step(state)
        if not self.is_frozen and state.step % self.check_every == 0:
            alive = int((self.gates.x != 0).sum())
            is_late = state.step >= DESCENT_END * self.gates.steps
            if self.should_check(alive) or is_late:
                self.last_alive = alive
                x = self.decide(state, is_late)
                if x is not None:
                    self.gates.freeze(x)
                    self.is_frozen = state.recapture = True

    def should_check(self, alive: int) -> bool:
        """Return whether fewer gates are alive than at the last check."""
        return alive < self.last_alive

    @abstractmethod
    def decide(self, state: State, is_late: bool) -> Tensor | None:
        """Return the x (N,) to freeze, or None to continue; if ``is_late`` the descent must end."""

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        super().load_state_dict(values)
        if self.is_frozen:
            self.gates.freeze()


class BudgetSearch(DescendingSearch):
    """Stops at the first set within the budget; λ is weighted by the costs of the fields.

    A field that exceeds the budget together with those that must be kept is removed immediately.
    """

    saved = (*DescendingSearch.saved, "weights")

    def __init__(
        self, gates: Gates, prox: ProxSGD, task: SearchTask, cost: SearchCost, networks: FoldNetworks | None = None
    ) -> None:
        super().__init__(gates, prox, task, cost, networks)
        target = task.target
        assert target.costs is not None
        assert target.budget is not None
        self.costs, self.budget, self.must_keep = target.costs, target.budget, target.must_keep
        self.check_every = 1
        self.last_alive += 1  # check after the first step: all fields may be within the budget
        totals = {name: self.costs.total(list({*self.must_keep, name})) for name in gates.names}
        self.unaffordable = [name for name, total in totals.items() if total > self.budget]
        weights = self.weights.detach().clone()
        plain = self.cost_weights(gates.names).to(weights)
        # small differences between equal weights, so that fields without a gradient do not all drop in one step
        is_weighted = (plain > 0) & (weights > 0)
        self.tie_factors = torch.where(is_weighted, weights / plain.clamp(min=1e-30), torch.ones_like(weights))

    @property
    def weights(self) -> Tensor:
        """The factor on λ of every field (N,), where the optimizer reads it."""
        weights: Tensor = self.prox.param_groups[0]["weights"]
        return weights

    def should_check(self, alive: int) -> bool:
        return alive != self.last_alive

    def cost_weights(self, alive: Sequence[str]) -> Tensor:
        """Return the cost weight of each field (N,), with a mean of 1 over those alive."""
        names = self.gates.names
        weights = torch.tensor(self.costs.weights(names, alive), dtype=torch.float32)
        mean = weights[[names.index(name) for name in alive]].mean()
        weights = weights / mean if mean > 0 else torch.ones_like(weights)
        for name in self.must_keep:
            weights[names.index(name)] = 0.0
        return weights

    def decide(self, state: State, is_late: bool) -> Tensor | None:
        """Stop if the cost is within the budget; otherwise update the weights on λ."""
        alive = self.gates.kept
        total = self.costs.total(alive)
        if total <= self.budget:
            return self.gates.x.detach().clone()
        if is_late and state.step == self.gates.steps:
            raise SearchError(f"the search ended at cost {total:g}, above the budget {self.budget:g}; increase steps")
        weights = self.cost_weights(alive).to(self.tie_factors) * self.tie_factors
        for name in self.unaffordable:
            weights[self.gates.names.index(name)] = UNAFFORDABLE_WEIGHT
        self.weights.copy_(weights)  # in place: a captured graph reads this memory
        return None

    def facts(self) -> dict[str, Any]:
        return {"cost": self.costs.total(self.gates.kept), "budget": self.budget, "unit": self.costs.unit}


class AucLossSearch(DescendingSearch):
    """Stops at the smallest set whose validation AUC is close enough to that of the same training without gates.

    The search continues below that set for a while, so that the result can say what fewer fields would lose, then
    returns to it. ``reference`` is (step, AUC) of the same training without gates, in order.
    """

    saved = (*DescendingSearch.saved, "best", "curve", "reference")

    def __init__(
        self,
        gates: Gates,
        prox: ProxSGD,
        task: SearchTask,
        cost: SearchCost,
        reference: Sequence[tuple[int, float]],
        networks: FoldNetworks | None = None,
    ) -> None:
        super().__init__(gates, prox, task, cost, networks)
        assert task.valid is not None
        assert task.target.max_auc_loss is not None
        self.valid, self.max_loss, self.reference = task.valid, task.target.max_auc_loss, list(reference)
        self.best = gates.x.detach().clone()
        self.curve: list[dict[str, Any]] = []  # of each check: fields alive, AUC, loss
        self.end: dict[str, Any] = {}  # the same at the end of the search

    def decide(self, state: State, is_late: bool) -> Tensor | None:
        """Evaluate; return the best x once no smaller set can be close enough."""
        self.curve.append(self.measure(state))
        if self.curve[-1]["loss"] <= self.max_loss:
            self.best = self.gates.x.detach().clone()
        losses = [point["loss"] for point in self.curve[-3:]]
        is_hopeless = len(losses) == 3 and min(losses) > max(4 * self.max_loss, self.max_loss + 0.002)
        return self.best if is_late or is_hopeless or self.last_alive == 1 else None

    def measure(self, state: State) -> dict[str, Any]:
        """Return how many gates are alive, the validation AUC, and how much of it is lost."""
        auc = evaluate_auc(state.model, self.valid, self.cost)
        alive = int((self.gates.x != 0).sum())
        return {"step": state.step, "alive": alive, "auc": auc, "loss": self.reference_auc(state.step) - auc}

    def on_end(self, state: State) -> None:
        super().on_end(state)
        self.end = {**self.measure(state), "allowed": self.max_loss}

    def facts(self) -> dict[str, Any]:
        return {"curve": self.curve, "end": self.end, "reference": [list(point) for point in self.reference]}

    def reference_auc(self, step: int) -> float:
        """Return the AUC of the training without gates at a step, interpolated between its evaluations."""
        before = max((point for point in self.reference if point[0] <= step), default=self.reference[0])
        after = min((point for point in self.reference if point[0] >= step), default=self.reference[-1])
        if after[0] <= before[0]:
            return before[1]
        fraction = (step - before[0]) / (after[0] - before[0])
        return before[1] + fraction * (after[1] - before[1])


def evaluate_auc(model: torch.nn.Module, valid: Iterable[Batch], cost: SearchCost) -> float:
    """Return the validation AUC; raise InputError if the rows have only one class."""
    metrics = evaluate(model, valid)
    cost.add(forwards=metrics.main.rows)
    if metrics.auc is None:
        raise InputError("the validation rows have only one class, so they have no AUC; give rows with both")
    return metrics.auc
