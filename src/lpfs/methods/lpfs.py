"""LPFS and LPFS++: learnable polarizing gates, trained by proximal steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lpfs._fileio import read_json, write_json_atomic
from lpfs._locks import FileLock
from lpfs._validation import check_int
from lpfs.errors import InputError, StateError
from lpfs.gates.attach import attach
from lpfs.gates.controller import FAST_DESCENT, Keep
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.module import ATTRIBUTE as GATES, Gates, Rescale
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule
from lpfs.methods.base import HistoryCallback, Method, MethodOptions, SearchCost, SearchTask, restore_position
from lpfs.methods.cross_fitting import FoldNetworks
from lpfs.methods.gate_search import DESCENT_END, AucLossSearch, BudgetSearch, GateSearch, evaluate_auc
from lpfs.methods.subset_elimination import SubsetNetworks, exchange
from lpfs.methods.target import TARGET_KINDS, SelectionTarget
from lpfs.methods.training import center_embeddings
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import State

JUDGED_EVALUATIONS = 16_000_000  # of a row with a subset, in as many comparisons as there are fields
EXCHANGE_ERRORS = 2.0  # standard errors by which an exchange of fields must lower the held-out loss
REFERENCE_EVALUATIONS = 10  # of the training without gates


Start = tuple[Model, torch.optim.Optimizer]  # copies from before a search, which the networks of its judges start from


@dataclass(frozen=True)
class LPFSPlusPlusOptions(MethodOptions):
    """Gate function and its constants, schedule, and optimizer; None is the default of the gate function.

    ``folds`` is the number of networks of a cross-fitted search on a small table (see ``cross_fitting``); 0: one
    network, and gates that are trained on rows of their own. ``judges`` is the number of networks, each blind to one
    fold of the search rows, that judge on a small table which kept fields are exchanged for dropped ones after a search
    for K fields (see ``subset_elimination``); 0: none.
    """

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
    folds: int = 0
    judges: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("folds", "judges"):
            if check_int(name, getattr(self, name), 0) == 1:
                raise InputError(f"{name} must be 0, for none, or at least 2, found 1")
        self.make_optimizer(self.make_gates(("field",), 1), penalty=0.0)  # checks the other options

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
        self.folds, self.judges = self.options.folds, self.options.judges
        self.fleet = not (self.folds or self.single_pass)

    def check(self, target: SelectionTarget, names: Sequence[str], steps: int) -> None:
        super().check(target, names, steps)
        self.make_optimizer(self.options.make_gates(names, steps), target)

    def search(self, task: SearchTask) -> Selection:
        """Attach gates, unless the model has some, and train them together with the model."""
        cost = SearchCost()
        if task.folds:
            task = replace(task, training=replace(task.training, graph=False))  # their steps cannot be captured
        callback, start = self.start(task, cost)
        task.fit(callback, cost, steps=callback.gates.steps)
        return self.finish(callback, task, start)

    def start(self, task: SearchTask, cost: SearchCost) -> tuple[GateSearch, Start | None]:
        """Attach gates, unless the model has some; return what trains them, and copies from before if there are judges.

        ``cost`` counts what the search costs.
        """
        options = self.options
        gates = getattr(task.model, GATES, None)
        if not isinstance(gates, Gates) and isinstance(task.model, Model):
            self.check(task.target, tuple(task.model.sites()), task.steps)
        reference = self.reference_curve(task, cost) if task.target.max_auc_loss is not None else []
        networks, start = None, None
        if not isinstance(gates, Gates):
            if task.judges and task.target.keep is not None and isinstance(task.model, Model):
                start = copy.deepcopy((task.model, task.optimizer))
            if options.centre and isinstance(task.model, Model):
                center_embeddings(task.model, task.stream)
            if task.folds:
                config = replace(task.training, steps=task.steps)
                networks = FoldNetworks(task.model, task.optimizer, task.folds, config, cost)
            schedule: dict[str, Any] = {"schedule": options.schedule, "rescale": options.rescale}
            gates = attach(task.model, steps=task.steps, gate=options.function, seed=task.seed, **schedule)
            if networks is not None:
                networks.install(gates)
        elif task.folds:
            raise StateError("a cross-fitted search attaches the gates itself: give it the model without gates")
        task.target.check(gates.names)
        prox = self.make_optimizer(gates, task.target)
        return self.make_callback(gates, prox, task, cost, reference, networks), start

    def finish(self, callback: GateSearch, task: SearchTask, start: Start | None) -> Selection:
        """Exchange fields if there are judges, and return the selection of a trained search."""
        gates, cost = callback.gates, callback.cost
        facts = {**callback.facts(), **({"folds": len(task.folds)} if task.folds else {})}
        if start is not None:
            facts |= exchange_fields(gates, task, *start, cost)
        selection = gates.selection(method=gates.function.name, **facts, **cost.to_dict())
        return replace(selection, history=tuple(callback.history))

    def make_callback(
        self,
        gates: Gates,
        prox: ProxSGD,
        task: SearchTask,
        cost: SearchCost,
        reference: Sequence[tuple[int, float]],
        networks: FoldNetworks | None,
    ) -> GateSearch:
        """Return the callback that trains the gates for a target."""
        if task.target.budget is not None:
            return BudgetSearch(gates, prox, task, cost, networks)
        if task.target.max_auc_loss is not None:
            return AucLossSearch(gates, prox, task, cost, reference, networks)
        return GateSearch(gates, prox, task.holdout, cost, networks)

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

    def reference_curve(self, task: SearchTask, cost: SearchCost) -> list[tuple[int, float]]:
        """Return (step, validation AUC) of the same training of a copy without gates: the AUC of all fields."""
        if task.valid is None:
            raise InputError("max_auc_loss is measured on validation rows: give valid=")
        model, optimizer = copy.deepcopy((task.model, task.optimizer))
        recorder = _AucRecorder(task, cost)
        recorder.evaluate(model, 0)
        with restore_position(task.stream):  # the search uses the same batches, also after a resume
            copied: dict[str, Any] = {"model": model, "optimizer": optimizer}
            task.fit(recorder, cost, **copied, subfolder="reference", final_checkpoint="none")  # only its AUC is used
        return recorder.curve


@dataclass(frozen=True)
class LPFSOptions(LPFSPlusPlusOptions):
    """The same options, with the gate function of LPFS and without judges, which were tried with LPFS++ only."""

    gate: str = "lpfs"
    judges: int = 0


class LPFS(LPFSPlusPlus):
    r"""The same search with gates that have no odd term: a zeroed gate gets no gradient.

    .. math:: g(x) = \frac{x^2}{x^2 + \epsilon}
    """

    Options = LPFSOptions
    trial_options = ({"lr": 0.01}, {"lr": 0.0025}, {"epsilon": 0.2}, {"epsilon": 0.05})


def exchange_fields(
    gates: Gates, task: SearchTask, model: Model, optimizer: torch.optim.Optimizer, cost: SearchCost
) -> dict[str, Any]:
    """Exchange kept for dropped fields while the held-out loss of cross-fitted subset networks falls.

    Returns:
        Entries of ``Selection.made``: the exchanges, and the seconds that an earlier search needed for networks that
        this one has not trained, None if they are unknown.

    Args:
        gates: of the finished search; they are changed.
        task: the search.
        model, optimizer: copies from before it, which the networks start from.
        cost: counts the rows.
    """
    names, folder = gates.names, task.judges_folder
    kept = [names.index(name) for name in gates.kept]
    fixed = [names.index(name) for name in task.target.must_keep]
    if len(kept) == len(names) or set(kept) <= set(fixed):  # nothing to exchange
        return {"exchanged": []}
    lock: AbstractContextManager[object] = nullcontext()
    if folder is not None:
        task = replace(task, folder=folder, resume=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"), folder, on_wait=lambda: None)
    with lock:
        cost_file = None if folder is None else folder / "cost.json"
        known = None if cost_file is None else read_json(cost_file, {"seconds": float | None}, missing_ok=True)
        is_interrupted, begin = folder is not None and folder.exists(), time.perf_counter()
        networks = SubsetNetworks(task, model, optimizer, task.judges, cost, JUDGED_EVALUATIONS // len(names))
        seconds = None if is_interrupted else time.perf_counter() - begin
        if cost_file is not None and known is None:
            write_json_atomic(cost_file, {"seconds": seconds})
    pairs = exchange(networks.losses, kept, len(names), fixed, EXCHANGE_ERRORS)
    with torch.no_grad():
        for out, back in pairs:
            gates.x[back] = gates.x[gates.x != 0].abs().mean()
            gates.x[out] = 0.0
    facts: dict[str, Any] = {"exchanged": [{"dropped": names[out], "kept": names[back]} for out, back in pairs]}
    return facts if known is None else {**facts, "shared_seconds": known["seconds"]}


class _AucRecorder(HistoryCallback):
    """Records the validation AUC every few steps."""

    saved = ("curve",)

    def __init__(self, task: SearchTask, cost: SearchCost) -> None:
        super().__init__(task.steps)
        self.valid, self.cost, self.curve = task.valid, cost, list[tuple[int, float]]()

    def evaluate(self, model: nn.Module, step: int) -> None:
        assert self.valid is not None
        self.curve.append((step, evaluate_auc(model, self.valid, self.cost)))

    def after_step(self, state: State) -> None:
        if state.step % max(1, self.steps // REFERENCE_EVALUATIONS) == 0:
            self.evaluate(state.model, state.step)
