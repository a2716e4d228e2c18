"""Which clock a source gets: by a column, by file, by row order or by chance, within a split or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lpfs.data.days import Clock, ColumnClock, FileClock, OrderClock
from lpfs.data.sources.base import Chunk, Source
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
    if time is None and split is None and parts == "files":
        return FileClock(source)
    timed = None if time is None else ColumnClock(time, format)
    known = source.rows() if timed is None and split is None else None
    if known is not None:
        return OrderClock(known, int(parts), shuffle)
    chunks = progress(source.chunks(telling_columns(source, split, time)))
    return settled(split, timed, survey(chunks, split, timed, ordered=ordered), parts, shuffle)


def telling_columns(source: Source, split: str | None, time: str | None) -> list[str]:
    """Return the columns that tell the day of a row; where none does, one to count the rows by."""
    return [name for name in (split, time) if name is not None] or list(source.names[:1])


def survey(
    chunks: Iterable[Chunk], split: str | None, timed: ColumnClock | None, *, ordered: bool = False
) -> Counter[str]:
    """Return how many rows each part of a split has, all of them ``train`` where there is none.

    ``timed`` takes note of the days of the training rows.
    """
    counts: Counter[str] = Counter()
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        if split is not None:
            roles = read_roles(chunk, split)
            for index, role in enumerate(ROLES):
                counts[role] += int(np.count_nonzero(roles == index))
            chunk = only(chunk, np.flatnonzero(roles == 0))
        else:
            counts["train"] += chunk.frame.height
        if timed is not None and chunk.frame.height:
            timed.look(chunk, ordered=ordered)
    return counts


def settled(
    split: str | None, timed: ColumnClock | None, counts: Counter[str], parts: int | str, shuffle: int | None
) -> Clock:
    """Return the clock of a source that was surveyed; time and row order are those of the training rows."""
    train: Clock
    if timed is None:
        train = OrderClock(counts["train"], int(parts), shuffle)
    else:
        timed.settle()
        train = timed
    return train if split is None else SplitClock(split, train, counts)
