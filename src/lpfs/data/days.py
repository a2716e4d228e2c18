"""Which day each row belongs to: a column, the file, or its place in the row order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.raw.cast import as_list
from lpfs.data.raw.chance import shuffled
from lpfs.data.sources.base import Chunk, Source
from lpfs.data.raw.spelling import SPLITS
from lpfs.data.parsing import how_to_read, read_days
from lpfs.errors import DataError

MOST_DAYS = 4000
Rows = npt.NDArray[np.int64]
Part = tuple[int, Rows | None]  # a day and its rows of a chunk; None: all of them


class Clock(ABC):
    """Assigns rows to days; ``days`` are their names in time order, ``roles`` those of each part of a split."""

    days: list[str]
    column: str | None = None
    roles: dict[str, list[str]] | None = None

    @abstractmethod
    def assign(self, chunk: Chunk) -> list[Part]:
        """Return the days of a chunk in time order, each with its rows. Chunks come in order."""

    def begin(self, row: int = 0) -> None:  # noqa: B027
        """Get ready to go through the rows once more, from a row on; most clocks always are."""

    def files(self, days: set[int]) -> list[int] | None:
        """Return the files that hold these days, when that is known."""
        return None


class FileClock(Clock):
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


class OrderClock(Clock):
    """The row order cut into equal parts; with a seed, rows dealt to equal parts at random."""

    def __init__(self, rows: int, parts: int, seed: int | None = None) -> None:
        parts = min(parts, rows)
        width = len(str(parts - 1))
        self.days = [f"part_{index:0{width}d}" for index in range(parts)]
        self._starts = np.array([index * rows // parts for index in range(parts)])
        self._rows, self._seed = rows, seed
        self._row = 0

    def begin(self, row: int = 0) -> None:
        """Start at a row, the first one unless told otherwise."""
        self._row = row

    def assign(self, chunk: Chunk) -> list[Part]:
        """Cut a chunk where a part ends, or deal its rows."""
        begin, end = self._row, self._row + chunk.frame.height
        if end > self._rows:
            raise changed(chunk)
        self._row = end
        if self._seed is not None:
            return self._deal(begin, end, self._seed)
        first, last = np.searchsorted(self._starts, [begin, end - 1], side="right") - 1
        if first == last:
            return [(int(first), None)]
        bounds = [begin, *self._starts[first + 1 : last + 1].tolist(), end]
        cuts = pairwise(bounds)
        return [(int(first) + index, np.arange(a - begin, b - begin)) for index, (a, b) in enumerate(cuts)]

    def _deal(self, begin: int, end: int, seed: int) -> list[Part]:
        """Give every row the part in which its place in a random order of all rows lies."""
        places = shuffled(np.arange(begin, end), self._rows, seed).astype(np.int64)
        parts = np.searchsorted(self._starts, places, side="right") - 1
        order = np.argsort(parts, kind="stable")  # rows of a part keep their order
        found, firsts = np.unique(parts[order], return_index=True)
        return [(int(part), rows) for part, rows in zip(found, np.split(order, firsts[1:]), strict=True)]


class ColumnClock(Clock):
    """A column of days, dates or timestamps."""

    def __init__(self, column: str, format: str | None) -> None:
        self.column = column
        self.format = format
        self.days = []
        self._index: dict[Any, int] = {}
        self._keys: dict[Any, None] = {}
        self._last: Any = None
        self._how: str | None = None

    def fresh(self) -> ColumnClock:
        """Return a clock that reads times in the same way and has seen no day."""
        clock = ColumnClock(self.column or "", self.format)
        clock._how = self._how
        return clock

    def look(self, chunk: Chunk, *, ordered: bool) -> None:
        """Take note of the days of a chunk, and of its order where that is promised."""
        days, order = self._read(chunk)
        self.take(as_list(days.unique(maintain_order=True)))
        if ordered:
            self._check_order(chunk, order)

    def take(self, days: Iterable[Any]) -> None:
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

    def settle(self) -> None:
        """Put the days in order: dates and numbers by value, train before test, other names as they come."""
        keys = list(self._keys)
        if self._how != "name":
            keys.sort()
        elif all(key.lower() in SPLITS for key in keys):
            keys.sort(key=lambda key: SPLITS[key.lower()])
        self._index = {key: index for index, key in enumerate(keys)}
        self.days = [str(key) for key in keys]

    def assign(self, chunk: Chunk) -> list[Part]:
        """Group the rows of a chunk by day, keeping their order."""
        days, _ = self._read(chunk)
        unique = as_list(days.unique())
        found = sorted((self._index[day], day) for day in unique if day in self._index)
        if len(found) != len(unique):
            raise changed(chunk)
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
                f"{chunk.place(row)}: column {self.column!r}: time goes backwards, {order[row]!r} after "
                f"{full[at]!r}; sort the rows, or do not promise order"
            )

    def _read(self, chunk: Chunk) -> tuple[pl.Series, pl.Series]:
        """Return the day of each row, and what the rows are ordered by."""
        values = chunk.frame[self.column]  # type: ignore[index]
        if values.null_count():
            row = int(values.is_null().arg_max() or 0)
            raise DataError(f"{chunk.place(row)}: column {self.column!r}: the time is missing; fill it in")
        dtype = values.dtype
        if dtype.is_nested() or dtype in (pl.Binary, pl.Object, pl.Time, pl.Duration):
            raise DataError(f"column {values.name!r}: {dtype} cannot be a time")
        if self._how is None:
            dated = dtype == pl.Date or isinstance(dtype, pl.Datetime)
            self._how = "date" if dated else self.format or how_to_read(values)
        days, order = read_days(values, self._how)
        if days.null_count():
            row = int(days.is_null().arg_max() or 0)
            raise DataError(
                f"{chunk.place(row)}: column {self.column!r}: {values[row]!r:.60} cannot be read as a time "
                f"({self._how}); give time_format, for example '%y%m%d%H'"
            )
        return days, order


def changed(chunk: Chunk) -> DataError:
    """Build the error for rows that were not there, or not so, when the days were found."""
    return DataError(f"{chunk.place(0)}: the source changed while it was read; prepare it again")
