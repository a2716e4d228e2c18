"""Passes over a log: labels and sampled negatives of each day, duplicate and leaking columns, observe, encode."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs._fileio import pause_garbage_collection
from lpfs._text import quote_command
from lpfs.data.days import DayAssigner
from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.encoders.numeric import as_numbers
from lpfs.data.hashing import splitmix64
from lpfs.data.parsing import LABEL_WORDS, MISSING_NUMBER_TEXTS, cast_column, replace_missing_marks
from lpfs.data.planning import PrepareOptions
from lpfs.data.sources.base import Chunk
from lpfs.data.store.format import AnyArray
from lpfs.errors import DataError

FIRST_ROWS = 1000  # rows that rule out nearly every column as a copy of the label
MIN_PARALLEL_ROWS = 2000  # rows below which threads cost more than they save
MAX_THREADS = 8
MAX_LABELS = 6  # label values listed in an error message
WRITER_ARGUMENTS = {"categorical": "ids", "numeric": "dense", "multi": "bags"}  # of ``DayWriter.append``, by kind
Labels = dict[str, npt.NDArray[np.uint8]]
Columns = dict[str, dict[str, Any]]  # {argument of ``DayWriter.append``: {field: array}}


@dataclass(frozen=True)
class PieceStart:
    """Counts of the rows before the first chunk of a piece, which need not be the first of the log."""

    row: int = 0  # number of rows; of training rows, where the log has a split column
    days: Mapping[int, int] = field(default_factory=dict)  # number of rows of each day
    trained: int = 0  # number of rows of the training days, after sampling of negatives


FIRST_PIECE = PieceStart()


@dataclass(frozen=True)
class DayRows:
    """Rows of a chunk sorted by day, after sampling of negatives."""

    days: tuple[tuple[int, int], ...]  # (day, number of rows) in order
    frame: pl.DataFrame
    labels: Labels  # label and tasks as 0 and 1
    locate: RowLocator


def day_rows(
    chunks: Iterable[Chunk],
    assigner: DayAssigner,
    options: PrepareOptions,
    days: set[int] | None = None,
    *,
    labelled: bool = True,
    start: PieceStart = FIRST_PIECE,
) -> Iterator[DayRows]:
    """Yield the rows chunk by chunk, sorted by day; only those of ``days``, if given. Absent labels are 0."""
    assigner.start_at(start.row)
    seen: Counter[int] = Counter(dict(start.days))
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        frame = replace_missing_marks(chunk.frame, options.missing)
        parts = assigner.assign(chunk)
        labels = read_labels(frame, options, chunk.locate, labelled=labelled)
        sampled: list[tuple[int, AnyArray]] = []
        for day, rows in parts:
            rows = np.arange(frame.height) if rows is None else rows
            if days is None or day in days:
                rate = options.negative_rate(assigner.days[day])
                kept = sample_negatives(rows, labels[options.label], seen[day], rate, options.seed, day)
                sampled.append((day, kept))
            seen[day] += len(rows)
        counts = tuple((day, len(rows)) for day, rows in sampled if len(rows))
        if len(counts) == 1 and counts[0][1] == frame.height:
            yield DayRows(counts, frame, labels, chunk.locate)
        elif counts:
            selected = np.concatenate([rows for _, rows in sampled])
            part = replace(chunk, frame=frame).take(selected)
            labels = {name: values[selected] for name, values in labels.items()}
            yield DayRows(counts, part.frame, labels, part.locate)


def sample_negatives(rows: AnyArray, labels: AnyArray, first: int, rate: float, seed: int, day: int) -> AnyArray:
    """Return the rows to keep: all positives, and the negatives whose row number in the day has a low hash.

    The result depends on the seed, the day and the row numbers in it, not on chunks; ``first`` is the number of
    the first row in the day.
    """
    if rate >= 1.0:
        return rows
    hashes = splitmix64(np.arange(first, first + len(rows)), int(splitmix64([day], seed)[0]))
    kept: AnyArray = rows[(labels[rows] == 1) | (hashes < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048)))]
    return kept


def read_labels(frame: pl.DataFrame, options: PrepareOptions, locate: RowLocator, *, labelled: bool) -> Labels:
    """Return the label and the tasks as 0 and 1; all 0 if the table has none."""
    targets = (options.label, *options.tasks)
    if not labelled:
        return {name: np.zeros(frame.height, np.uint8) for name in targets}
    return {name: read_label(frame[name], options, locate) for name in targets}


def read_label(values: pl.Series, options: PrepareOptions, locate: RowLocator) -> npt.NDArray[np.uint8]:
    """Return a label as 0 and 1, also from words such as yes and no; raise DataError for any other value."""
    role = "label" if values.name == options.label else "task"
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{locate(row)}: {role} {values.name!r} is missing; it must be 0 or 1; remove these rows")
    if options.positive is not None and values.name == options.label:
        if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
            raise DataError(f"{role} {values.name!r} is a column of {values.dtype}; it must hold 0 and 1")
        return (cast_column(values, pl.String) == options.positive).to_numpy().astype(np.uint8)
    if values.dtype == pl.String:
        words = values.str.strip_chars().str.to_lowercase().replace(LABEL_WORDS)
        numbers = cast_column(words, pl.Float64, strict=False).to_numpy()  # NaN for any other text
    else:
        numbers = as_numbers(values, locate)
    invalid = (numbers != 0) & (numbers != 1)
    if invalid.any():
        row, found = int(invalid.argmax()), label_values(values)
        listed = ", ".join(f"{value!r:.60}" for value in found[:MAX_LABELS]) + " …" * (len(found) > MAX_LABELS)
        advice = label_advice(found)[0] if role == "label" else "repair the rows"
        raise DataError(
            f"{locate(row)}: {role} {values.name!r} must be 0 or 1, found {values[row]!r:.60}; "
            f"its values are {listed}; {advice}"
        )
    return numbers.astype(np.uint8)


def label_values(values: pl.Series) -> list[str]:
    """Return the values of a label as text, the most frequent first."""
    counts = cast_column(values, pl.String).rename("value").drop_nulls().value_counts(name="count")
    return counts.sort("count", "value", descending=[True, False])["value"].to_list()


def label_advice(values: Sequence[str]) -> tuple[str, str]:
    """Return what to do about a label of these values, the most frequent first, and the option that does it.

    The option is "" unless there are exactly two values: with more the choice is the user's.

    >>> label_advice(["bad", "good"])
    ('say which one counts as 1, as in --positive good, or repair the rows', '--positive good')
    >>> label_advice(["0", "1", "NA"])[0]
    "the label is missing where it is 'NA': remove these rows, or count them as 0 with --positive 1"
    """
    texts = {value: LABEL_WORDS.get(value.strip().lower(), value.strip().lower()) for value in values}
    ones, zeros = ([value for value in values if _is_number(texts[value], number)] for number in (1, 0))
    others = [value for value in values if value not in ones and value not in zeros]
    if others and all(texts[value] in MISSING_NUMBER_TEXTS for value in others):
        advice = f"the label is missing where it is {' or '.join(map(repr, others))}: remove these rows"
        if len(ones) == 1:
            advice += f", or count them as 0 with {quote_command('--positive', ones[0])}"
        return advice, ""
    if len(values) == 2:
        flag = quote_command("--positive", (ones or values)[-1])
        return f"say which one counts as 1, as in {flag}, or repair the rows", flag
    if len(values) <= MAX_LABELS:
        return "say which one counts as 1, and all others as 0, with --positive VALUE, or repair the rows", ""
    kind = "numbers" if all(map(_is_number, values)) else "values"
    return f"{len(values):,} different {kind} are no label of clicks: give another column with --label", ""


def _is_number(text: str, number: float | None = None) -> bool:
    """Return whether a text is a number; if ``number`` is given, this one."""
    try:
        return float(text) == number or number is None
    except ValueError:
        return False


class DuplicateColumns:
    """Finds columns with equal content by comparing running hashes."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._digest = {encoder.name: type(encoder).__name__.encode() for encoder in encoders}
        self._candidates = set(self._digest)

    def needs(self, name: str) -> bool:
        """Return whether a column may still equal another one."""
        return name in self._candidates

    def add(self, digests: Mapping[str, bytes]) -> None:
        """Add the digests of a chunk, of all columns for which ``needs`` is true."""
        for name, digest in digests.items():
            self._digest[name] = hashlib.blake2b(self._digest[name] + digest, digest_size=16).digest()
        counts = Counter(self._digest[name] for name in self._candidates)
        self._candidates = {name for name in self._candidates if counts[self._digest[name]] > 1}

    def result(self) -> dict[str, str]:
        """Return {column: the first column with the same content}."""
        first: dict[bytes, str] = {}
        equal = {name: first.setdefault(self._digest[name], name) for name in self._digest if self.needs(name)}
        return {name: original for name, original in equal.items() if name != original}


