"""Where the rows of an order come from: the disk, memory, or a window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lpfs.data.batches.order import Windows, random
from lpfs.data.reader import Reader
from lpfs.data.batch import Rows, join

Span = tuple[int, int]
NEAR = 8192  # rows: parts shorter than this are cheaper to cut from one long read than to read one by one


class Gather(Protocol):
    """Fetch positions of an order as rows."""

    def rows(self, spans: Sequence[Span]) -> Rows:
        """Return the rows at these positions, which never go backwards from call to call."""
        ...


class InTime:
    """Rows as they lie on the disk."""

    def __init__(self, reader: Reader, start: int) -> None:
        self.reader, self.start = reader, start

    def rows(self, spans: Sequence[Span]) -> Rows:
        """Read the spans, or everything around them when that is quicker."""
        moved = [(self.start + first, self.start + stop) for first, stop in spans]
        first, last = moved[0][0], moved[-1][1]
        if len(moved) == 1 or moved[0][1] - first >= NEAR:
            return self.reader.read(moved)
        around = self.reader.read([(first, last)])
        if sum(stop - start for start, stop in moved) == len(around):
            return around
        return join([around.cut(start - first, stop - first) for start, stop in moved])


class Uniform:
    """Rows held in memory, in an order drawn anew for each pass."""

    def __init__(self, resident: Rows, seed: int, epoch: int) -> None:
        self.resident = resident
        self.sequence = random(seed, epoch).permutation(len(resident))

    def rows(self, spans: Sequence[Span]) -> Rows:
        """Pick the rows from memory."""
        return self.resident.take(np.concatenate([self.sequence[first:stop] for first, stop in spans]))


class Windowed:
    """Rows of a window of shuffled blocks; the window moves on when it is used up."""

    def __init__(self, reader: Reader, start: int, windows: Windows) -> None:
        self.reader, self.start, self.windows = reader, start, windows
        self.starts = windows.starts()
        self._number = -1
        self._rows: Rows | None = None

    def rows(self, spans: Sequence[Span]) -> Rows:
        """Pick the rows from their windows."""
        parts = []
        first, last = spans[0][0], spans[-1][1]
        for number in range(bisect_right(self.starts, first) - 1, len(self.starts) - 1):
            begin, end = self.starts[number], self.starts[number + 1]
            if begin >= last:
                break
            here = [(max(a, begin) - begin, min(b, end) - begin) for a, b in spans if a < end and b > begin]
            if here:
                window = self._window(number)
                index = np.concatenate([self._sequence[a:b] for a, b in here])
                parts.append(window.take(index))
        return join(parts) if parts else self.reader.read([])

    def _window(self, number: int) -> Rows:
        if self._rows is None or number != self._number:
            ranges = [(self.start + a, self.start + b) for a, b in self.windows.window(number)]
            self._rows = self.reader.read(ranges, self._rows)  # what was taken from the old one is a copy
            self._sequence = self.windows.shuffle(number, len(self._rows))
            self._number = number
        return self._rows
