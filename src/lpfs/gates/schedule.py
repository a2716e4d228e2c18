"""Schedules: ε and the gate learning rate as pure functions of the training step.

``Gates.step`` applies a schedule once per training step; ``forward`` and evaluation never do. Both curves have the
paper's form, start · rate^(step // every), bounded below by a floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from lpfs.errors import InputError
from lpfs.gates.functions import GateFunction

Preset = Literal["scaled", "terabyte", "industrial"]

# Number of steps at which the scaled schedule starts with the paper's learning rate. Longer searches start lower
# and shorter ones higher, so that Ση, the distance that a gate can travel, does not depend on the length.
REFERENCE_STEPS = 10_000
# Floors of the scaled schedule: η ends at 5 % of its start and ε at 1e-3 of its start (1e-4), as in the paper's
# industrial experiment. With a floor ten times lower, as on Terabyte, noise decides which of the last fields stay.
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
            raise InputError(f"start of a Decay must be > 0, found {self.start!r}")
        if not 0 < self.rate <= 1:
            raise InputError(f"rate of a Decay must be in (0, 1], found {self.rate!r}")
        if self.every < 1:
            raise InputError(f"every of a Decay must be at least 1 step, found {self.every!r}")
        if not 0 <= self.floor <= self.start:
            raise InputError(f"floor of a Decay must be in [0, start], found {self.floor!r}")

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: NDArray[np.int64]) -> NDArray[np.float64]: ...

    def __call__(self, step: int | NDArray[np.int64]) -> float | NDArray[np.float64]:
        """Return the value at a step, or the values at an array of steps."""
        decayed = self.start * np.exp((step // self.every) * math.log(self.rate))
        values: NDArray[np.float64] = np.maximum(self.floor, decayed)
        return values if isinstance(step, np.ndarray) else float(values)


@dataclass(frozen=True)
class Schedule:
    """ε and the gate learning rate over a search, and the number of steps between updates of the rescale."""

    epsilon: Decay
    lr: Decay
    refresh: int = 100

    def __post_init__(self) -> None:
        if self.epsilon.floor < 1e-12:
            raise InputError(f"epsilon of a Schedule needs a floor >= 1e-12, found {self.epsilon.floor!r}")
        if self.refresh < 1:
            raise InputError(f"refresh must be at least 1, found {self.refresh!r}")

    def total_lr(self, steps: int) -> float:
        """Return Ση: how far a unit penalty can move a gate in this many steps.

        >>> Schedule(Decay(0.1, 1.0, floor=1e-5), Decay(0.5, 1.0)).total_lr(4)
        2.0
        """
        every = self.lr.every
        whole: float = sum(self.lr(np.arange(0, steps - steps % every, every)).tolist()) * every
        return whole + (steps % every) * self.lr(steps)


def scaled(gate: GateFunction, steps: int, lr: float | None = None) -> Schedule:
    """Return the default schedule for a search of this many steps.

    Both curves decrease exponentially over the search: ε to 1e-3 of its start, η to 5 % of its start, which is the
    paper's value times 10,000/steps. So Ση, and with it the meaning of λ, does not depend on the length of the
    search. An ``lr`` that is given is used as it is.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, found {steps!r}")
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


def make_schedule(schedule: Preset | Schedule, gate: GateFunction, steps: int, lr: float | None = None) -> Schedule:
    """Return a schedule by name: ``scaled`` to ``steps``, or one of the paper's. A Schedule is returned unchanged.

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
    raise InputError(f"unknown schedule {schedule!r}; use 'scaled', 'terabyte', 'industrial' or a Schedule")