def hash_arrays(arrays: Iterable[AnyArray]) -> bytes:
    """Return a digest of arrays, with their types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


class LabelCopies:
    """Finds columns with two values, one for every positive row and the other for every negative row."""

    def __init__(self, names: Iterable[str]) -> None:
        self._pairs: dict[str, set[tuple[Any, int]]] = {name: set() for name in names}

    def add(self, frame: pl.DataFrame, labels: AnyArray) -> None:
        """Add rows; a column with more than two values, or with one value for both labels, is removed."""
        for name, pairs in list(self._pairs.items()):
            column, dtype = frame[name], frame[name].dtype
            unsupported = dtype.is_nested() or dtype.is_temporal() or dtype == pl.Object  # a date may be out of range
            if unsupported or column.head(FIRST_ROWS).n_unique() > 2:
                del self._pairs[name]
                continue
            if dtype.is_float():
                column = column.fill_nan(None)  # NaN differs from NaN in a set of pairs
            distinct = pl.DataFrame([column.alias("value"), pl.Series("label", labels)]).unique()
            if distinct.height <= 2:
                pairs.update(distinct.iter_rows())
            if distinct.height > 2 or _is_ambiguous(pairs):
                del self._pairs[name]

    def merge(self, other: LabelCopies) -> None:
        """Add the result of other rows."""
        for name, pairs in list(self._pairs.items()):
            pairs.update(other._pairs.get(name, ()))
            if name not in other._pairs or _is_ambiguous(pairs):
                del self._pairs[name]

    def result(self) -> list[str]:
        """Return the columns that determine the label in every row."""
        return [name for name, pairs in self._pairs.items() if {label for _, label in pairs} == {0, 1}]


def _is_ambiguous(pairs: set[tuple[Any, int]]) -> bool:
    return len(pairs) > 2 or len({value for value, _ in pairs}) < len(pairs)


def make_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a thread pool; by default with one thread per core, at most ``MAX_THREADS``."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, os.cpu_count() or 1))


@pause_garbage_collection()
def map_fields(
    pool: ThreadPoolExecutor, encoders: Sequence[Encoder], function: Callable[[Encoder], Any], rows: int
) -> dict[str, Any]:
    """Return {field: result of a function of its encoder}, computed in parallel if there are enough rows."""
    results = pool.map(function, encoders) if rows >= MIN_PARALLEL_ROWS else map(function, encoders)
    return dict(zip((encoder.name for encoder in encoders), results, strict=True))


def encode(
    parts: Iterable[DayRows], encoders: Sequence[Encoder], threads: int | None = None
) -> Iterator[tuple[DayRows, Columns]]:
    """Yield each part with its ids, numbers and bags, as ``DayWriter.append`` takes them."""
    arguments = {encoder.name: WRITER_ARGUMENTS[encoder.kind] for encoder in encoders}
    with make_pool(threads) as pool:
        for part in parts:

            def encode_field(encoder: Encoder, part: DayRows = part) -> Any:
                return encoder.encode(part.frame[encoder.name], part.locate)

            columns: Columns = {"ids": {}, "dense": {}, "bags": {}}
            for name, values in map_fields(pool, encoders, encode_field, part.frame.height).items():
                columns[arguments[name]][name] = values
            yield part, columns


def split_by_day(part: DayRows, columns: Columns) -> Iterator[tuple[int, Columns]]:
    """Split encoded rows where a day ends; yield each day with the arguments of ``DayWriter.append``."""
    ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in columns["bags"].items()}
    start = 0
    for day, rows in part.days:
        stop = start + rows
        arrays = {"ids": columns["ids"], "dense": columns["dense"], "labels": part.labels}
        day_columns: Columns = {
            argument: {name: values[start:stop] for name, values in fields.items()}
            for argument, fields in arrays.items()
        }
        day_columns["bags"] = {
            name: (values[ends[name][start] : ends[name][stop]], lengths[start:stop])
            for name, (values, lengths) in columns["bags"].items()
        }
        yield day, day_columns
        start = stop
