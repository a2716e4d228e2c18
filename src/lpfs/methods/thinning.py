"""Thinning: a search that shrinks groups of weights until K groups are left, by moving λ.

λ grows while more groups are alive than the target of the moment, in proportion to the excess, and falls while
fewer are; the target goes from N to K in the first seven tenths of the search. Alive is a group that is longer
than a tenth of the mean group at the start. A shorter one says nothing: the noise of one batch lifts a group
from zero that the next step puts back there, and the more often the larger λ has to be. For the same reason a
group is judged by its mean length over the last tenth of the search; its mean over the whole search, a
thousandth of it, puts those in order that are gone by then.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpfs.gates.control import Keep
from lpfs.methods.effort import Effort
from lpfs.methods.polarize import RECORDS
from lpfs.methods.ranking import cut
from lpfs.methods.task import Task
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State

TRAVEL = 0.4  # part of a search in which the first λ brings a group without any gradient to zero
CLEAR = 0.1  # of the mean length at the start: what is longer counts as alive
LAST = 0.9  # from there on, in parts of a search, lengths are judged
FAINT = 1e-3  # weight of the mean length over the whole search
SAVED = ("penalty", "unit", "recent", "overall")


class Thinning(Callback):
    """Shrinks groups after every step of the optimizer, and moves λ.

    Args:
        task: the search.
        names: of the groups, N.
        begin: part of the search before anything is shrunk.

    """

    def __init__(self, task: Task, names: Sequence[str], begin: float = 0.0) -> None:
        self.names, self.steps, self.first = tuple(names), task.steps, begin * task.steps
        self.fixed = task.wish.penalty
        keep = task.wish.keep or len(self.names)
        self.control = Keep(keep, begin=begin + 0.1, end=0.7, hurry=2.0, least=4.0)  # it never hurries
        device = next(task.model.parameters()).device
        # (N,) 0.0 for those that must be kept: they are never shrunk
        self.free = torch.tensor([float(name not in task.wish.must_keep) for name in names], device=device)
        self.penalty = torch.tensor(float(self.fixed or 0.0), device=device)
        self.begun = False
        self.unit = torch.zeros((), device=device)  # mean length when it begins
        self.recent, self.overall = (torch.zeros(len(names), device=device) for _ in range(2))
        self.every = max(1, task.steps // RECORDS)
        self.history: list[dict[str, Any]] = []

    @abstractmethod
    def norms(self) -> Tensor:
        """Return the length of every group (N,); 0.0 where it is gone."""

    @abstractmethod
    def shrink(self, state: State) -> None:
        """Take the proximal step of λ."""

    @abstractmethod
    def farthest(self, state: State) -> Tensor:
        """Return the λ that would bring each group to zero in one step (N,), were there no gradient."""

    def within_step(self, state: State) -> None:
        """Shrink, once it has begun."""
        if self.begun:
            self.shrink(state)

    def after_step(self, state: State) -> None:
        """Move λ, and write down where the search stands."""
        norms = self.norms()
        self.overall += norms / self.steps
        if state.step > LAST * self.steps:
            self.recent += norms / (self.steps - math.floor(LAST * self.steps))
        if state.step >= self.first:
            self.move(state, norms)
        if state.step % self.every == 0 or state.step == self.steps:
            loss = float("nan") if state.loss is None else float(state.loss.detach())
            found = {"step": state.step, "loss": loss, "alive": self.alive(norms), "penalty": float(self.penalty)}
            self.history.append(found)

    def alive(self, norms: Tensor) -> int:
        """Return how many groups are clear of zero."""
        return int((norms > CLEAR * self.unit).sum())

    def move(self, state: State, norms: Tensor) -> None:
        """Raise λ where too many are alive, lower it where too few are."""
        if not self.begun:
            self.begun = state.recapture = True
            self.unit.copy_(norms.mean())
            if self.fixed is None:
                self.penalty.copy_(self.farthest(state).mean() / (TRAVEL * self.steps))
        elif self.fixed is None:
            time, total, alive = state.step / self.steps, len(self.names), self.alive(norms)
            few = alive < math.floor(self.control.target(time, total))
            grown = -self.control.gain * self.control.most if few else self.control.growth(time, total, alive)
            self.penalty.mul_(math.exp(grown / self.steps))

    def answer(self, task: Task, method: str, effort: Effort) -> Selection:
        """Return the K longest groups, or, where λ was given, those alive."""
        found = (self.recent + FAINT * self.overall).tolist()
        alive = (self.recent > CLEAR * self.unit).tolist()
        own = [name for name, clear in zip(self.names, alive, strict=True) if clear]
        scores = dict(zip(self.names, found, strict=True))
        made = {"steps": self.steps, "penalty": float(self.penalty), **effort.told()}
        return replace(cut(task, method, scores, own, **made), history=tuple(self.history))

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill; the weights are the model's."""
        numbers = {name: getattr(self, name).clone() for name in SAVED}
        return {**numbers, "begun": self.begun, "history": list(self.history)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        for name in SAVED:
            getattr(self, name).copy_(values[name])
        self.begun, self.history = values["begun"], list(values["history"])
