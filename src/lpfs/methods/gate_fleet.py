"""Gate searches that are trained together: models as the replicas of a fleet, each with gates of its own.

Every replica has its K, its seed and its rows, and its result is that of a single search up to rounding. The model and
the loss of the fleet are computed for all replicas at once; the gates, of which there are few, are updated one after
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.gates.attach import detach
from lpfs.gates.hooks import GateTap
from lpfs.gates.module import Gates
from lpfs.methods.base import Method, SearchCost, SearchTask
from lpfs.methods.gate_search import GateSearch
from lpfs.methods.lpfs import LPFSPlusPlus
from lpfs.methods.training import HoldoutBatches, HoldoutCallback, holdout_grads
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Resumable
from lpfs.train.fit_fleet import fit_fleet
from lpfs.train.fleet import Fleet, FleetStream


class GateFleet(HoldoutCallback):
    """Updates the gates of every replica after every step of the fleet, each as :class:`GateSearch` does.

    Args:
        searches: the gates, their optimizer and their history, of every model of ``fit_fleet``.
        taps: the factors on the parts of every model, made of its gates.
        sources: index of the rows of every model.
        holdouts: held-out rows of every source; None: the gates are trained on the batch of the step.
    """

    def __init__(
        self,
        searches: Sequence[GateSearch],
        taps: Sequence[GateTap],
        sources: Sequence[int],
        holdouts: Sequence[Iterable[Batch]] | None,
    ) -> None:
        super().__init__(searches[0].gates.steps, None, SearchCost())
        self.searches, self.taps, self.sources, self.holdouts = searches, taps, sources, holdouts
        self.members: list[int] = []  # searches of this round
        self._starts = [rows.state_dict() if isinstance(rows, Resumable) else None for rows in holdouts or ()]
        self._restored: Mapping[str, Any] | None = None

    def on_begin(self, state: State) -> None:
        fleet = state.model
        assert isinstance(fleet, Fleet)
        self.members, self.cost = fleet.numbers, SearchCost()
        if self.holdouts is not None:  # every round reads the same rows
            used = sorted({self.sources[number] for number in self.members})
            rows = [self.holdouts[source] for source in used]
            for stream, start in zip(rows, (self._starts[source] for source in used), strict=True):
                if isinstance(stream, Resumable) and start is not None:
                    stream.load_state_dict(start)
            self.holdout = HoldoutBatches(FleetStream(fleet, rows))
        if self._restored is not None:
            self.cost.load_state_dict(self._restored["cost"])
            if self.holdout is not None:
                self.holdout.load_state_dict(self._restored["holdout"])
            self._restored = None
        for number in self.members:
            self.searches[number].gates.train()
        self.cost.on_begin(state)
        fleet.set_gates(self.factors)

    def factors(self) -> Tensor:
        """Return the factors (R, N) on the parts of all models, with the gradient of their gates."""
        return torch.stack([factors for tap in self.taps if (factors := tap()) is not None])

    def within_step(self, state: State) -> None:
        searches = [self.searches[number] for number in self.members]
        if self.batch is not None:
            gates = [search.gates.x for search in searches]
            for x, grad in zip(gates, holdout_grads(state, self.batch, gates), strict=True):
                x.grad = grad
        for search in searches:
            search.within_step(state)
            search.gates.x.grad = None  # the fleet, whose gradients are cleared in every step, does not have x

    def after_step(self, state: State) -> None:
        self.cost.after_step(state)
        if self.should_record(state.step):
            for number in self.members:
                self.searches[number].record_gates(replace(state, loss=None, note=_numbered_note(state, number)))

    def on_end(self, state: State) -> None:
        super().on_end(state)
        self.cost.on_end(state)
        for number in self.members:
            self.searches[number].cost.add_cost(self.cost, share=1 / len(self.members))
            self.searches[number].gates.eval()
        assert isinstance(state.model, Fleet)
        state.model.set_gates(None)

    def describe(self, state: State) -> str:
        histories = [self.searches[number].history for number in self.members]
        counts = [str(history[-1]["alive"]) for history in histories if history]
        return f"{', '.join(counts)} gates alive" if counts else ""

    def state_dict(self) -> dict[str, Any]:
        searches = [{**search.state_dict(), "gates": dict(search.gates.state_dict())} for search in self.searches]
        return {**super().state_dict(), "searches": searches, "cost": self.cost.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for search, saved in zip(self.searches, values["searches"], strict=True):
            search.gates.load_state_dict(saved["gates"])
            search.load_state_dict(saved)
        self._restored = values  # positions of the rows, once the round is known


def _numbered_note(state: State, number: int) -> Any:
    """Return the function that logs the records of one replica."""
    return lambda kind, values: state.note(f"{kind}-{number}", values)


def search_together(
    methods: Sequence[Method],
    tasks: Sequence[SearchTask],
    folder: Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> list[Selection]:
    """Search for a number of fields with every task, whose models are trained together; return the selections.

    At the end the models have factors from their gates, but no gates that are attached.

    Args:
        methods: method of every task, whose ``fleet`` is true.
        tasks: as many steps each, of models of one class; the rows of one seed are those of its first task.
        folder: directory of the fleet.
        resume: continue from the last checkpoint there.
        callbacks: further hooks into the loop.
        settings: settings of the fleet's training loop, which override those of the first task.
    """
    first, seeds = tasks[0], list(dict.fromkeys(task.seed for task in tasks))
    searching = [
        (method, task) for method, task in zip(methods, tasks, strict=True) if isinstance(method, LPFSPlusPlus)
    ]
    if len(searching) < len(tasks) or not all(method.fleet for method, _ in searching):
        raise InputError("only searches with gates, by methods whose ``fleet`` is true, can be trained together")
    started = [method.start(task, SearchCost()) for method, task in searching]
    searches = [search for search, _ in started]
    if any(type(search) is not GateSearch or search.networks is not None for search in searches):
        raise InputError("only searches for a given number of fields, without folds, can be trained together")
    if len({search.gates.steps for search in searches}) > 1:
        raise InputError("searches that are trained together need the same number of steps")
    taps = [take_tap(task.model, search.gates) for task, search in zip(tasks, searches, strict=True)]
    sources = [seeds.index(task.seed) for task in tasks]
    rows = [next(task for task in tasks if task.seed == seed) for seed in seeds]
    holdouts = [task.holdout for task in rows if task.holdout is not None]
    if 0 < len(holdouts) < len(rows):
        raise InputError("searches that are trained together need rows of their own for the gates in all or in none")
    fit_fleet(
        [task.model for task in tasks],
        [task.stream for task in rows],
        sources=sources,
        optimizers=[task.optimizer for task in tasks],
        folder=folder,
        resume=resume,
        callbacks=[GateFleet(searches, taps, sources, holdouts or None), *callbacks],
        config=replace(first.training, steps=first.steps, epochs=None, lr=None, **settings),
    )
    return [
        method.finish(search, task, start) for (method, task), (search, start) in zip(searching, started, strict=True)
    ]


def take_tap(model: Any, gates: Gates) -> GateTap:
    """Detach gates from a model, in place, but leave their factors on its inputs, and return these."""
    tap = model.inputs.gate if isinstance(model, Model) else None
    if not isinstance(tap, GateTap) or gates.hooks != [tap]:
        raise InputError(f"{type(model).__name__} has gates outside of its inputs, so its searches are done one by one")
    detach(model)
    model.inputs.gate = tap
    return tap
