"""LPFS and LPFS++: learnable polarizing gates, moved by proximal steps (the paper this package is named after)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.gates.control import STEEP, Keep
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.module import NAME as GATES
from lpfs.gates.module import Gates, Rescale
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule
from lpfs.methods.centre import centre
from lpfs.methods.descend import LATEST, WithinBudget, WithinLoss
from lpfs.methods.effort import Effort
from lpfs.methods.polarize import Polarize
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.schema import Selection, known_keys
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Resumable
from lpfs.train.evaluate import evaluate

REFERENCES = 10  # evaluations of the training without gates
NUMBERS = ("alpha", "tau", "epsilon", "noise", "lr", "momentum")


@dataclass(frozen=True)
class Options:
    """Settings of LPFS and LPFS++, checked when they are made; None stands for the gate function's default."""

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
            fine = isinstance(value, int | float) and not isinstance(value, bool)
            if not fine and (value is not None or name == "momentum"):
                raise InputError(f"{name} must be a number, found {value!r}")
        if not isinstance(self.centre, bool):
            raise InputError(f"centre must be true or false, found {self.centre!r}")
        self.optimizer(self.gates(("a field",), 1), Wish(), penalty=0.0)

    @property
    def function(self) -> GateFunction:
        """The gate function with its constants."""
        own = {"alpha": self.alpha, "tau": self.tau, "epsilon": self.epsilon, "noise": self.noise}
        return gate_function(self.gate, **own)

    def gates(self, names: Sequence[str], steps: int, seed: int = 0) -> Gates:
        """Return gates as a search has them, on no model."""
        return Gates(names, self.function, steps, self.schedule, self.rescale, seed)

    def optimizer(self, gates: Gates, wish: Wish, **how: Any) -> ProxSGD:
        """Return the optimizer of some gates."""
        settings = {"lr": self.lr, "momentum": self.momentum, "prox": self.prox, "threshold": self.threshold}
        return gates.optimizer(must_keep=wish.must_keep, **settings, **how)  # type: ignore[arg-type]


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    make_prox(options.gates(names, steps), options, wish)


def search(task: Task) -> Selection:
    """Attach gates, train them together with the model, and read them."""
    options = Options(**known_keys(Options, task.options))
    effort = Effort()
    reference = without_gates(task, effort) if task.wish.max_auc_loss is not None else []
    gates = getattr(task.model, GATES, None)
    if not isinstance(gates, Gates):
        if options.centre and isinstance(task.model, Model):
            centre(task.model, task.stream)
        gates = attach(
            task.model,
            steps=task.steps,
            gate=options.function,
            schedule=options.schedule,
            rescale=options.rescale,
            seed=task.seed,
        )
    task.wish.check(gates.names)
    driver = drive(task, gates, options, reference, effort)
    task.fit(driver, effort, steps=gates.steps)
    found = gates.selection(method=gates.function.name, **told(driver), **effort.told())
    return replace(found, history=tuple(driver.history))


def make_prox(gates: Gates, options: Options, wish: Wish) -> ProxSGD:
    """Return the optimizer of the gates for what is wished for."""
    costs = None if wish.costs is None else wish.costs.weights(gates.names, gates.names)
    if costs is not None and not any(costs):
        costs = None  # nothing costs anything: nobody is dearer than another
    if wish.keep is not None:
        return options.optimizer(gates, wish, keep=wish.keep, costs=costs)
    if wish.penalty is not None:
        return options.optimizer(gates, wish, penalty=wish.penalty, costs=costs)
    free = {name for name, cost in zip(gates.names, costs or (), strict=False) if cost == 0}
    least = max(1, len(free | set(wish.must_keep)))  # who is not penalised cannot be let go
    down = Keep(least, end=LATEST, freeze=LATEST, hurry=0.9, **STEEP)
    return options.optimizer(gates, wish, keep=least, costs=costs, control=down)


def drive(
    task: Task, gates: Gates, options: Options, reference: list[tuple[int, float]], effort: Effort
) -> Polarize:
    """Return the callback that does what is wished for."""
    wish, prox = task.wish, make_prox(gates, options, task.wish)
    if wish.keep is not None or wish.penalty is not None:
        return Polarize(gates, prox, task.held, effort)
    if wish.budget is not None:
        assert wish.costs is not None
        return WithinBudget(gates, prox, wish.costs, wish.budget, wish.must_keep, task.held, effort)
    assert task.valid is not None  # the training without gates needed it already
    assert wish.max_auc_loss is not None
    return WithinLoss(gates, prox, task.valid, reference, wish.max_auc_loss, effort, task.held)


def told(driver: Polarize) -> dict[str, Any]:
    """Return what a search that looked around has to tell."""
    if isinstance(driver, WithinLoss):
        reference = [list(each) for each in driver.reference]
        return {"curve": driver.curve, "end": driver.end, "reference": reference}
    if isinstance(driver, WithinBudget):
        return {"cost": driver.costs.total(driver.alive()), "budget": driver.budget, "unit": driver.costs.unit}
    return {}


class _Watch(Callback):
    """Writes down the validation AUC now and then."""

    def __init__(self, task: Task, effort: Effort) -> None:
        self.task, self.effort, self.seen = task, effort, list[tuple[int, float]]()

    def look(self, model: Any, step: int) -> None:
        assert self.task.valid is not None
        found = evaluate(model, self.task.valid)
        self.effort.evaluated(found)
        if found.auc is None:
            raise InputError("the validation rows hold one class only, so that there is no AUC to watch")
        self.seen.append((step, found.auc))

    def after_step(self, state: State) -> None:
        if state.step % max(1, self.task.steps // REFERENCES) == 0:
            self.look(state.model, state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen]}

    def load_state_dict(self, values: Any) -> None:
        self.seen = [(each[0], each[1]) for each in values["seen"]]


def without_gates(task: Task, effort: Effort) -> list[tuple[int, float]]:
    """Return (step, validation AUC) of the same training of a copy that has no gates: what all fields give."""
    if task.valid is None:
        raise InputError("max_auc_loss is judged on held-out rows: give valid=")
    model, optimizer = copy.deepcopy((task.model, task.optimizer))
    begin = task.stream.state_dict() if isinstance(task.stream, Resumable) else None
    watch = _Watch(task, effort)
    watch.look(model, 0)
    task.fit(watch, effort, model=model, optimizer=optimizer, within="reference")
    if begin is not None and isinstance(task.stream, Resumable):
        task.stream.load_state_dict(
            begin
        )  # the search sees the same batches, also where this was done before a kill
    return watch.seen
