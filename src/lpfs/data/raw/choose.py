"""Which clock a source gets: by a column, by file, by row order or by chance, within a split or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from lpfs.data.raw.clock import Clock, ColumnClock, FileClock, OrderClock
from lpfs.data.raw.source import Chunk, Source
from lpfs.data.raw.split import ROLES, SplitClock, only, read_roles

Progress = Callable[[Iterator[Chunk]], Iterator[Chunk]]


def make_clock(
    source: Source,
    *,
    time: str | None,
    format: str | None,
    parts: int | str,
    ordered: bool,
    progress: Progress,
    split: str | None = None,
    shuffle: int | None = None,
) -> Clock:
    """Return the clock of a source; reads the time and split columns, or counts the rows, where it has to.

    ``shuffle`` is the seed with which rows are dealt to the parts; None: they are cut in row order.
    """
    if split is not None:
        return split_clock(source, split, time, format, parts, ordered, progress, shuffle)
    if time is not None:
        clock = ColumnClock(time, format)
        for chunk in progress(source.chunks([time])):
            clock.look(chunk, ordered=ordered)
        clock.settle()
        return clock
    if parts == "files":
        return FileClock(source)
    rows = source.rows()
    if rows is None:
        rows = sum(chunk.frame.height for chunk in progress(source.chunks(source.names[:1])))
    return OrderClock(rows, int(parts), shuffle)


def split_clock(
    source: Source,
    split: str,
    time: str | None,
    format: str | None,
    parts: int | str,
    ordered: bool,
    progress: Progress,
    shuffle: int | None,
) -> SplitClock:
    """Return the clock of a source with a split column; time and row order are those of the training rows."""
    timed = None if time is None else ColumnClock(time, format)
    counts: Counter[str] = Counter()
    for chunk in progress(source.chunks([split] if time is None else [split, time])):
        if not chunk.frame.height:
            continue
        roles = read_roles(chunk, split)
        for index, role in enumerate(ROLES):
            counts[role] += int(np.count_nonzero(roles == index))
        rows = np.flatnonzero(roles == 0)
        if timed is not None and len(rows):
            timed.look(only(chunk, rows), ordered=ordered)
    if timed is None:
        return SplitClock(split, OrderClock(counts["train"], int(parts), shuffle), counts)
    timed.settle()
    return SplitClock(split, timed, counts)
