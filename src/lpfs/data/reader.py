"""Reader: any range of rows of a Dataset, only the columns that are asked for.

In which order rows come, and which of them are this rank's: pure functions of positions.

Where the rows of an order come from: the disk, memory, or a window.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from lpfs._fileio import NPY_HEADER_BYTES
from lpfs.data.batch import Bag, RowBlock, concat_bags, concat_rows
from lpfs.data.store.format import (
    AnyArray,
    DayInfo,
    damaged_file_error,
    day_folder,
    field_file,
    label_file,
)
from lpfs.data.store.location import DatasetLocation
from lpfs.data.store.writer import PARTS, id_range_error
from lpfs.errors import DataError
from lpfs.schema import Field, Schema

Order = Literal["time", "uniform", "windowed"]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
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
    same_for_all_ranks: bool = False

    @property
    def size(self) -> int:
        """Rows of all ranks in a step."""
        return self.batch_size if self.same_for_all_ranks else self.batch_size * self.world

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
            yield rank_range(first, stop, rank, self.world)

    def __len__(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)


def rank_range(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    """Return the part of [start, stop) that belongs to one rank; parts differ by one row at most."""
    rows = stop - start
    return start + rows * rank // world, start + rows * (rank + 1) // world


def make_rng(seed: int, epoch: int, *more: int) -> np.random.Generator:
    """Return the random numbers of one purpose, the same on every machine."""
    return np.random.default_rng([seed, epoch, *more])


@dataclass(frozen=True)
class ShuffleWindows:
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
        object.__setattr__(self, "_sequence", make_rng(self.seed, self.epoch).permutation(count))

    def window(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of rows that a window holds."""
        sequence: Index = self._sequence  # type: ignore[attr-defined]
        chosen = sequence[number * self.blocks : (number + 1) * self.blocks].tolist()
        return [(at * self.block, min((at + 1) * self.block, self.rows)) for at in chosen]

    def shuffle(self, number: int, rows: int) -> Index:
        """Return the order of the rows inside a window."""
        return make_rng(self.seed, self.epoch, 1 + number).permutation(rows)

    def starts(self) -> list[int]:
        """Return the position in the order where each window starts, and the end."""
        count = -(-self.rows // (self.block * self.blocks))
        sizes = [sum(stop - start for start, stop in self.window(number)) for number in range(count)]
        return [0, *np.cumsum(sizes).tolist()]


CHUNK = 1 << 16  # rows gathered at a time


class RowReader:
    """Read rows of the whole Dataset by position, for some of its fields.

    Files are opened for each read and closed again: no limit on columns, a truncated file is an error and not
    a crash. Ids, numbers and labels are gathered side by side, (n, F).
    """

    def __init__(self, place: DatasetLocation, schema: Schema, fields: Schema, days: Sequence[DayInfo]) -> None:
        self.place, self.fields, self.days = place, fields, days
        self.starts = [0, *accumulate(day.rows for day in days)]
        position = {name: index for index, name in enumerate(schema.names)}
        self._index = {field.name: position[field.name] for field in fields}
        self._ids = [field for field in fields if field.kind == "categorical"]
        self._dense = [field for field in fields if field.kind == "numeric"]
        self._bags = [field for field in fields if field.kind == "multi"]
        self._tasks = 1 + len(schema.tasks)
        self._width = sum(field.dim for field in self._dense)
        wanted = {field_file(index, part) for index in self._index.values() for part in PARTS}
        wanted |= {label_file(index) for index in range(self._tasks)}
        self._files = [[f"{day_folder(day.index)}/{name}" for name in day.files if name in wanted] for day in days]
        self._marked = any(
            field_file(self._index[field.name], "missing") in day.files for field in self._dense for day in days
        )

    def read(self, ranges: Sequence[tuple[int, int]], reuse: RowBlock | None = None) -> RowBlock:
        """Return the rows of these ranges, one after another; in the memory of ``reuse`` if they fit."""
        rows = sum(stop - start for start, stop in ranges)
        if reuse is not None and len(reuse) >= rows:
            out = RowBlock(reuse.ids, reuse.dense, reuse.labels, reuse.missing).slice(0, rows)
            if out.missing is not None:
                out.missing[:] = False
        else:
            out = self._empty(rows)
        bags: dict[str, list[Bag]] = {field.name: [] for field in self._bags}
        done = 0
        for start, stop in ranges:
            while start < stop:
                day = self.days[bisect_right(self.starts, start) - 1]
                first = start - self.starts[day.index]
                count = min(stop - start, day.rows - first, CHUNK)
                self.place.fetch(self._files[day.index])
                self._fill(day, first, count, out.slice(done, done + count))
                for field in self._bags:
                    bags[field.name].append(self._bag(day, field, first, count))
                start, done = start + count, done + count
        empty: Bag = (np.empty(0, np.int32), np.zeros(1, np.int64))
        joined = {name: concat_bags(parts or [empty]) for name, parts in bags.items()}
        return RowBlock(out.ids, out.dense, out.labels, out.missing, joined)

    def _empty(self, rows: int) -> RowBlock:
        return RowBlock(
            np.empty((rows, len(self._ids)), np.int32),
            np.empty((rows, self._width), np.float32),
            np.empty((rows, self._tasks), np.float32),
            np.zeros((rows, self._width), np.bool_) if self._marked else None,
        )

    def _fill(self, day: DayInfo, first: int, count: int, out: RowBlock) -> None:
        ids = out.ids.view(np.uint32)  # the same bits, without a change of sign to look after
        for column, field in enumerate(self._ids):
            values = self._column(day, field_file(self._index[field.name]), first, count)
            _check_id_range(day, field, values)
            ids[:, column] = values
        column = 0
        for field in self._dense:
            file, width = field_file(self._index[field.name]), field.dim
            values = self._column(day, file, first * width, count * width)
            out.dense[:, column : column + width] = values.reshape(count, width)
            file = field_file(self._index[field.name], "missing")
            if file in day.files and out.missing is not None:
                marks = self._column(day, file, first * width, count * width)
                out.missing.view(np.uint8)[:, column : column + width] = marks.reshape(count, width)
            column += width
        for column in range(self._tasks):
            out.labels[:, column] = self._column(day, label_file(column), first, count)

    def _bag(self, day: DayInfo, field: Field, first: int, count: int) -> Bag:
        index = self._index[field.name]
        offsets = self._column(day, field_file(index, "offsets"), first, count + 1)
        begin, end = int(offsets[0]), int(offsets[-1])
        values = self._column(day, field_file(index), begin, end - begin)
        _check_id_range(day, field, values)
        return values.astype(np.int32), offsets - offsets[0]

    def _column(self, day: DayInfo, file: str, first: int, count: int) -> AnyArray:
        """Return some items of a column file."""
        path = self.place.file(f"{day_folder(day.index)}/{file}")
        dtype, items = day.files[file]
        if not 0 <= first <= first + count <= items:
            raise damaged_file_error(Path(path), f"items {first} to {first + count} of {items} are asked for")
        out = np.empty(count, dtype)
        if not count:
            return out
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                got = os.preadv(handle, [out.data.cast("B")], NPY_HEADER_BYTES + first * dtype.itemsize)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; prepare the Dataset again") from error
        if got != out.nbytes:
            raise damaged_file_error(Path(path), "it ends early")
        return out

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes in memory, on average, with its place in an order."""
        width = 4 * (len(self._ids) + self._width + self._tasks) + 8
        if self._marked:
            width += self._width
        rows = self.starts[-1]
        for field in self._bags:
            items = sum(day.files[field_file(self._index[field.name])][1] for day in self.days)
            width += 8 + -(-4 * items // max(rows, 1))
        return width


def _check_id_range(day: DayInfo, field: Field, values: AnyArray) -> None:
    """Refuse an id that the schema has no room for."""
    if values.size and 256**values.itemsize > field.cardinality:
        largest = int(values.max())
        if largest >= field.cardinality:
            raise id_range_error(field, largest, f"day {day.name!r}")


Span = tuple[int, int]
NEAR = 8192  # rows: parts shorter than this are cheaper to cut from one long read than to read one by one


class RowGatherer(Protocol):
    """Fetch positions of an order as rows."""

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        """Return the rows at these positions, which never go backwards from call to call."""
        ...


class SequentialGatherer:
    """Rows as they lie on the disk."""

    def __init__(self, reader: RowReader, start: int) -> None:
        self.reader, self.start = reader, start

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        """Read the spans, or everything around them when that is quicker."""
        moved = [(self.start + first, self.start + stop) for first, stop in spans]
        first, last = moved[0][0], moved[-1][1]
        if len(moved) == 1 or moved[0][1] - first >= NEAR:
            return self.reader.read(moved)
        around = self.reader.read([(first, last)])
        if sum(stop - start for start, stop in moved) == len(around):
            return around
        return concat_rows([around.slice(start - first, stop - first) for start, stop in moved])


class ShuffledGatherer:
    """Rows held in memory, in an order drawn anew for each pass."""

    def __init__(self, resident: RowBlock, seed: int, epoch: int) -> None:
        self.resident = resident
        self.sequence = make_rng(seed, epoch).permutation(len(resident))

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        """Pick the rows from memory."""
        return self.resident.take(np.concatenate([self.sequence[first:stop] for first, stop in spans]))


class WindowedGatherer:
    """Rows of a window of shuffled blocks; the window moves on when it is used up."""

    def __init__(self, reader: RowReader, start: int, windows: ShuffleWindows) -> None:
        self.reader, self.start, self.windows = reader, start, windows
        self.starts = windows.starts()
        self._number = -1
        self._rows: RowBlock | None = None

    def rows(self, spans: Sequence[Span]) -> RowBlock:
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
        return concat_rows(parts) if parts else self.reader.read([])

    def _window(self, number: int) -> RowBlock:
        if self._rows is None or number != self._number:
            ranges = [(self.start + a, self.start + b) for a, b in self.windows.window(number)]
            self._rows = self.reader.read(ranges, self._rows)  # what was taken from the old one is a copy
            self._sequence = self.windows.shuffle(number, len(self._rows))
            self._number = number
        return self._rows
