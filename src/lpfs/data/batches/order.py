"""In which order rows come, and which of them are this rank's: pure functions of positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Order = Literal["time", "uniform", "windowed"]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """A pass over ``rows`` rows cut into global steps of ``batch_size`` rows for each of ``world`` ranks.

    Step k covers positions [k·B·W, (k+1)·B·W) of the order, or [k·B, (k+1)·B) where the ranks share the batch
    (``together``); rank r has the r-th of W equal parts of it, so the ranks see the same time at the same step.
    The rows that are left at the end are dealt out evenly; when they are fewer than the ranks, the step before
    gives some of its own, so that no rank gets an empty batch (unless there are fewer rows than ranks, or
    batches of one row). Every rank has the same number of batches.

    >>> [list(Steps(11, 2, world=2).spans(rank)) for rank in (0, 1)]
    [[(0, 2), (4, 6), (8, 9)], [(2, 4), (6, 8), (9, 11)]]
    """

    rows: int
    batch_size: int
    world: int = 1
    drop_last: bool = False
    together: bool = False

    @property
    def size(self) -> int:
        """Rows of all ranks in a step."""
        return self.batch_size if self.together else self.batch_size * self.world

    def bounds(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield first and end position of each global step from position ``start``."""
        size = self.size
        while start < self.rows:
            left = self.rows - start
            if left < size and self.drop_last:
                return
            spare = left - size
            if 0 < spare < self.world and not self.drop_last and size > self.world:
                stop = self.rows - self.world
            else:
                stop = start + min(left, size)
            yield start, stop
            start = stop

    def spans(self, rank: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield first and end position of each batch of one rank."""
        for first, stop in self.bounds(start):
            yield share(first, stop, rank, self.world)

    def __len__(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)


def share(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    """Return the part of [start, stop) that belongs to one rank; parts differ by one row at most."""
    rows = stop - start
    return start + rows * rank // world, start + rows * (rank + 1) // world


def random(seed: int, epoch: int, *more: int) -> np.random.Generator:
    """Return the random numbers of one purpose, the same on every machine."""
    return np.random.default_rng([seed, epoch, *more])


@dataclass(frozen=True)
class Windows:
    """A shuffle that needs only a window in memory.

    The rows are cut into blocks of neighbours, the blocks are shuffled, and a window of several blocks at a
    time is shuffled row by row. Every row comes exactly once.
    """

    rows: int
    block: int
    blocks: int  # in a window
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        count = -(-self.rows // self.block)
        object.__setattr__(self, "_sequence", random(self.seed, self.epoch).permutation(count))

    def window(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of rows that a window holds."""
        sequence: Index = self._sequence  # type: ignore[attr-defined]
        chosen = sequence[number * self.blocks : (number + 1) * self.blocks].tolist()
        return [(at * self.block, min((at + 1) * self.block, self.rows)) for at in chosen]

    def shuffle(self, number: int, rows: int) -> Index:
        """Return the order of the rows inside a window."""
        return random(self.seed, self.epoch, 1 + number).permutation(rows)

    def starts(self) -> list[int]:
        """Return the position in the order where each window starts, and the end."""
        count = -(-self.rows // (self.block * self.blocks))
        sizes = [sum(stop - start for start, stop in self.window(number)) for number in range(count)]
        return [0, *np.cumsum(sizes).tolist()]
