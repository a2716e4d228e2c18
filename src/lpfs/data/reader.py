"""Rows of a Dataset in any order: batch plans, shuffling windows, reading by position, and gathering."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from lpfs.data.batch import Bag, Index, RowBlock, concat_bags, concat_rows, map_rows, take_bag
from lpfs.data.store.format import COLUMN_PARTS, AnyArray, DayInfo, field_column, id_range_error, label_column
from lpfs.data.store.location import DatasetLocation, damaged_file_error
from lpfs.schema import Field, Schema

READ_ROWS = 1 << 16  # rows read from each column file at a time
MIN_SEPARATE_ROWS = 8192  # spans shorter than this are sliced from one long read instead of read one by one

Order = Literal["time", "uniform", "windowed"]
Span = tuple[int, int]  # first position and end (exclusive)


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one pass over ``rows`` rows for ``world`` ranks.

    Step k covers positions [k·B·W, (k+1)·B·W) of the order, or [k·B, (k+1)·B) if the ranks share each batch
    (``shared``). Rank r gets the r-th of W equal parts of it, so all ranks are at the same time in each step.
    The remaining rows at the end are divided evenly. If fewer rows than ranks remain, the step before gives up
    some of its rows, so that no rank gets an empty batch (unless there are fewer rows than ranks, or the batch
    size is 1). Every rank has the same number of batches.

    >>> [list(BatchPlan(11, 2, world=2).spans(rank)) for rank in (0, 1)]
    [[(0, 2), (4, 6), (8, 9)], [(2, 4), (6, 8), (9, 11)]]
    """

    rows: int
    batch_size: int
    world: int = 1
    drop_last: bool = False
    shared: bool = False

    @property
    def size(self) -> int:
        """Number of rows of all ranks in a step."""
        return self.batch_size if self.shared else self.batch_size * self.world

    def bounds(self, start: int = 0) -> Iterator[Span]:
        """Yield the span of each step of all ranks, from position ``start``."""
        size = self.size
        while start < self.rows:
            left = self.rows - start
            if left < size and self.drop_last:
                return
            stop = start + min(left, size)
            if 0 < left - size < self.world < size and not self.drop_last:
                stop = self.rows - self.world
            yield start, stop
            start = stop

    def spans(self, rank: int, start: int = 0) -> Iterator[Span]:
        """Yield the span of each batch of one rank."""
        for first, stop in self.bounds(start):
            yield rank_range(first, stop, rank, self.world)

    def __len__(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)


def rank_range(start: int, stop: int, rank: int, world: int) -> Span:
    """Return the part of [start, stop) that belongs to a rank; the parts differ by at most one row."""
    rows = stop - start
    return start + rows * rank // world, start + rows * (rank + 1) // world


