"""Schedules: ε and the gate learning rate as pure functions of the training step.

A schedule never moves by itself: ``Gates.step`` asks it once a training step, ``forward`` and evaluation never.
Both curves have the paper's form, start · decay^(step // every), held at a floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lpfs.errors import InputError
from lpfs.gates.functions import GateFunction

Preset = Literal["scaled", "terabyte", "industrial"]

# The search length at which the scaled schedule starts with the paper's learning rate itself. Longer searches
# start lower and shorter ones higher, so that Ση, the distance a gate can travel, is the same for all.
REFERENCE_STEPS = 10_000
# Floors of the scaled schedule: η ends at 5 % of its start, ε at 1e-4 (1e-3 of its start), as the paper's on its
# industrial log. Ten times lower, as on Terabyte, the last fields go when the barrier is high and chance decides.
EPSILON_RATIO = 1e-3
LR_RATIO = 0.05


@dataclass(frozen=True)
class Decay:
    """start · rate^(step // every), never below floor.

    >>> Decay(0.1, 0.5, every=10, floor=0.03)(25)
    0.03
    """

    start: float
    rate: float
    every: int = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start > 0):
            raise InputError(f"a schedule must start above 0, found {self.start!r}")
        if not 0 < self.rate <= 1:
            raise InputError(f"a decay rate must be in (0, 1], found {self.rate!r}")
        if self.every < 1:
            raise InputError(f"a schedule must move every 1 or more steps, found {self.every!r}")
        if not 0 <= self.floor <= self.start:
            raise InputError(f"a floor must be in [0, start], found {self.floor!r}")

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        return max(self.floor, self.start * math.exp((step // self.every) * math.log(self.rate)))


@dataclass(frozen=True)
class Schedule:
    """How ε and the gate learning rate move over a search, and how often the RMS rescale is refreshed."""

    epsilon: Decay
    lr: Decay
    refresh: int = 100

    def __post_init__(self) -> None:
        if self.epsilon.floor < 1e-12:
            raise InputError(f"ε needs a floor of at least 1e-12, or it ends at 0: found {self.epsilon.floor!r}")
        if self.refresh < 1:
            raise InputError(f"refresh must be at least 1, found {self.refresh!r}")

    def total_lr(self, steps: int) -> float:
        """Return Ση: how far a unit penalty can move a gate in this many steps.

        >>> Schedule(Decay(0.1, 1.0, floor=1e-5), Decay(0.5, 1.0)).total_lr(4)
        2.0
        """
        every = self.lr.every
        whole = sum(self.lr(step) for step in range(0, steps - steps % every, every)) * every
        return whole + (steps % every) * self.lr(steps)


def scaled(gate: GateFunction, steps: int, lr: float | None = None) -> Schedule:
    """Return the default schedule for a search of this many steps.

    Both fall exponentially over the search: ε to 1e-3 of its start, η to 5 % of its start, which is the paper's
    value times 10,000/steps. So Ση, and with it the meaning of λ, does not depend on how long the search is. An
    ``lr`` given by hand is taken as it is.
    """
    if steps < 1:
        raise InputError(f"a search needs at least one step, found steps={steps!r}")
    power = 1.0 if gate.square else 0.5
    ratio = EPSILON_RATIO**power
    start = gate.lr * REFERENCE_STEPS / steps if lr is None else lr
    return Schedule(
        epsilon=Decay(gate.epsilon, ratio ** (1 / steps), floor=gate.epsilon * ratio),
        lr=Decay(start, LR_RATIO ** (1 / steps), floor=start * LR_RATIO),
        refresh=max(1, min(100, steps // 600)),
    )


def terabyte(gate: GateFunction, lr: float | None = None) -> Schedule:
    """Return the paper's Terabyte schedule, in absolute steps.

    ε ·.9978 every 100 steps down to 1e-4 of its start (.1 to 1e-5); η .01 (LPFS++) or .005 (LPFS) ·.9991
    every 100 steps down to 5e-4.
    """
    return _absolute(gate, lr, rate=0.9978, every=100, ratio=1e-4)


def industrial(gate: GateFunction, lr: float | None = None) -> Schedule:
    """Return the paper's industrial schedule: ε ·.986 every 500 steps down to 1e-3 of its start (1e-4)."""
    return _absolute(gate, lr, rate=0.986, every=500, ratio=1e-3)


def _absolute(gate: GateFunction, lr: float | None, rate: float, every: int, ratio: float) -> Schedule:
    power = 1.0 if gate.square else 0.5
    start = gate.lr if lr is None else lr
    return Schedule(
        epsilon=Decay(gate.epsilon, rate**power, every, floor=gate.epsilon * ratio**power),
        lr=Decay(start, 0.9991, 100, floor=min(start, 5e-4)),
    )


def make_schedule(
    schedule: Preset | Schedule, gate: GateFunction, steps: int, lr: float | None = None
) -> Schedule:
    """Return a schedule by name: ``scaled`` to ``steps``, or one of the paper's; or the one given.

    >>> from lpfs.gates.functions import gate_function
    >>> make_schedule("terabyte", gate_function("lpfs++"), 1000).lr(100)
    0.009991
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule == "scaled":
        return scaled(gate, steps, lr)
    if schedule == "terabyte":
        return terabyte(gate, lr)
    if schedule == "industrial":
        return industrial(gate, lr)
    raise InputError(f"no schedule {schedule!r}; there are 'scaled', 'terabyte', 'industrial'")
