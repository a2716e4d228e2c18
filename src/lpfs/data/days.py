"""Which day each row of a log belongs to: by a time column, by file, by row order or at random, within a split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.hashing import shuffled_positions
from lpfs.data.parsing import SPLIT_WORDS, cast_column, detect_time_format, read_days, to_python_list, value_error
from lpfs.data.sources.base import Chunk, Source
from lpfs.errors import DataError

MAX_DAYS = 4000  # days of a time column
MAX_QUOTED = 6  # values listed in an error message
ROLES = ("train", "valid", "test")
Rows = npt.NDArray[np.int64]
DayPart = tuple[int, Rows | None]  # a day and its rows of a chunk; None: all rows
Progress = Callable[[Iterator[Chunk]], Iterator[Chunk]]


class DayAssigner(ABC):
    """Assigns rows to days."""

    days: list[str]  # names, in time order
    column: str | None = None  # column that determines the day, if any
    roles: dict[str, list[str]] | None = None  # days of each part of a split, if there is one

    @abstractmethod
    def assign(self, chunk: Chunk) -> list[DayPart]:
        """Return the days of a chunk in time order, each with its rows. Chunks must come in order."""

    def start_at(self, row: int = 0) -> None:  # noqa: B027
        """Prepare for another pass that starts at a row; does nothing where days do not depend on row numbers."""

    def files(self, days: set[int]) -> list[int] | None:
        """Return the files that hold these days; None if unknown."""
        return None


class DayByFile(DayAssigner):
    """One day per file."""

    def __init__(self, source: Source) -> None:
        stems = [Path(file).name.split(".")[0] or Path(file).name for file in source.files]
        if len(set(stems)) < len(stems):
            stems = [f"{index} {stem}" for index, stem in enumerate(stems)]
        self.days = stems

    def assign(self, chunk: Chunk) -> list[DayPart]:
        return [(chunk.file, None)]

    def files(self, days: set[int]) -> list[int] | None:
        return sorted(days)


class DayByOrder(DayAssigner):
    """The row order split into equal parts; with a seed, rows are assigned to equal parts at random."""

    def __init__(self, rows: int, parts: int, seed: int | None = None) -> None:
        parts = min(parts, rows)
        width = len(str(parts - 1))
        self.days = [f"part_{index:0{width}d}" for index in range(parts)]
        self._starts = np.array([index * rows // parts for index in range(parts)])
        self._rows, self._seed, self._row = rows, seed, 0

    def start_at(self, row: int = 0) -> None:
        self._row = row

    def assign(self, chunk: Chunk) -> list[DayPart]:
        start, stop = self._row, self._row + chunk.frame.height
        if stop > self._rows:
            raise _source_changed_error(chunk)
        self._row = stop
        positions: Rows = np.arange(start, stop)
        if self._seed is not None:
            positions = shuffled_positions(positions, self._rows, self._seed).astype(np.int64)
        parts = np.searchsorted(self._starts, positions, side="right") - 1
        order = np.argsort(parts, kind="stable")  # keeps the row order within a part
        days, firsts = np.unique(parts[order], return_index=True)
        if len(days) == 1:
            return [(int(days[0]), None)]
        return [(int(day), rows) for day, rows in zip(days, np.split(order, firsts[1:]), strict=True)]


class DayByColumn(DayAssigner):
    """A column of days, dates or timestamps."""

    def __init__(self, column: str, format: str | None) -> None:
        self.column, self.format, self.days = column, format, []
        self._index: dict[Any, int] = {}
        self._keys: dict[Any, None] = {}
        self._last: pl.Series | None = None  # the time of the last row
        self._detected: str | None = None

    def copy_empty(self) -> DayByColumn:
        """Return an assigner with the same time format that has seen no day."""
        copy = DayByColumn(self.column or "", self.format)
        copy._detected = self._detected
        return copy

    def scan(self, chunk: Chunk, *, ordered: bool) -> None:
        """Record the days of a chunk; with ``ordered``, raise DataError if time goes backwards."""
        days, order = self._read(chunk)
        self.add_days(to_python_list(days.unique(maintain_order=True)))
        if ordered:
            self._check_order(chunk, order)

    def add_days(self, days: Iterable[Any]) -> None:
        """Record days, in order of appearance."""
        for day in days:
            self._keys.setdefault(day)
        if len(self._keys) > MAX_DAYS:
            advice = "is it the right time column? give time_format if it is"
            raise DataError(f"column {self.column!r}: more than {MAX_DAYS} days; {advice}")

    def seen(self) -> list[Any]:
        """Return the recorded days, in order of appearance."""
        return list(self._keys)

    def finalize(self) -> None:
        """Sort the days: dates and numbers by value, train before test, other names in order of appearance."""
        keys = list(self._keys)
        if self._detected != "name":
            keys.sort()
        elif all(key.lower() in SPLIT_WORDS for key in keys):
            keys.sort(key=lambda key: SPLIT_WORDS[key.lower()])
        self._index = {key: index for index, key in enumerate(keys)}
        self.days = [str(key) for key in keys]

    def assign(self, chunk: Chunk) -> list[DayPart]:
        days, _ = self._read(chunk)
        unique = to_python_list(days.unique())
        known = sorted((self._index[day], day) for day in unique if day in self._index)
        if len(known) != len(unique):
            raise _source_changed_error(chunk)
        if len(known) == 1:
            return [(known[0][0], None)]
        return [(index, np.flatnonzero((days == day).to_numpy())) for index, day in known]

    def _check_order(self, chunk: Chunk, order: pl.Series) -> None:
        before_first = order.head(1) if self._last is None else self._last.cast(order.dtype)
        previous = pl.concat([before_first, order.head(len(order) - 1)])
        self._last = order.tail(1)
        backwards = order < previous
        if backwards.any():
            row = int(backwards.arg_max() or 0)
            raise DataError(
                f"{chunk.locate(row)}: column {self.column!r}: time goes backwards, {order[row]!r} after "
                f"{previous[row]!r}; sort the rows, or leave ordered out"
            )

    def _read(self, chunk: Chunk) -> tuple[pl.Series, pl.Series]:
        """Return the day of each row, and a column that sorts the rows."""
        values = chunk.frame[self.column]  # type: ignore[index]
        if values.null_count():
            row = int(values.is_null().arg_max() or 0)
            raise DataError(f"{chunk.locate(row)}: column {self.column!r}: the time is missing; fill it in")
        dtype = values.dtype
        if dtype.is_nested() or dtype in (pl.Binary, pl.Object, pl.Time, pl.Duration):
            raise DataError(
                f"column {values.name!r}: {dtype} cannot be a time; give a column of dates, timestamps or day numbers"
            )
        if self._detected is None:
            is_date = dtype == pl.Date or isinstance(dtype, pl.Datetime)
            self._detected = "date" if is_date else self.format or detect_time_format(values)
        days, order = read_days(values, self._detected)
        if days.null_count():
            problem = f"cannot be read as a time ({self._detected}); give time_format, for example '%y%m%d%H'"
            raise value_error(values, days.is_null(), chunk.locate, problem)
        return days, order


class DayBySplit(DayAssigner):
    """Training rows by the assigner ``train``, followed by one day ``valid`` and one day ``test`` if they have rows.

    ``column`` holds the role of each row, ``counts`` the number of rows of each role.
    """

    def __init__(self, column: str, train: DayAssigner, counts: dict[str, int]) -> None:
        self.column, self._train = column, train
        holdout = [role for role in ROLES[1:] if counts[role]]
        duplicates = sorted(set(holdout) & set(train.days))
        if duplicates:
            both = f"column {train.column!r} and the split column {column!r} both name a day {duplicates[0]!r}"
            raise DataError(f"{both}; give only one of them")
        self.days = [*train.days, *holdout]
        self.roles = {"train": list(train.days)} | {role: [role] if role in holdout else [] for role in ROLES[1:]}

    def start_at(self, row: int = 0) -> None:
        self._train.start_at(row)  # counts training rows only

    def assign(self, chunk: Chunk) -> list[DayPart]:
        roles = read_roles(chunk, self.column or "")
        parts: list[DayPart] = []
        train_rows = np.flatnonzero(roles == 0)
        if len(train_rows):
            for day, rows in self._train.assign(chunk.take(train_rows)):
                parts.append((day, train_rows if rows is None else train_rows[rows]))
        for role in (1, 2):
            role_rows = np.flatnonzero(roles == role)
            if len(role_rows):
                parts.append((self.days.index(ROLES[role]), role_rows))
        return parts


def _source_changed_error(chunk: Chunk) -> DataError:
    return DataError(f"{chunk.locate(0)}: the source changed while it was read; prepare it again")


def read_roles(chunk: Chunk, column: str) -> Rows:
    """Return 0 for a training row, 1 for validation, 2 for test; raise DataError for any other value."""
    values = chunk.frame[column]
    if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {column!r}: {values.dtype} cannot name a split")
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{chunk.locate(row)}: the split column {column!r} is missing; write train, valid or test")
    names = cast_column(values, pl.String)
    lower = names.str.strip_chars().str.to_lowercase()
    roles = lower.replace_strict(SPLIT_WORDS, default=None, return_dtype=pl.Int64)
    if roles.null_count():
        row, words = int(roles.is_null().arg_max() or 0), names.unique(maintain_order=True)
        listed = ", ".join(f"{word!r:.60}" for word in words.head(MAX_QUOTED)) + " …" * (len(words) > MAX_QUOTED)
        allowed = ", ".join(SPLIT_WORDS)
        raise DataError(f"{chunk.locate(row)}: the split column {column!r} holds {listed}; allowed are {allowed}")
    return np.asarray(roles, np.int64)


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
    """Return the day assigner of a source; reads the time and split columns, or counts the rows, if necessary.

    ``shuffle`` is the seed of a random assignment of rows to parts; None: parts in row order.
    """
    if time is None and split is None and parts == "files":
        return DayByFile(source)
    by_time = None if time is None else DayByColumn(time, format)
    rows = source.rows() if by_time is None and split is None else None
    if rows is not None:
        return DayByOrder(rows, int(parts), shuffle)
    chunks = progress(source.chunks(day_columns(source, split, time)))
    counts = count_roles(chunks, split, by_time, ordered=ordered)
    return day_assigner_from_counts(split, by_time, counts, parts, shuffle)


def day_columns(source: Source, split: str | None, time: str | None) -> list[str]:
    """Return the columns that determine the day of a row; if there is none, one column to count the rows."""
    return [name for name in (split, time) if name is not None] or list(source.names[:1])


def count_roles(
    chunks: Iterable[Chunk], split: str | None, by_time: DayByColumn | None, *, ordered: bool = False
) -> Counter[str]:
    """Return the number of rows of each role, all of them ``train`` without a split column.

    ``by_time`` records the days of the training rows.
    """
    counts: Counter[str] = Counter()
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        if split is not None:
            roles = read_roles(chunk, split)
            for index in (1, 2):
                counts[ROLES[index]] += int(np.count_nonzero(roles == index))
            chunk = chunk.take(np.flatnonzero(roles == 0))
        counts["train"] += chunk.frame.height
        if by_time is not None and chunk.frame.height:
            by_time.scan(chunk, ordered=ordered)
    return counts


def day_assigner_from_counts(
    split: str | None, by_time: DayByColumn | None, counts: Counter[str], parts: int | str, shuffle: int | None
) -> DayAssigner:
    """Return the day assigner of a scanned source; time and row order are those of the training rows."""
    if by_time is not None:
        by_time.finalize()
    train = by_time or DayByOrder(counts["train"], int(parts), shuffle)
    return train if split is None else DayBySplit(split, train, counts)
