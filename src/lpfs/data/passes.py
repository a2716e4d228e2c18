"""The rows of each day, with their labels as 0 and 1 and the negatives drawn.

Columns that repeat another one, or the label.

Passes over the log: every field observes the training days, then encodes all rows.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.days import DayAssigner
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.numeric import as_numbers
from lpfs.data.hashing import splitmix64
from lpfs.data.parsing import cast_column, replace_missing_marks
from lpfs.data.planning import PrepareOptions
from lpfs.data.sources.base import Chunk
from lpfs.data.store.format import AnyArray
from lpfs.errors import DataError

FIRST = 1000  # rows that rule out nearly every column


class DuplicateColumns:
    """Finds columns that hold the same, comparing running hashes of those that still may."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._digest = {each.name: type(each).__name__.encode() for each in encoders}
        self._tied = set(self._digest)

    def needs(self, name: str) -> bool:
        """Whether a column may still have a twin."""
        return name in self._tied

    def add(self, digests: Mapping[str, bytes]) -> None:
        """Take in the digests of a chunk of the columns that may have twins."""
        for name, digest in digests.items():
            self._digest[name] = hashlib.blake2b(self._digest[name] + digest, digest_size=16).digest()
        counts = Tally(self._digest[name] for name in self._tied)
        self._tied = {name for name in self._tied if counts[self._digest[name]] > 1}

    def result(self) -> dict[str, str]:
        """Return {column: the first column that holds the same}."""
        first: dict[bytes, str] = {}
        twins = {}
        for name in self._digest:
            if name in self._tied:
                other = first.setdefault(self._digest[name], name)
                if other != name:
                    twins[name] = other
        return twins


def hash_arrays(arrays: Iterable[AnyArray]) -> bytes:
    """Return a digest of what tells a column apart."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


class LabelCopies:
    """Finds columns with two values, one of them for every positive and the other for every negative."""

    def __init__(self, names: Iterable[str]) -> None:
        self._pairs: dict[str, set[tuple[Any, int]]] = {name: set() for name in names}

    def add(self, frame: pl.DataFrame, labels: AnyArray) -> None:
        """Take in rows; a column with more values, or one value for both labels, is out."""
        for name, pairs in list(self._pairs.items()):
            column = frame[name]
            kind = column.dtype
            odd = kind.is_nested() or kind.is_temporal() or kind == pl.Object  # a date may be one that cannot be
            if odd or column.head(FIRST).n_unique() > 2:
                del self._pairs[name]
                continue
            both = pl.DataFrame([column.alias("value"), pl.Series("label", labels)]).unique()
            if both.height <= 2:
                pairs.update(both.iter_rows())
            if both.height > 2 or _has_both_labels(pairs):
                del self._pairs[name]

    def join(self, other: LabelCopies) -> None:
        """Take in what was found on other rows."""
        for name, pairs in list(self._pairs.items()):
            pairs.update(other._pairs.get(name, ()))
            if name not in other._pairs or _has_both_labels(pairs):
                del self._pairs[name]

    def result(self) -> list[str]:
        """Return the columns that tell the label exactly."""
        return [name for name, pairs in self._pairs.items() if {label for _, label in pairs} == {0, 1}]


def _has_both_labels(pairs: set[tuple[Any, int]]) -> bool:
    """Whether a value comes with both labels, or there are too many values."""
    return len(pairs) > 2 or len({value for value, _ in pairs}) < len(pairs)


Labels = dict[str, npt.NDArray[np.uint8]]
BOOLEAN_WORDS = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class PieceStart:
    """What comes before the first chunk, where that is not the first of the log.

    Args:
        row: how many rows, or training rows where the log has a split of its own.
        days: how many rows of each day.
        trained: how many rows of the training days, after negatives were drawn.

    """

    row: int = 0
    days: Mapping[int, int] = field(default_factory=dict)
    trained: int = 0


FIRST_ROW = PieceStart()


@dataclass(frozen=True)
class DayRows:
    """Rows of a chunk after negatives were drawn, day after day; ``days`` says how many each day has."""

    days: tuple[tuple[int, int], ...]
    frame: pl.DataFrame
    labels: Labels
    where: Callable[[int], str]


def day_rows(
    chunks: Iterable[Chunk],
    clock: DayAssigner,
    options: PrepareOptions,
    days: set[int] | None = None,
    *,
    labelled: bool = True,
    start: PieceStart = FIRST_ROW,
) -> Iterator[DayRows]:
    """Yield the rows chunk by chunk, sorted by day; of ``days`` only, where given. Absent labels are 0."""
    clock.start_at(start.row)
    seen: Tally[int] = Tally(dict(start.days))
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        frame = replace_missing_marks(chunk.frame, options.missing)
        parts = clock.assign(chunk)
        labels = read_labels(frame, options, chunk.locate, labelled=labelled)
        drawn: list[tuple[int, AnyArray]] = []
        for day, rows in parts:
            rows = np.arange(frame.height) if rows is None else rows
            begin = seen[day]
            seen[day] += len(rows)
            if days is None or day in days:
                rate = options.negative_rate(clock.days[day])
                drawn.append((day, sample_negatives(rows, labels[options.label], begin, rate, options.seed, day)))
        counts = tuple((day, len(rows)) for day, rows in drawn if len(rows))
        if len(counts) == 1 and counts[0][1] == frame.height:
            yield DayRows(counts, frame, labels, chunk.locate)
        elif counts:
            chosen = np.concatenate([rows for _, rows in drawn])
            yield DayRows(
                counts,
                frame[chosen],
                {name: values[chosen] for name, values in labels.items()},
                lambda row, place=chunk.locate, chosen=chosen: place(int(chosen[row])),  # type: ignore[misc]
            )


def sample_negatives(rows: AnyArray, labels: AnyArray, begin: int, rate: float, seed: int, day: int) -> AnyArray:
    """Return the rows to keep: every positive, and of the negatives those whose number in the day hashes low.

    What is kept depends on the seed, the day and the number of the row in it, not on chunks.
    """
    if rate >= 1.0:
        return rows
    marks = splitmix64(np.arange(begin, begin + len(rows)), int(splitmix64([day], seed)[0]))
    kept: AnyArray = rows[(labels[rows] == 1) | (marks < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048)))]
    return kept


def read_labels(
    frame: pl.DataFrame, options: PrepareOptions, where: Callable[[int], str], *, labelled: bool
) -> Labels:
    """Return the label and the tasks as 0 and 1; all 0 where the table has none."""
    targets = (options.label, *options.tasks)
    if not labelled:
        return {name: np.zeros(frame.height, np.uint8) for name in targets}
    return {name: read_label(frame[name], options, where) for name in targets}


def read_label(values: pl.Series, options: PrepareOptions, where: Callable[[int], str]) -> npt.NDArray[np.uint8]:
    """Return a label as 0 and 1, or say which value is neither."""
    what = "label" if values.name == options.label else "task"
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{where(row)}: {what} {values.name!r} is missing; it must be 0 or 1")
    if options.positive is not None and values.name == options.label:
        if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
            raise DataError(f"{what} {values.name!r} is a column of {values.dtype}; it must hold 0 and 1")
        return (cast_column(values, pl.String) == options.positive).to_numpy().astype(np.uint8)

    numbers = _labels_as_numbers(values, where)
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{where(row)}: {what} {values.name!r} must be 0 or 1, found {values[row]!r:.60}; "
            "repair the rows, or say which value counts as 1: positive='yes', or --positive yes"
        )
    return numbers.astype(np.uint8)


def _labels_as_numbers(values: pl.Series, where: Callable[[int], str]) -> npt.NDArray[np.float64]:
    """Return labels as numbers, true and false as 1 and 0; NaN for any other text."""
    if values.dtype != pl.String:
        return as_numbers(values, where)
    spelled = values.str.strip_chars().str.to_lowercase().replace(BOOLEAN_WORDS)
    return cast_column(spelled, pl.Float64, strict=False).to_numpy()


Work = Callable[[Encoder], Any]
MIN_PARALLEL_ROWS = 2000  # rows below which threads cost more than they save


def map_fields(
    pool: ThreadPoolExecutor, encoders: Sequence[Encoder], work: Work, rows: int = MIN_PARALLEL_ROWS
) -> dict[str, Any]:
    """Do something with every field, on all cores where there are rows enough."""
    done = pool.map(work, encoders) if rows >= MIN_PARALLEL_ROWS else map(work, encoders)
    return dict(zip((each.name for each in encoders), done, strict=True))


def make_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool with so many threads, or a thread a core, eight at most."""
    return ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1))


