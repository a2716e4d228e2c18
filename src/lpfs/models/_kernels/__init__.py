"""Plan: which products go where, as both kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PartRange:
    """Parts side by side: embeddings ``second``, ``second`` + 1, …, each times ``first`` if there is one."""

    first: int | None
    second: int
    part: int
    place: int
    count: int


@dataclass(frozen=True)
class CrossPlan:
    """Parts, the places in the result they go to, and the runs they form."""

    parts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    dim: int
    slots: int
    runs: tuple[PartRange, ...]

    @property
    def unused_slots(self) -> bool:
        """Whether some places get no part."""
        return len(self.parts) < self.slots

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The parts as arrays: first and second factor, place, whether the second is alone; and D."""
        first = [0 if len(part) == 1 else part[0] for part in self.parts]
        numbers = [np.array(each, np.uint64) for each in (first, [part[-1] for part in self.parts], self.places)]
        return (*numbers, np.array([len(part) == 1 for part in self.parts], bool), np.uint64(self.dim))

    @classmethod
    def build(cls, parts: Sequence[tuple[int, ...]], places: Sequence[int], dim: int, slots: int) -> CrossPlan:
        """Find the runs.

        >>> [run.count for run in Plan.of([(0,), (1,), (0, 1), (0, 2), (1, 2)], range(5), 4, 5).runs]
        [2, 2, 1]
        """
        runs: list[PartRange] = []
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            first, second = (None, part[0]) if len(part) == 1 else part
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.first == first
                and last.second + last.count == second
                and last.place + last.count == place
            ):
                runs[-1] = PartRange(first, last.second, last.part, last.place, last.count + 1)
            else:
                runs.append(PartRange(first, second, number, place, 1))
        return cls(tuple(parts), tuple(places), dim, slots, tuple(runs))
