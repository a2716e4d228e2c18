"""LPFS and LPFS++: learnable polarizing gates, moved by proximal steps (the paper this package is named after)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.gates.control import Keep
from lpfs.gates.module import NAME as GATES
from lpfs.gates.module import Gates, Rescale
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule
from lpfs.methods.descend import LATEST, WithinBudget, WithinLoss
from lpfs.methods.polarize import Polarize
from lpfs.methods.task import Task
from lpfs.schema import Selection, known_keys
from lpfs.train.callback import Callback, State
from lpfs.train.evaluate import evaluate
from lpfs.train.loop import fit

REFERENCES = 10  # evaluations of the training without gates


@dataclass(frozen=True)
class Options:
    """Settings of LPFS and LPFS++; None stands for the default of the gate function."""

    gate: str = "lpfs++"
    alpha: float | None = None
    tau: float | None = None
    epsilon: float | None = None
    noise: float | None = None
    schedule: Preset | Schedule = "scaled"
    rescale: Rescale = "epsilon"
    lr: float | None = None
    momentum: float = 0.9
    prox: Prox = "l1"
    threshold: Threshold = "paper"


def search(task: Task) -> Selection:
    """Attach gates, train them together with the model, and read them."""
    options = Options(**known_keys(Options, task.options))
    reference = without_gates(task) if task.wish.max_auc_loss is not None else []
    gates = getattr(task.model, GATES, None)
    if not isinstance(gates, Gates):
        gates = attach(
            task.model,
            steps=task.steps,
            gate=options.gate,
            alpha=options.alpha,
            tau=options.tau,
            epsilon=options.epsilon,
            noise=options.noise,
            schedule=options.schedule,
            rescale=options.rescale,
            seed=task.seed,
        )
    task.wish.check(gates.names)
    driver = drive(task, gates, options, reference)
    fit(
        task.model,
        task.stream,
        task.optimizer,
        folder=task.folder,
        resume=task.resume,
        callbacks=[driver],
        config=replace(task.training, steps=gates.steps, epochs=None, lr=None),
    )
    found = gates.selection(method=options.gate, **told(driver))
    return replace(found, history=tuple(driver.history))


def drive(task: Task, gates: Gates, options: Options, reference: list[tuple[int, float]]) -> Polarize:
    """Return the callback that does what is wished for."""
    wish, names = task.wish, gates.names

    def optimizer(**how: Any) -> ProxSGD:
        settings = {"lr": options.lr, "momentum": options.momentum, "threshold": options.threshold}
        return gates.optimizer(must_keep=wish.must_keep, prox=options.prox, **settings, **how)  # type: ignore[arg-type]

    costs = None if wish.costs is None else wish.costs.weights(names, names)
    if wish.keep is not None:
        return Polarize(gates, optimizer(keep=wish.keep, costs=costs))
    if wish.penalty is not None:
        return Polarize(gates, optimizer(penalty=wish.penalty, costs=costs))
    least = max(1, len(wish.must_keep))
    down = optimizer(keep=least, costs=costs, control=Keep(least, end=LATEST, freeze=LATEST, hurry=0.9))
    if wish.budget is not None:
        assert wish.costs is not None
        return WithinBudget(gates, down, wish.costs, wish.budget, wish.must_keep)
    if task.valid is None:
        raise InputError("max_auc_loss is judged on held-out rows: give valid=")
    assert wish.max_auc_loss is not None
    return WithinLoss(gates, down, task.valid, reference, wish.max_auc_loss)


def told(driver: Polarize) -> dict[str, Any]:
    """Return what a search that looked around has to tell."""
    if isinstance(driver, WithinLoss):
        return {"curve": driver.curve, "reference": [list(each) for each in driver.reference]}
    if isinstance(driver, WithinBudget):
        return {"cost": driver.costs.total(driver.alive()), "budget": driver.budget, "unit": driver.costs.unit}
    return {}


class _Watch(Callback):
    """Writes down the validation AUC now and then."""

    def __init__(self, task: Task) -> None:
        self.task, self.seen = task, list[tuple[int, float]]()

    def look(self, model: Any, step: int) -> None:
        assert self.task.valid is not None
        found = evaluate(model, self.task.valid).auc
        if found is None:
            raise InputError("the validation rows hold one class only, so that there is no AUC to watch")
        self.seen.append((step, found))

    def after_step(self, state: State) -> None:
        if state.step % max(1, self.task.steps // REFERENCES) == 0:
            self.look(state.model, state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen]}

    def load_state_dict(self, values: Any) -> None:
        self.seen = [(each[0], each[1]) for each in values["seen"]]


def without_gates(task: Task) -> list[tuple[int, float]]:
    """Return (step, validation AUC) of the same training of a copy that has no gates: what all fields give."""
    if task.valid is None:
        raise InputError("max_auc_loss is judged on held-out rows: give valid=")
    model, optimizer = copy.deepcopy((task.model, task.optimizer))
    watch = _Watch(task)
    watch.look(model, 0)
    fit(
        model,
        task.stream,
        optimizer,
        folder=None if task.folder is None else task.folder / "reference",
        resume=task.resume,
        callbacks=[watch],
        config=replace(task.training, steps=task.steps, epochs=None, lr=None),
    )
    return watch.seen