def observe(parts: Iterable[DayRows], encoders: Sequence[Encoder]) -> DuplicateColumns:
    """Show the training period to every field; return what was learned about equal columns."""
    twins = DuplicateColumns(encoders)
    with make_pool() as pool:
        rows = 0
        for part in parts:
            rows += part.frame.height

            def look(each: Encoder, part: DayRows = part) -> bytes | None:
                signature = each.observe(part.frame[each.name], part.where)
                return hash_arrays(signature()) if twins.needs(each.name) else None

            found = map_fields(pool, encoders, look, part.frame.height)
            twins.add({name: digest for name, digest in found.items() if digest is not None})
        map_fields(pool, encoders, lambda each: each.finish(), rows)
    return twins


def encode(
    parts: Iterable[DayRows], encoders: Sequence[Encoder], threads: int | None = None
) -> Iterator[tuple[DayRows, dict[str, dict[str, Any]]]]:
    """Yield the rows of each part with their ids, numbers and bags, as ``DayWriter.append`` takes them."""
    kinds = {
        each.name: {"categorical": "ids", "numeric": "dense", "multi": "bags"}[each.kind] for each in encoders
    }
    with make_pool(threads) as pool:
        for part in parts:

            def turn(each: Encoder, part: DayRows = part) -> Any:
                return each.encode(part.frame[each.name], part.where)

            columns: dict[str, dict[str, Any]] = {"ids": {}, "dense": {}, "bags": {}}
            for name, values in map_fields(pool, encoders, turn, part.frame.height).items():
                columns[kinds[name]][name] = values
            yield part, columns


def split_by_day(
    part: DayRows, columns: dict[str, dict[str, Any]]
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Cut encoded rows where a day ends; yield each day with the arguments of ``DayWriter.append``."""
    ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in columns["bags"].items()}
    start = 0
    for day, rows in part.days:
        stop = start + rows
        cut = {kind: {name: each[start:stop] for name, each in columns[kind].items()} for kind in ("ids", "dense")}
        bags = {
            name: (values[ends[name][start] : ends[name][stop]], lengths[start:stop])
            for name, (values, lengths) in columns["bags"].items()
        }
        labels = {name: values[start:stop] for name, values in part.labels.items()}
        yield day, {**cut, "bags": bags, "labels": labels}
        start = stop
