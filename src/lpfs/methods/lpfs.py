"""LPFS and LPFS++: learnable polarizing gates, trained by proximal steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lpfs._validation import is_number
from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.gates.controller import FAST_DESCENT, Keep
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.module import ATTRIBUTE as GATES
from lpfs.gates.module import Gates, Rescale
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule
from lpfs.methods.base import Method, SearchCost, SearchTask
from lpfs.methods.gate_search import DESCENT_END, AucLossSearch, BudgetSearch, GateSearch, evaluate_auc
from lpfs.methods.target import TARGET_KINDS, SelectionTarget
from lpfs.methods.training import center_embeddings
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Resumable

REFERENCE_EVALUATIONS = 10  # of the training without gates
NUMBERS = ("alpha", "tau", "epsilon", "noise", "lr", "momentum")


@dataclass(frozen=True)
class LPFSPlusPlusOptions:
    """Gate function and its constants, schedule, and optimizer; None is the default of the gate function."""

    gate: str = "lpfs++"
    alpha: float | None = None
    tau: float | None = None
    epsilon: float | None = None
    noise: float | None = None
    schedule: Preset | Schedule = "scaled"
    rescale: Rescale = "epsilon"
    lr: float | None = None
    momentum: float = 0.9
    prox: Prox | None = None
    threshold: Threshold = "paper"
    centre: bool = True

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if not is_number(value) and (value is not None or name == "momentum"):
                raise InputError(f"{name} must be a number, found {value!r}")
        if not isinstance(self.centre, bool):
            raise InputError(f"centre must be true or false, found {self.centre!r}")
        gates = self.make_gates(("field",), 1)  # checks the other options
        self.make_optimizer(gates, penalty=0.0)

    @property
    def function(self) -> GateFunction:
        """The gate function with its constants."""
        constants = {"alpha": self.alpha, "tau": self.tau, "epsilon": self.epsilon, "noise": self.noise}
        return gate_function(self.gate, **constants)

    def make_gates(self, names: Sequence[str], steps: int, seed: int = 0) -> Gates:
        """Return gates as in a search, attached to no model."""
        return Gates(names, self.function, steps, self.schedule, self.rescale, seed)

    def make_optimizer(self, gates: Gates, **target: Any) -> ProxSGD:
        """Return the optimizer of some gates."""
        settings = {"lr": self.lr, "momentum": self.momentum, "prox": self.prox, "threshold": self.threshold}
        return gates.optimizer(**settings, **target)  # type: ignore[arg-type]


class LPFSPlusPlus(Method):
    r"""A gate per field, whose value polarizes to 0 or 1 as ε falls, trained by proximal steps.

    .. math:: g(x) = \mathrm{sign}(x)\,\frac{x^2}{x^2 + \epsilon} + \alpha\,\epsilon^{1/\tau} \arctan x, \qquad
              x \leftarrow \mathrm{prox}_{\eta\lambda}\big(x - \eta\,\partial L / \partial x\big)

    The proximal step sets x, and with it the gate, to exactly zero; the odd term gives a zeroed gate a gradient,
    so that it can become non-zero again. λ is controlled until K gates are left.
    """

    Options = LPFSPlusPlusOptions
    options: LPFSPlusPlusOptions
    targets = TARGET_KINDS
    trial_options = ({"alpha": 30.0}, {"lr": 0.02}, {"lr": 0.005}, {"alpha": 100.0})
    distributed = True
    search_per_k = True

    def __init__(self, name: str, options: LPFSPlusPlusOptions | None = None) -> None:
        super().__init__(name, options)
        self.cuda_graph = not self.options.function.noise  # noise is drawn on the host

    def check(self, target: SelectionTarget, names: Sequence[str], steps: int) -> None:
        """Raise InputError if a search cannot start, before any training."""
        super().check(target, names, steps)
        self.make_optimizer(self.options.make_gates(names, steps), target)

    def search(self, task: SearchTask) -> Selection:
        """Attach gates, unless the model has some, and train them together with the model."""
        options, cost = self.options, SearchCost()
        gates = getattr(task.model, GATES, None)
        if not isinstance(gates, Gates) and isinstance(task.model, Model):
            self.check(task.target, tuple(task.model.sites()), task.steps)
        reference = self.reference_curve(task, cost) if task.target.max_auc_loss is not None else []
        if not isinstance(gates, Gates):
            if options.centre and isinstance(task.model, Model):
                center_embeddings(task.model, task.stream)
            gates = attach(
                task.model,
                steps=task.steps,
                gate=options.function,
                schedule=options.schedule,
                rescale=options.rescale,
                seed=task.seed,
            )
        task.target.check(gates.names)
        callback = self.make_callback(task, gates, reference, cost)
        task.fit(callback, cost, steps=gates.steps)
        selection = gates.selection(method=gates.function.name, **_search_facts(callback), **cost.to_dict())
        return replace(selection, history=tuple(callback.history))

    def make_optimizer(self, gates: Gates, target: SelectionTarget) -> ProxSGD:
        """Return the optimizer of the gates for a target."""
        weights = None if target.costs is None else target.costs.weights(gates.names, gates.names)
        if weights is not None and not any(weights):
            weights = None  # no field has a cost: all are equal
        shared: dict[str, Any] = {"must_keep": target.must_keep, "costs": weights}
        if target.keep is not None:
            return self.options.make_optimizer(gates, keep=target.keep, **shared)
        if target.penalty is not None:
            return self.options.make_optimizer(gates, penalty=target.penalty, **shared)
        free = {name for name, weight in zip(gates.names, weights or (), strict=False) if weight == 0}
        minimum = max(1, len(free | set(target.must_keep)))  # a gate without a penalty never becomes zero
        descent = Keep(minimum, end=DESCENT_END, freeze=DESCENT_END, hurry=0.9, **FAST_DESCENT)
        return self.options.make_optimizer(gates, keep=minimum, control=descent, **shared)

    def make_callback(
        self, task: SearchTask, gates: Gates, reference: list[tuple[int, float]], cost: SearchCost
    ) -> GateSearch:
        """Return the callback that searches for the target."""
        target, prox = task.target, self.make_optimizer(gates, task.target)
        if target.budget is not None:
            assert target.costs is not None
            return BudgetSearch(gates, prox, target.costs, target.budget, target.must_keep, task.holdout, cost)
        if target.max_auc_loss is not None:
            assert task.valid is not None  # reference_curve has used it
            return AucLossSearch(gates, prox, task.valid, reference, target.max_auc_loss, cost, task.holdout)
        return GateSearch(gates, prox, task.holdout, cost)

    def reference_curve(self, task: SearchTask, cost: SearchCost) -> list[tuple[int, float]]:
        """Return (step, validation AUC) of the same training of a copy without gates: the AUC of all fields."""
        if task.valid is None:
            raise InputError("max_auc_loss is measured on validation rows: give valid=")
        model, optimizer = copy.deepcopy((task.model, task.optimizer))
        position = task.stream.state_dict() if isinstance(task.stream, Resumable) else None
        recorder = _AucRecorder(task, cost)
        recorder.evaluate(model, 0)
        task.fit(recorder, cost, model=model, optimizer=optimizer, subfolder="reference")
        if position is not None and isinstance(task.stream, Resumable):
            task.stream.load_state_dict(position)  # the search uses the same batches, also after a resume
        return recorder.curve


@dataclass(frozen=True)
class LPFSOptions(LPFSPlusPlusOptions):
    """The same options, with the gate function of LPFS."""

    gate: str = "lpfs"


class LPFS(LPFSPlusPlus):
    r"""The same search with gates that have no odd term: a zeroed gate gets no gradient.

    .. math:: g(x) = \frac{x^2}{x^2 + \epsilon}
    """

    Options = LPFSOptions
    trial_options = ({"lr": 0.01}, {"lr": 0.0025}, {"epsilon": 0.2}, {"epsilon": 0.05})


def _search_facts(callback: GateSearch) -> dict[str, Any]:
    """Return the entries of ``Selection.made`` from a search for an unknown number of fields."""
    if isinstance(callback, AucLossSearch):
        reference = [list(point) for point in callback.reference]
        return {"curve": callback.curve, "end": callback.end, "reference": reference}
    if isinstance(callback, BudgetSearch):
        total = callback.costs.total(callback.gates.kept)
        return {"cost": total, "budget": callback.budget, "unit": callback.costs.unit}
    return {}


class _AucRecorder(Callback):
    """Records the validation AUC every few steps."""

    def __init__(self, task: SearchTask, cost: SearchCost) -> None:
        self.task, self.cost, self.curve = task, cost, list[tuple[int, float]]()

    def evaluate(self, model: nn.Module, step: int) -> None:
        assert self.task.valid is not None
        self.curve.append((step, evaluate_auc(model, self.task.valid, self.cost)))

    def after_step(self, state: State) -> None:
        if state.step % max(1, self.task.steps // REFERENCE_EVALUATIONS) == 0:
            self.evaluate(state.model, state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"curve": [list(point) for point in self.curve]}

    def load_state_dict(self, values: Any) -> None:
        self.curve = [(point[0], point[1]) for point in values["curve"]]
