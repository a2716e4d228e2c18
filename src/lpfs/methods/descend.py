"""Descend: a search that does not know how many fields to keep, only where to stop.

λ grows as if one field were to be kept, so that the weakest give way one after another. On the way down the search
watches something: what the fields alive cost, or the validation AUC. Where that says stop, the dead set is frozen
and the survivors settle, as in a search for a known K.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import InputError, SearchError
from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD
from lpfs.gates.settle import settle
from lpfs.methods.costs import Costs
from lpfs.methods.effort import Effort
from lpfs.methods.polarize import Polarize
from lpfs.train.callbacks import State
from lpfs.train.evaluate import evaluate

LOOKS = 100  # how often, in a whole search, something is looked at
LATEST = 0.8  # by then, in parts of a search, the descent is over
UNAFFORDABLE = 1e9  # a weight on λ that no gradient holds against


class Descend(Polarize):
    """Goes down until :meth:`look` says where to stay."""

    def __init__(
        self, gates: Gates, prox: ProxSGD, held: Iterable[Batch] | None = None, effort: Effort | None = None
    ) -> None:
        super().__init__(gates, prox, held, effort)
        self.pause = max(1, gates.steps // LOOKS)
        self.settled = False
        self.seen = len(gates.names)  # how many were alive at the last look

    def after_step(self, state: State) -> None:
        """Write down, then look."""
        super().after_step(state)
        if not self.settled and state.step % self.pause == 0:
            alive = int((self.gates.x != 0).sum())
            late = state.step >= LATEST * self.gates.steps
            if self.due(alive) or late:
                self.seen = alive
                stay = self.look(state, late)
                if stay is not None:
                    settle(self.gates, stay)
                    self.settled = True
                    state.recapture = True

    def due(self, alive: int) -> bool:
        """Say whether there is something new to look at."""
        return alive < self.seen

    @abstractmethod
    def look(self, state: State, late: bool) -> Tensor | None:
        """Return the x (N,) to settle at, or None to go on; at ``late`` there is no more going on."""

    def alive(self) -> list[str]:
        """Return the names of the fields alive."""
        return self.gates.kept

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {**super().state_dict(), "settled": self.settled, "seen": self.seen}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(values)
        self.settled, self.seen = values["settled"], values["seen"]
        if self.settled:
            settle(self.gates)


class WithinBudget(Descend):
    """Stops at the first set that the budget can pay for; λ is weighted by what each field stands for.

    A field that the budget cannot pay for beside those that must be kept is let go at once.
    """

    def __init__(
        self,
        gates: Gates,
        prox: ProxSGD,
        costs: Costs,
        budget: float,
        must_keep: Sequence[str],
        held: Iterable[Batch] | None = None,
        effort: Effort | None = None,
    ) -> None:
        super().__init__(gates, prox, held, effort)
        self.pause = 1
        self.costs, self.budget, self.must_keep = costs, budget, must_keep
        self.seen += 1  # look at once: it may be affordable as it is
        names = gates.names
        self.too_dear = [name for name in names if costs.total(list({*must_keep, name})) > budget]
        held = self.weights.detach().clone()
        plain = self.fresh_weights(names).to(held)
        # equal weights are parted a little, so that fields without any gradient do not all go in one step
        self.parted = torch.where((plain > 0) & (held > 0), held / plain.clamp(min=1e-30), torch.ones_like(held))

    @property
    def weights(self) -> Tensor:
        """The factor on λ of every field (N,), where the optimizer reads it."""
        found: Tensor = self.prox.param_groups[0]["weights"]
        return found

    def due(self, alive: int) -> bool:
        """Say whether another number of fields is alive than at the last look."""
        return alive != self.seen

    def fresh_weights(self, alive: Sequence[str]) -> Tensor:
        """Return what each field stands for (N,), 1 on average over those alive."""
        names = self.gates.names
        weights = torch.tensor(self.costs.weights(names, alive), dtype=torch.float32)
        mean = weights[[names.index(name) for name in alive]].mean()
        weights = weights / mean if mean > 0 else torch.ones_like(weights)
        for name in self.must_keep:
            weights[names.index(name)] = 0.0
        return weights

    def look(self, state: State, late: bool) -> Tensor | None:
        """Stay where the cost fits; weigh λ anew where it does not."""
        alive = self.alive()
        if self.costs.total(alive) <= self.budget:
            return self.gates.x.detach().clone()
        if late and state.step == self.gates.steps:
            raise SearchError(
                f"the search ended at a cost of {self.costs.total(alive):g}, above the budget of {self.budget:g}; "
                "give it more steps"
            )
        weights = self.fresh_weights(alive).to(self.parted) * self.parted
        for name in self.too_dear:
            weights[self.gates.names.index(name)] = UNAFFORDABLE
        self.weights.copy_(weights)  # in place: a captured graph reads it there
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {**super().state_dict(), "weights": self.weights.detach().clone()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(values)
        self.weights.copy_(values["weights"])


class WithinLoss(Descend):
    """Stops at the smallest set whose validation AUC is near enough to that of the same training without gates.

    It goes some way below, so that the answer can say what further cuts would cost, then returns.

    Args:
        gates: on the model that is trained.
        prox: their optimizer.
        valid: held-out batches.
        reference: (step, AUC) of the same training without gates, in order.
        loss: how much AUC may be lost.
        effort: where its evaluations are counted.

    """

    def __init__(
        self,
        gates: Gates,
        prox: ProxSGD,
        valid: Iterable[Batch],
        reference: Sequence[tuple[int, float]],
        loss: float,
        effort: Effort,
        held: Iterable[Batch] | None = None,
    ) -> None:
        super().__init__(gates, prox, held, effort)
        self.valid, self.reference, self.loss = valid, list(reference), loss
        self.best = gates.x.detach().clone()
        self.curve: list[dict[str, Any]] = []  # what was seen on the way: fields alive, AUC, loss
        self.end: dict[str, Any] = {}  # the same where the search ended

    def look(self, state: State, late: bool) -> Tensor | None:
        """Evaluate; return where to stay once it is clear that there is no way further down."""
        self.curve.append(self.measured(state))
        if self.curve[-1]["loss"] <= self.loss:
            self.best = self.gates.x.detach().clone()
        hopeless = [each["loss"] for each in self.curve[-3:]]
        far = len(hopeless) == 3 and min(hopeless) > max(4 * self.loss, self.loss + 0.002)
        return self.best if late or far or self.seen == 1 else None

    def measured(self, state: State) -> dict[str, Any]:
        """Return how many fields are alive, the validation AUC, and how much of it is lost."""
        metrics = evaluate(state.model, self.valid)
        self.effort.evaluated(metrics)
        found = metrics.auc
        if found is None:
            raise InputError("the validation rows hold one class only, so that there is no AUC to watch")
        alive = int((self.gates.x != 0).sum())
        return {"step": state.step, "alive": alive, "auc": found, "loss": self.expected(state.step) - found}

    def on_end(self, state: State) -> None:
        """Measure where the search ended."""
        super().on_end(state)
        self.end = {**self.measured(state), "allowed": self.loss}

    def expected(self, step: int) -> float:
        """Return the AUC that the training without gates had at this step, between the steps it was looked at."""
        before = max((each for each in self.reference if each[0] <= step), default=self.reference[0])
        after = min((each for each in self.reference if each[0] >= step), default=self.reference[-1])
        if after[0] <= before[0]:
            return before[1]
        part = (step - before[0]) / (after[0] - before[0])
        return before[1] + part * (after[1] - before[1])

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        mine = {"best": self.best, "curve": list(self.curve), "reference": [list(each) for each in self.reference]}
        return {**super().state_dict(), **mine}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(values)
        self.best = values["best"].to(self.gates.x.device)
        self.curve = list(values["curve"])
        self.reference = [(each[0], each[1]) for each in values["reference"]]
