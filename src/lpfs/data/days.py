"""Which day each row belongs to: a column, the file, or its place in the row order.

Days of a log that says itself which rows are for training: those in their days, then valid, then test.

Which clock a source gets: by a column, by file, by row order or by chance, within a split or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.hashing import shuffled_positions
from lpfs.data.parsing import SPLIT_WORDS, cast_column, detect_time_format, read_days, to_python_list
from lpfs.data.sources.base import Chunk, Source
from lpfs.errors import DataError

MOST_DAYS = 4000
Rows = npt.NDArray[np.int64]
Part = tuple[int, Rows | None]  # a day and its rows of a chunk; None: all of them


class DayAssigner(ABC):
    """Assigns rows to days; ``days`` are their names in time order, ``roles`` those of each part of a split."""

    days: list[str]
    column: str | None = None
    roles: dict[str, list[str]] | None = None

    @abstractmethod
    def assign(self, chunk: Chunk) -> list[Part]:
        """Return the days of a chunk in time order, each with its rows. Chunks come in order."""

    def start_at(self, row: int = 0) -> None:  # noqa: B027
        """Get ready to go through the rows once more, from a row on; most clocks always are."""

    def files(self, days: set[int]) -> list[int] | None:
        """Return the files that hold these days, when that is known."""
        return None


class DayByFile(DayAssigner):
    """One day a file."""

    def __init__(self, source: Source) -> None:
        stems = [Path(file).name.split(".")[0] or Path(file).name for file in source.files]
        if len(set(stems)) < len(stems):
            stems = [f"{index} {stem}" for index, stem in enumerate(stems)]
        self.days = stems

    def assign(self, chunk: Chunk) -> list[Part]:
        """All rows of a file are of its day."""
        return [(chunk.file, None)]

    def files(self, days: set[int]) -> list[int] | None:
        """Return the files: a day is a file."""
        return sorted(days)


class DayByOrder(DayAssigner):
    """The row order cut into equal parts; with a seed, rows dealt to equal parts at random."""

    def __init__(self, rows: int, parts: int, seed: int | None = None) -> None:
        parts = min(parts, rows)
        width = len(str(parts - 1))
        self.days = [f"part_{index:0{width}d}" for index in range(parts)]
        self._starts = np.array([index * rows // parts for index in range(parts)])
        self._rows, self._seed = rows, seed
        self._row = 0

    def start_at(self, row: int = 0) -> None:
        """Start at a row, the first one unless told otherwise."""
        self._row = row

    def assign(self, chunk: Chunk) -> list[Part]:
        """Cut a chunk where a part ends, or deal its rows."""
        begin, end = self._row, self._row + chunk.frame.height
        if end > self._rows:
            raise _source_changed_error(chunk)
        self._row = end
        if self._seed is not None:
            return self._shuffled_days(begin, end, self._seed)
        first, last = np.searchsorted(self._starts, [begin, end - 1], side="right") - 1
        if first == last:
            return [(int(first), None)]
        bounds = [begin, *self._starts[first + 1 : last + 1].tolist(), end]
        cuts = pairwise(bounds)
        return [(int(first) + index, np.arange(a - begin, b - begin)) for index, (a, b) in enumerate(cuts)]

    def _shuffled_days(self, begin: int, end: int, seed: int) -> list[Part]:
        """Give every row the part in which its place in a random order of all rows lies."""
        places = shuffled_positions(np.arange(begin, end), self._rows, seed).astype(np.int64)
        parts = np.searchsorted(self._starts, places, side="right") - 1
        order = np.argsort(parts, kind="stable")  # rows of a part keep their order
        found, firsts = np.unique(parts[order], return_index=True)
        return [(int(part), rows) for part, rows in zip(found, np.split(order, firsts[1:]), strict=True)]


class DayByColumn(DayAssigner):
    """A column of days, dates or timestamps."""

    def __init__(self, column: str, format: str | None) -> None:
        self.column = column
        self.format = format
        self.days = []
        self._index: dict[Any, int] = {}
        self._keys: dict[Any, None] = {}
        self._last: Any = None
        self._how: str | None = None

    def copy_empty(self) -> DayByColumn:
        """Return a clock that reads times in the same way and has seen no day."""
        clock = DayByColumn(self.column or "", self.format)
        clock._how = self._how
        return clock

    def scan(self, chunk: Chunk, *, ordered: bool) -> None:
        """Take note of the days of a chunk, and of its order where that is promised."""
        days, order = self._read(chunk)
        self.add_days(to_python_list(days.unique(maintain_order=True)))
        if ordered:
            self._check_order(chunk, order)

    def add_days(self, days: Iterable[Any]) -> None:
        """Take note of days, in the order in which they come."""
        for day in days:
            self._keys.setdefault(day)
        if len(self._keys) > MOST_DAYS:
            raise DataError(
                f"column {self.column!r}: more than {MOST_DAYS} days; is it the right time column? "
                "give time_format if it is"
            )

    def seen(self) -> list[Any]:
        """Return the days that were taken note of, as they came."""
        return list(self._keys)

    def finalize(self) -> None:
        """Put the days in order: dates and numbers by value, train before test, other names as they come."""
        keys = list(self._keys)
        if self._how != "name":
            keys.sort()
        elif all(key.lower() in SPLIT_WORDS for key in keys):
            keys.sort(key=lambda key: SPLIT_WORDS[key.lower()])
        self._index = {key: index for index, key in enumerate(keys)}
        self.days = [str(key) for key in keys]

    def assign(self, chunk: Chunk) -> list[Part]:
        """Group the rows of a chunk by day, keeping their order."""
        days, _ = self._read(chunk)
        unique = to_python_list(days.unique())
        found = sorted((self._index[day], day) for day in unique if day in self._index)
        if len(found) != len(unique):
            raise _source_changed_error(chunk)
        if len(found) == 1:
            return [(found[0][0], None)]
        return [(index, np.flatnonzero((days == day).to_numpy())) for index, day in found]

    def _check_order(self, chunk: Chunk, order: pl.Series) -> None:
        if not len(order):
            return
        full = (
            order if self._last is None else pl.concat([pl.Series(order.name, [self._last], order.dtype), order])
        )
        back = (full.slice(1) < full.head(len(full) - 1)).to_numpy()
        self._last = order[-1]
        if back.any():
            at = int(back.argmax())
            row = at + (len(order) == len(full))
            raise DataError(
                f"{chunk.locate(row)}: column {self.column!r}: time goes backwards, {order[row]!r} after "
                f"{full[at]!r}; sort the rows, or do not promise order"
            )

    def _read(self, chunk: Chunk) -> tuple[pl.Series, pl.Series]:
        """Return the day of each row, and what the rows are ordered by."""
        values = chunk.frame[self.column]  # type: ignore[index]
        if values.null_count():
            row = int(values.is_null().arg_max() or 0)
            raise DataError(f"{chunk.locate(row)}: column {self.column!r}: the time is missing; fill it in")
        dtype = values.dtype
        if dtype.is_nested() or dtype in (pl.Binary, pl.Object, pl.Time, pl.Duration):
            raise DataError(f"column {values.name!r}: {dtype} cannot be a time")
        if self._how is None:
            dated = dtype == pl.Date or isinstance(dtype, pl.Datetime)
            self._how = "date" if dated else self.format or detect_time_format(values)
        days, order = read_days(values, self._how)
        if days.null_count():
            row = int(days.is_null().arg_max() or 0)
            raise DataError(
                f"{chunk.locate(row)}: column {self.column!r}: {values[row]!r:.60} cannot be read as a time "
                f"({self._how}); give time_format, for example '%y%m%d%H'"
            )
        return days, order


def _source_changed_error(chunk: Chunk) -> DataError:
    """Build the error for rows that were not there, or not so, when the days were found."""
    return DataError(f"{chunk.locate(0)}: the source changed while it was read; prepare it again")


ROLES = ("train", "valid", "test")
MAX_QUOTED = 6  # values that a message lists


class DayBySplit(DayAssigner):
    """The training rows by a clock of their own, then one day ``valid`` and one day ``test`` if there are such.

    Args:
        column: names the role of each row.
        train: the clock of the training rows; it sees no others.
        counts: how many rows each role has.

    """

    def __init__(self, column: str, train: DayAssigner, counts: dict[str, int]) -> None:
        self.column, self._train = column, train
        held_out = [role for role in ROLES[1:] if counts[role]]
        twice = sorted(set(held_out) & set(train.days))
        if twice:
            raise DataError(
                f"column {train.column!r} names a day {twice[0]!r}, as does the split column {column!r}; "
                "give only one of them"
            )
        self.days = [*train.days, *held_out]
        self.roles = {"train": list(train.days)} | {role: [role] if role in held_out else [] for role in ROLES[1:]}

    def start_at(self, row: int = 0) -> None:
        """Get ready to go through the rows once more; ``row`` counts training rows."""
        self._train.start_at(row)

    def assign(self, chunk: Chunk) -> list[Part]:
        """Let the clock of the training rows assign those, and put the others into their days."""
        roles = read_roles(chunk, self.column or "")
        parts: list[Part] = []
        rows = np.flatnonzero(roles == 0)
        if len(rows):
            own = self._train.assign(_take_rows(chunk, rows))
            parts = [(day, rows if some is None else rows[some]) for day, some in own]
        for role in (1, 2):
            rows = np.flatnonzero(roles == role)
            if len(rows):
                parts.append((self.days.index(ROLES[role]), rows))
        return parts


def _take_rows(chunk: Chunk, rows: Rows) -> Chunk:
    """Return some rows of a chunk."""
    return Chunk(chunk.frame[rows], chunk.file, lambda row: chunk.locate(int(rows[row])), chunk.consumed)


def read_roles(chunk: Chunk, column: str) -> Rows:
    """Return 0 for a row that is for training, 1 for validation, 2 for the test; or say what is written there."""
    values = chunk.frame[column]
    if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {column!r}: {values.dtype} cannot name a split")
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{chunk.locate(row)}: the split column {column!r} is missing; write train, valid or test")
    names = cast_column(values, pl.String).str.strip_chars().str.to_lowercase()
    roles = names.replace_strict(SPLIT_WORDS, default=None, return_dtype=pl.Int64)
    if roles.null_count():
        row = int(roles.is_null().arg_max() or 0)
        found = cast_column(values, pl.String).unique(maintain_order=True)
        listed = ", ".join(f"{name!r:.60}" for name in found.head(MAX_QUOTED)) + (
            " …" if len(found) > MAX_QUOTED else ""
        )
        raise DataError(
            f"{chunk.locate(row)}: the split column {column!r} holds {listed}; it must name the parts: "
            f"{', '.join(SPLIT_WORDS)}"
        )
    result: Rows = roles.to_numpy()
    return result


Progress = Callable[[Iterator[Chunk]], Iterator[Chunk]]


def make_day_assigner(
    source: Source,
    *,
    time: str | None,
    format: str | None,
    parts: int | str,
    ordered: bool,
    progress: Progress,
    split: str | None = None,
    shuffle: int | None = None,
) -> DayAssigner:
    """Return the clock of a source; reads the time and split columns, or counts the rows, where it has to.

    ``shuffle`` is the seed with which rows are dealt to the parts; None: they are cut in row order.
    """
    if time is None and split is None and parts == "files":
        return DayByFile(source)
    timed = None if time is None else DayByColumn(time, format)
    known = source.rows() if timed is None and split is None else None
    if known is not None:
        return DayByOrder(known, int(parts), shuffle)
    chunks = progress(source.chunks(day_columns(source, split, time)))
    return day_assigner_from_counts(
        split, timed, count_roles(chunks, split, timed, ordered=ordered), parts, shuffle
    )


def day_columns(source: Source, split: str | None, time: str | None) -> list[str]:
    """Return the columns that tell the day of a row; where none does, one to count the rows by."""
    return [name for name in (split, time) if name is not None] or list(source.names[:1])


def count_roles(
    chunks: Iterable[Chunk], split: str | None, timed: DayByColumn | None, *, ordered: bool = False
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
            chunk = _take_rows(chunk, np.flatnonzero(roles == 0))
        else:
            counts["train"] += chunk.frame.height
        if timed is not None and chunk.frame.height:
            timed.scan(chunk, ordered=ordered)
    return counts


def day_assigner_from_counts(
    split: str | None, timed: DayByColumn | None, counts: Counter[str], parts: int | str, shuffle: int | None
) -> DayAssigner:
    """Return the clock of a source that was surveyed; time and row order are those of the training rows."""
    train: DayAssigner
    if timed is None:
        train = DayByOrder(counts["train"], int(parts), shuffle)
    else:
        timed.finalize()
        train = timed
    return train if split is None else DayBySplit(split, train, counts)
