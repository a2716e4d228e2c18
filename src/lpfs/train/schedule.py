"""Learning rates by name: a factor on the starting rate, a pure function of the training step.

A schedule has no state of its own, so there is nothing to save but the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from lpfs.errors import InputError

Name = Literal["constant", "rise", "warmup", "linear", "cosine"]
Factor: TypeAlias = Callable[[int], float]
NAMES: tuple[str, ...] = ("constant", "rise", "warmup", "linear", "cosine")


def make_schedule(name: Name, over: int | None, rise: float = 10.0) -> Factor:
    """Return the factor on the learning rate at a step; ``over`` is the number of steps it moves for.

    - ``constant``: 1.
    - ``rise``: from 1 exponentially to ``rise``, then constant: the paper's industrial rate, .01 to .1.
    - ``warmup``: linearly from 1/over to 1, then constant.
    - ``linear``, ``cosine``: from 1 down to 0.

    >>> [round(0.01 * make_schedule("rise", 100)(step), 4) for step in (0, 50, 100, 1000)]
    [0.01, 0.0316, 0.1, 0.1]
    """
    if name not in NAMES:
        raise InputError(f"no schedule {name!r}; there are {', '.join(NAMES)}")
    if name == "constant":
        return lambda step: 1.0
    if over is None or over < 1:
        raise InputError(f"schedule {name!r} must know over how many steps it moves: give schedule_steps")
    if name == "rise":
        power = math.log(rise)
        return lambda step: math.exp(power * min(1.0, step / over))
    if name == "warmup":
        return lambda step: min(1.0, (step + 1) / over)
    if name == "linear":
        return lambda step: max(0.0, 1 - step / over)
    return lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / over))
