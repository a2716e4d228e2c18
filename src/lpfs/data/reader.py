"""Reader: any range of rows of a Dataset, only the columns that are asked for."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from lpfs.data.batch import Bag, Rows, join_bags
from lpfs.data.store.day import PARTS, out_of_range
from lpfs.data.store.format import HEADER, AnyArray, day_folder, field_file, label_file
from lpfs.data.store.manifest import Day, damaged
from lpfs.data.store.location import Place
from lpfs.errors import DataError
from lpfs.schema import Field, Schema

CHUNK = 1 << 16  # rows gathered at a time


class Reader:
    """Read rows of the whole Dataset by position, for some of its fields.

    Files are opened for each read and closed again: no limit on columns, a truncated file is an error and not
    a crash. Ids, numbers and labels are gathered side by side, (n, F).
    """

    def __init__(self, place: Place, schema: Schema, fields: Schema, days: Sequence[Day]) -> None:
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

    def read(self, ranges: Sequence[tuple[int, int]], reuse: Rows | None = None) -> Rows:
        """Return the rows of these ranges, one after another; in the memory of ``reuse`` if they fit."""
        rows = sum(stop - start for start, stop in ranges)
        if reuse is not None and len(reuse) >= rows:
            out = Rows(reuse.ids, reuse.dense, reuse.labels, reuse.missing).cut(0, rows)
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
                self._fill(day, first, count, out.cut(done, done + count))
                for field in self._bags:
                    bags[field.name].append(self._bag(day, field, first, count))
                start, done = start + count, done + count
        empty: Bag = (np.empty(0, np.int32), np.zeros(1, np.int64))
        joined = {name: join_bags(parts or [empty]) for name, parts in bags.items()}
        return Rows(out.ids, out.dense, out.labels, out.missing, joined)

    def _empty(self, rows: int) -> Rows:
        return Rows(
            np.empty((rows, len(self._ids)), np.int32),
            np.empty((rows, self._width), np.float32),
            np.empty((rows, self._tasks), np.float32),
            np.zeros((rows, self._width), np.bool_) if self._marked else None,
        )

    def _fill(self, day: Day, first: int, count: int, out: Rows) -> None:
        ids = out.ids.view(np.uint32)  # the same bits, without a change of sign to look after
        for column, field in enumerate(self._ids):
            values = self._column(day, field_file(self._index[field.name]), first, count)
            check_range(day, field, values)
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

    def _bag(self, day: Day, field: Field, first: int, count: int) -> Bag:
        index = self._index[field.name]
        offsets = self._column(day, field_file(index, "offsets"), first, count + 1)
        begin, end = int(offsets[0]), int(offsets[-1])
        values = self._column(day, field_file(index), begin, end - begin)
        check_range(day, field, values)
        return values.astype(np.int32), offsets - offsets[0]

    def _column(self, day: Day, file: str, first: int, count: int) -> AnyArray:
        """Return some items of a column file."""
        path = self.place.file(f"{day_folder(day.index)}/{file}")
        dtype, items = day.files[file]
        if not 0 <= first <= first + count <= items:
            raise damaged(Path(path), f"items {first} to {first + count} of {items} are asked for")
        out = np.empty(count, dtype)
        if not count:
            return out
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                got = os.preadv(handle, [out.data.cast("B")], HEADER + first * dtype.itemsize)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; prepare the Dataset again") from error
        if got != out.nbytes:
            raise damaged(Path(path), "it ends early")
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


def check_range(day: Day, field: Field, values: AnyArray) -> None:
    """Refuse an id that the schema has no room for."""
    if values.size and 256**values.itemsize > field.cardinality:
        largest = int(values.max())
        if largest >= field.cardinality:
            raise out_of_range(field, largest, f"day {day.name!r}")
