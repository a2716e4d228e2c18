"""CrossPlan: which products of embeddings are written to which slots, as all kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PartRange:
    """Consecutive parts: embeddings ``second``, ``second`` + 1, …, multiplied by ``first`` unless it is None."""

    first: int | None
    second: int
    part: int  # index of the first part
    slot: int  # slot of the first part
    count: int


@dataclass(frozen=True)
class CrossPlan:
    """Parts (one embedding, or two that are multiplied), their slots in the result, and their ranges."""

    parts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]  # slot of each part
    dim: int
    slots: int
    ranges: tuple[PartRange, ...]

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Return arrays: first factor, second factor, slot, whether there is no first factor; and D."""
        first = [0 if len(part) == 1 else part[0] for part in self.parts]
        second = [part[-1] for part in self.parts]
        indices = (np.array(values, np.uint64) for values in (first, second, self.places))
        return (*indices, np.array([len(part) == 1 for part in self.parts], bool), np.uint64(self.dim))

    @classmethod
    def build(cls, parts: Sequence[tuple[int, ...]], places: Sequence[int], dim: int, slots: int) -> CrossPlan:
        """Return the plan with its ranges.

        >>> [r.count for r in CrossPlan.build([(0,), (1,), (0, 1), (0, 2), (1, 2)], range(5), 4, 5).ranges]
        [2, 2, 1]
        """
        ranges: list[PartRange] = []
        for number, (part, slot) in enumerate(zip(parts, places, strict=True)):
            first, second = (None, part[0]) if len(part) == 1 else part
            last = ranges[-1] if ranges else None
            if last and (last.first, last.second + last.count, last.slot + last.count) == (first, second, slot):
                ranges[-1] = replace(last, count=last.count + 1)
            else:
                ranges.append(PartRange(first, second, number, slot, 1))
        return cls(tuple(parts), tuple(places), dim, slots, tuple(ranges))
