"""Going through the log: rows get their day, negatives are drawn, fields are observed or encoded."""

from __future__ import annotations

import hashlib
import os
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.astype import as_type
from lpfs.data.clock import Clock
from lpfs.data.encoder import Encoder
from lpfs.data.format import AnyArray
from lpfs.data.lookup import mix
from lpfs.data.numeric import as_numbers
from lpfs.data.options import Options
from lpfs.data.sources import Chunk
from lpfs.errors import DataError

Labels = dict[str, npt.NDArray[np.uint8]]
Work = Callable[[Encoder], Any]
SMALL = 2000  # rows below which threads cost more than they save


@dataclass(frozen=True)
class DayRows:
    """Rows of one day in one chunk, after negatives were drawn."""

    day: int
    frame: pl.DataFrame
    labels: Labels
    where: Callable[[int], str]


def day_rows(
    chunks: Iterable[Chunk], clock: Clock, options: Options, days: set[int] | None = None
) -> Iterator[DayRows]:
    """Yield the rows of each day, in order; of ``days`` only, where given."""
    clock.begin()
    seen: Tally[int] = Tally()
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        frame = mark_missing(chunk.frame, options.missing)
        parts = clock.assign(chunk)
        targets = (options.label, *options.tasks)
        labels = {name: read_label(frame[name], options, chunk.place) for name in targets}
        for day, rows in parts:
            count = chunk.frame.height if rows is None else len(rows)
            begin = seen[day]
            seen[day] += count
            if days is not None and day not in days:
                continue
            rows = draw(rows, labels[options.label], begin, options.rate(clock.days[day]), options.seed, day)
            if rows is None:
                yield DayRows(day, frame, labels, chunk.place)
            elif len(rows):
                yield DayRows(
                    day,
                    frame[rows],
                    {name: values[rows] for name, values in labels.items()},
                    lambda row, place=chunk.place, rows=rows: place(int(rows[row])),  # type: ignore[misc]
                )


def mark_missing(frame: pl.DataFrame, marks: Sequence[str]) -> pl.DataFrame:
    """Replace the user's marks for a missing value by null, in text columns."""
    if not marks:
        return frame
    text = pl.col(pl.String)
    return frame.with_columns(pl.when(text.is_in(list(marks))).then(None).otherwise(text).name.keep())


def draw(rows: AnyArray | None, labels: AnyArray, begin: int, rate: float, seed: int, day: int) -> AnyArray | None:
    """Return the rows to keep: every positive, and of the negatives those whose number in the day hashes low.

    What is kept depends on the seed, the day and the number of the row in it, not on chunks.
    """
    if rate >= 1.0:
        return rows
    rows = np.arange(len(labels)) if rows is None else rows
    marks = mix(np.arange(begin, begin + len(rows)), int(mix([day], seed)[0]))
    kept: AnyArray = rows[(labels[rows] == 1) | (marks < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048)))]
    return kept


def read_label(values: pl.Series, options: Options, where: Callable[[int], str]) -> npt.NDArray[np.uint8]:
    """Return a label as 0 and 1, or say which value is neither."""
    what = "label" if values.name == options.label else "task"
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{where(row)}: {what} {values.name!r} is missing; it must be 0 or 1")
    if options.positive is not None and values.name == options.label:
        if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
            raise DataError(f"{what} {values.name!r} is a column of {values.dtype}; it must hold 0 and 1")
        return (as_type(values, pl.String) == options.positive).to_numpy().astype(np.uint8)

    def refuse(row: int) -> DataError:
        return DataError(
            f"{where(row)}: {what} {values.name!r} must be 0 or 1, found {values[row]!r:.60}; "
            "repair the rows, or say which value counts as 1 with positive"
        )

    if values.dtype == pl.String:
        bad = as_type(values, pl.Float64, strict=False).is_null()
        if bad.any():
            raise refuse(int(bad.arg_max() or 0))
    numbers = as_numbers(values, where)
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        raise refuse(int(wrong.argmax()))
    return numbers.astype(np.uint8)


class Twins:
    """Finds columns that hold the same, comparing running hashes of those that still may."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._digest = {each.name: type(each).__name__.encode() for each in encoders}
        self._tied = set(self._digest)

    def needs(self, name: str) -> bool:
        """Whether a column may still have a twin."""
        return name in self._tied

    def add(self, parts: dict[str, list[AnyArray]]) -> None:
        """Take in a chunk of the columns that may have twins."""
        for name, arrays in parts.items():
            digest = hashlib.blake2b(self._digest[name], digest_size=16)
            for array in arrays:
                digest.update(repr((array.dtype.str, array.shape)).encode())
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
            self._digest[name] = digest.digest()
        counts = Tally(self._digest[name] for name in self._tied)
        self._tied = {name for name in self._tied if counts[self._digest[name]] > 1}

    def found(self) -> dict[str, str]:
        """Return {column: the first column that holds the same}."""
        first: dict[bytes, str] = {}
        twins = {}
        for name in self._digest:
            if name in self._tied:
                other = first.setdefault(self._digest[name], name)
                if other != name:
                    twins[name] = other
        return twins


def in_parallel(
    pool: ThreadPoolExecutor, encoders: Sequence[Encoder], work: Work, rows: int = SMALL
) -> dict[str, Any]:
    """Do something with every field, on all cores where there are rows enough."""
    done = pool.map(work, encoders) if rows >= SMALL else map(work, encoders)
    return dict(zip((each.name for each in encoders), done, strict=True))


def make_pool() -> ThreadPoolExecutor:
    """Return a pool with a thread a core, eight at most."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def observe(parts: Iterable[DayRows], encoders: Sequence[Encoder]) -> Twins:
    """Show the training period to every field; return what was learned about equal columns."""
    twins = Twins(encoders)
    with make_pool() as pool:
        rows = 0
        for part in parts:
            rows += part.frame.height

            def look(each: Encoder, part: DayRows = part) -> list[AnyArray] | None:
                signature = each.observe(part.frame[each.name], part.where)
                return signature() if twins.needs(each.name) else None

            found = in_parallel(pool, encoders, look, part.frame.height)
            twins.add({name: arrays for name, arrays in found.items() if arrays is not None})
        in_parallel(pool, encoders, lambda each: each.finish(), rows)
    return twins


def encode(
    parts: Iterable[DayRows], encoders: Sequence[Encoder]
) -> Iterator[tuple[DayRows, dict[str, dict[str, Any]]]]:
    """Yield the rows of each part as the arguments of ``DayWriter.append``."""
    kinds = {
        each.name: {"categorical": "ids", "numeric": "dense", "multi": "bags"}[each.kind] for each in encoders
    }
    with make_pool() as pool:
        for part in parts:

            def turn(each: Encoder, part: DayRows = part) -> Any:
                return each.encode(part.frame[each.name], part.where)

            columns: dict[str, dict[str, Any]] = {"ids": {}, "dense": {}, "bags": {}}
            for name, values in in_parallel(pool, encoders, turn, part.frame.height).items():
                columns[kinds[name]][name] = values
            yield part, columns