@dataclass(frozen=True)
class ShuffleWindows:
    """A shuffle that keeps only one window of rows in memory.

    The rows are divided into blocks of consecutive rows and the blocks are shuffled. Each window consists of
    several blocks, and its rows are shuffled. Every row occurs exactly once.
    """

    rows: int
    block: int  # rows per block
    blocks: int  # blocks per window
    seed: int
    epoch: int

    @cached_property
    def _sequence(self) -> Index:
        return np.random.default_rng([self.seed, self.epoch]).permutation(-(-self.rows // self.block))

    def window(self, number: int) -> list[Span]:
        """Return the spans of rows in a window."""
        blocks = self._sequence[number * self.blocks : (number + 1) * self.blocks].tolist()
        return [(block * self.block, min((block + 1) * self.block, self.rows)) for block in blocks]

    def shuffle(self, number: int, rows: int) -> Index:
        """Return the order of the rows inside a window."""
        return np.random.default_rng([self.seed, self.epoch, 1 + number]).permutation(rows)

    def starts(self) -> list[int]:
        """Return the position in the order at which each window starts, and the end."""
        count = -(-self.rows // (self.block * self.blocks))
        sizes = [sum(stop - start for start, stop in self.window(number)) for number in range(count)]
        return [0, *np.cumsum(sizes).tolist()]


class RowReader:
    """Read rows of the whole Dataset by position, for some of its fields.

    Files are opened for each read and closed again, so the number of columns is not limited by open files, and a
    truncated or damaged file raises DataError instead of crashing the process as a memory map would.
    """

    def __init__(self, location: DatasetLocation, schema: Schema, fields: Schema, days: Sequence[DayInfo]) -> None:
        self.location, self.fields, self.days = location, fields, days
        self.starts = [0, *accumulate(day.rows for day in days)]
        position = {name: index for index, name in enumerate(schema.names)}
        self._index = {name: position[name] for name in fields.names}
        self._ids, self._dense, self._bags = (
            [field for field in fields if field.kind == kind] for kind in ("categorical", "numeric", "multi")
        )
        self._tasks = 1 + len(schema.tasks)
        self._width = sum(field.dim for field in self._dense)
        names = {field_column(index, part) for index in self._index.values() for part in COLUMN_PARTS}
        names |= {label_column(index) for index in range(self._tasks)}
        self._files = [
            list({day.columns[name].file: None for name in sorted(names & day.columns.keys())}) for day in days
        ]
        self._has_missing = any(
            field_column(self._index[field.name], "missing") in day.columns for field in self._dense for day in days
        )

    def read(self, ranges: Sequence[Span], reuse: RowBlock | None = None) -> RowBlock:
        """Return the rows of these ranges, one after another; in the memory of ``reuse`` if they fit."""
        rows = sum(stop - start for start, stop in ranges)
        if reuse is not None and len(reuse) >= rows:
            out = RowBlock(reuse.ids, reuse.dense, reuse.labels, reuse.missing).slice(0, rows)
            if out.missing is not None:
                out.missing[:] = False
        else:
            out = RowBlock(
                np.empty((rows, len(self._ids)), np.int32),
                np.empty((rows, self._width), np.float32),
                np.empty((rows, self._tasks), np.float32),
                np.zeros((rows, self._width), np.bool_) if self._has_missing else None,
            )
        bags: dict[str, list[Bag]] = {field.name: [] for field in self._bags}
        done = 0
        for start, stop in ranges:
            while start < stop:
                day = self.days[bisect_right(self.starts, start) - 1]
                first = start - self.starts[day.index]
                count = min(stop - start, day.rows - first, READ_ROWS)
                self.location.fetch(self._files[day.index])
                self._fill(day, first, count, out.slice(done, done + count))
                for field in self._bags:
                    bags[field.name].append(self._bag(day, field, first, count))
                start, done = start + count, done + count
        empty: Bag = (np.empty(0, np.int32), np.zeros(1, np.int64))
        joined = {name: concat_bags(parts or [empty]) for name, parts in bags.items()}
        return RowBlock(out.ids, out.dense, out.labels, out.missing, joined)

    @property
    def row_bytes(self) -> int:
        """Average number of bytes per row in memory, including 8 for its position in an order."""
        width = 4 * (len(self._ids) + self._width + self._tasks) + 8 + self._width * self._has_missing
        for field in self._bags:
            items = sum(day.columns[field_column(self._index[field.name])].items for day in self.days)
            width += 8 + -(-4 * items // max(self.starts[-1], 1))
        return width

    def _fill(self, day: DayInfo, first: int, count: int, out: RowBlock) -> None:
        ids = out.ids.view(np.uint32)  # ids are below 2**31, so the bits are the same and no cast is needed
        for column, field in enumerate(self._ids):
            ids[:, column] = self._field_ids(day, field, first, count)
        column = 0
        for field in self._dense:
            index, width = self._index[field.name], field.dim
            columns = slice(column, column + width)
            values = self._column(day, field_column(index), first * width, count * width)
            out.dense[:, columns] = values.reshape(count, width)
            if out.missing is not None and field_column(index, "missing") in day.columns:
                missing = self._column(day, field_column(index, "missing"), first * width, count * width)
                out.missing.view(np.uint8)[:, columns] = missing.reshape(count, width)
            column += width
        for column in range(self._tasks):
            out.labels[:, column] = self._column(day, label_column(column), first, count)

    def _bag(self, day: DayInfo, field: Field, first: int, count: int) -> Bag:
        name = field_column(self._index[field.name], "offsets")
        offsets = self._column(day, name, first, count + 1)
        if (offsets[1:] < offsets[:-1]).any():
            raise damaged_file_error(self.location.folder / day.columns[name].file, f"{name} decreases")
        values = self._field_ids(day, field, int(offsets[0]), int(offsets[-1] - offsets[0]))
        return values.astype(np.int32), offsets - offsets[0]

    def _field_ids(self, day: DayInfo, field: Field, first: int, count: int) -> AnyArray:
        """Return ids of a field; raise DataError if one is not below its cardinality."""
        ids = self._column(day, field_column(self._index[field.name]), first, count)
        if count and 256**ids.itemsize > field.cardinality and ids.max() >= field.cardinality:
            raise id_range_error(field, int(ids.max()), day.name)
        return ids

    def _column(self, day: DayInfo, name: str, first: int, count: int) -> AnyArray:
        return day.columns[name].read(self.location, first, count)


class RowGatherer(Protocol):
    """Return rows by their positions in an order."""

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        """Return the rows at these positions; positions never decrease from call to call."""
        ...


class SequentialGatherer(RowGatherer):
    """Rows in time order, read from disk."""

    def __init__(self, reader: RowReader, start: int) -> None:
        self.reader, self.start = reader, start

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        spans = [(self.start + first, self.start + stop) for first, stop in spans]
        first, last = spans[0][0], spans[-1][1]
        if len(spans) == 1 or spans[0][1] - first >= MIN_SEPARATE_ROWS:
            return self.reader.read(spans)
        block = self.reader.read([(first, last)])
        if sum(stop - start for start, stop in spans) == len(block):
            return block
        return concat_rows([block.slice(start - first, stop - first) for start, stop in spans])


class ShuffledGatherer(RowGatherer):
    """Rows in memory, in a new random order for each pass."""

    def __init__(self, resident: RowBlock, seed: int, epoch: int) -> None:
        self.resident = resident
        self.sequence = np.random.default_rng([seed, epoch]).permutation(len(resident))

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        return self.resident.take(np.concatenate([self.sequence[first:stop] for first, stop in spans]))


class PartialGatherer(RowGatherer):
    """The first ``count`` rows of the first pass of a shuffle in memory; all rows if a later one is needed."""

    def __init__(self, reader: RowReader, span: Span, seed: int, count: int) -> None:
        self.reader, self.span, self.seed, self.count = reader, span, seed, count
        self._all: ShuffledGatherer | None = None
        rows = span[1] - span[0]
        sequence = np.random.default_rng([seed, 0]).permutation(rows)[:count]
        is_used = np.zeros(rows, np.bool_)
        is_used[sequence] = True
        self.sequence = (np.cumsum(is_used) - 1)[sequence]  # positions among the rows that are used
        self.resident = _read_selected(reader, span, is_used)

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        if spans[-1][1] <= self.count:
            return self.resident.take(np.concatenate([self.sequence[first:stop] for first, stop in spans]))
        if self._all is None:
            self._all = ShuffledGatherer(self.reader.read([self.span]), self.seed, 0)
        return self._all.rows(spans)


def _read_selected(reader: RowReader, span: Span, is_used: AnyArray) -> RowBlock:
    """Return the rows of a range at which ``is_used`` is set, without the memory of the others."""
    empty, count, done = reader.read([]), int(is_used.sum()), 0
    dense = RowBlock(empty.ids, empty.dense, empty.labels, empty.missing)
    out = map_rows(dense, lambda array: np.empty((count, *array.shape[1:]), array.dtype))
    bags: dict[str, list[Bag]] = {name: [] for name in empty.bags}
    block: RowBlock | None = None
    for first in range(0, len(is_used), READ_ROWS):
        index = np.flatnonzero(is_used[first : first + READ_ROWS])
        stop = min(len(is_used), first + READ_ROWS)
        block = reader.read([(span[0] + first, span[0] + stop)], block)
        part = out.slice(done, done + len(index))
        for source, target in ((block.ids, part.ids), (block.dense, part.dense), (block.labels, part.labels)):
            source.take(index, 0, out=target)
        if block.missing is not None and part.missing is not None:
            block.missing.take(index, 0, out=part.missing)
        for name, bag in block.bags.items():
            bags[name].append(take_bag(bag, index))
        done += len(index)
    joined = {name: concat_bags(parts or [empty.bags[name]]) for name, parts in bags.items()}
    return RowBlock(out.ids, out.dense, out.labels, out.missing, joined)


class WindowedGatherer(RowGatherer):
    """Rows of a shuffle by windows; only the current window is in memory."""

    def __init__(self, reader: RowReader, start: int, windows: ShuffleWindows) -> None:
        self.reader, self.start, self.windows = reader, start, windows
        self.starts = windows.starts()
        self._number = -1
        self._rows: RowBlock | None = None

    def rows(self, spans: Sequence[Span]) -> RowBlock:
        blocks = []
        first, last = bisect_right(self.starts, spans[0][0]) - 1, bisect_left(self.starts, spans[-1][1])
        for number in range(first, last):
            start, stop = self.starts[number], self.starts[number + 1]
            inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spans if a < stop and b > start]
            if inside:
                window = self._window(number)
                blocks.append(window.take(np.concatenate([self._sequence[a:b] for a, b in inside])))
        return concat_rows(blocks) if blocks else self.reader.read([])

    def _window(self, number: int) -> RowBlock:
        if self._rows is None or number != self._number:
            ranges = [(self.start + first, self.start + stop) for first, stop in self.windows.window(number)]
            self._rows = self.reader.read(ranges, self._rows)  # rows taken from the previous window are copies
            self._sequence = self.windows.shuffle(number, len(self._rows))
            self._number = number
        return self._rows
