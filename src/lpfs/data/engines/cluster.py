"""An engine that cuts a log into pieces, has others do something with each, and puts together what they found.

Counts of values and samples of numbers as rows of one table, whatever the type of a column.

What is done with one piece of a log, wherever that is: the same functions that the embedded engine uses.

A piece begins with what came before it (``Start``), so that days, draws of negatives and samples are those of the
whole log. Everything here is a plain function of plain values that can be pickled.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.days import DayAssigner, DayByColumn, DayByFile, count_roles, day_assigner_from_counts, day_columns
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import CategoricalEncoder
from lpfs.data.encoders.numeric import BinningEncoder
from lpfs.data.encoders.vocabulary import ValueCounter
from lpfs.data.engines.base import Encoded, Engine
from lpfs.data.fit_encoders import FitResult, columns_to_read, new_encoders
from lpfs.data.hashing import HashValues
from lpfs.data.passes import DuplicateColumns, LabelCopies, PieceStart, day_rows, encode, hash_arrays, split_by_day
from lpfs.data.planning import PreparePlan
from lpfs.data.progress import Reporter
from lpfs.data.sources.base import FileSource, Piece
from lpfs.errors import InputError, StateError

SAMPLE = "sample"  # the type of rows that are no counts
COUNTS = {  # of values: the field, the type of the value, itself as text or as the 64 bits of a number, how often
    "field": pl.Int32,
    "type": pl.String,
    "text": pl.String,
    "number": pl.Int64,
    "count": pl.Int64,
}
TYPES = {str(dtype): dtype for dtype in (pl.String(), pl.Int64(), pl.UInt64(), pl.UInt32(), pl.Float64())}
SIGN = np.uint64(1 << 63)


def counts_to_rows(field: int, counts: pl.DataFrame) -> pl.DataFrame:
    """Return values and counts of a field as rows of the table."""
    values = counts["value"]
    text = (
        values
        if values.dtype == pl.String
        else pl.Series("text", [None], pl.String).new_from_index(0, len(values))
    )
    numbers = np.zeros(len(values), np.int64) if values.dtype == pl.String else _as_int64_bits(values)
    return _rows(field, str(values.dtype), text, numbers, counts["count"].cast(pl.Int64))


def sample_to_rows(field: int, values: npt.NDArray[np.float64], marks: HashValues) -> pl.DataFrame:
    """Return a sample as rows of the table: marks as numbers that sort as they do, the values' bits as counts."""
    counts = pl.Series(np.ascontiguousarray(values).view(np.int64))
    return _rows(field, SAMPLE, no_text(len(values)), (marks ^ SIGN).view(np.int64), counts)


def no_text(rows: int) -> pl.Series:
    """Return a column of text that is missing."""
    return pl.repeat(None, rows, dtype=pl.String, eager=True).alias("text")


def _rows(field: int, type: str, text: pl.Series, number: npt.NDArray[np.int64], count: pl.Series) -> pl.DataFrame:
    """Return rows of one field and type."""
    return pl.DataFrame({"text": text, "number": number, "count": count}).select(
        pl.lit(field, pl.Int32).alias("field"), pl.lit(type).alias("type"), "text", "number", "count"
    )


def _as_int64_bits(values: pl.Series) -> npt.NDArray[np.int64]:
    """Return numbers as 64 bits."""
    numbers = values.to_numpy()
    wide = numbers if numbers.dtype.itemsize == 8 else numbers.astype(np.int64)
    return np.ascontiguousarray(wide).view(np.int64)


def rows_to_counts(rows: pl.DataFrame, type: str) -> pl.DataFrame:
    """Return the values of one type with their counts, as ``Counter.take`` takes them."""
    part, dtype = rows.filter(pl.col("type") == type), TYPES[type]
    if dtype == pl.String:
        value = part["text"]
    else:
        numbers = np.ascontiguousarray(part["number"].to_numpy())
        value = pl.Series(numbers.astype(np.uint32) if dtype == pl.UInt32 else numbers.view(type.lower()))
    return pl.DataFrame({"value": value, "count": part["count"].cast(pl.UInt64)})


def rows_to_sample(rows: pl.DataFrame) -> tuple[npt.NDArray[np.float64], HashValues]:
    """Return the values and marks of sampled rows."""
    marks = np.ascontiguousarray(rows["number"].to_numpy()).view(np.uint64) ^ SIGN
    return np.ascontiguousarray(rows["count"].to_numpy()).view(np.float64), marks


@dataclass(frozen=True)
class PieceWithStart:
    """A piece and what comes before it."""

    piece: Piece
    start: PieceStart


@dataclass(frozen=True)
class ChunkState:
    """What the training rows of one chunk showed, apart from counts and samples."""

    rows: int
    positives: int
    fields: tuple[Any, ...]  # notes of each encoder
    digests: tuple[bytes, ...]  # of each column, to tell twins by


def identify(source: FileSource, index: int) -> tuple[list[Any], list[Piece]]:
    """Return who a file is, and how it can be cut."""
    return source.identity(index), source.pieces(index)


def scan_piece(job: PreparePlan, timed: DayByColumn | None, piece: Piece) -> tuple[Tally[str], list[Any]]:
    """Return how many rows of a piece are for training, validation and test, and the days of the first."""
    options, source = job.options, file_source(job)
    own = None if timed is None else timed.copy_empty()
    chunks = source.piece(day_columns(source, options.split, options.time), piece)
    counts = count_roles(chunks, options.split, own)
    return counts, [] if own is None else own.seen()


def count_days(job: PreparePlan, clock: DayAssigner, begun: PieceWithStart) -> Tally[int]:
    """Return how many rows of a piece each day has."""
    options, source = job.options, file_source(job)
    counts: Tally[int] = Tally()
    clock.start_at(begun.start.row)
    for chunk in source.piece(day_columns(source, options.split, options.time), begun.piece):
        if chunk.frame.height:
            for day, rows in clock.assign(chunk):
                counts[day] += chunk.frame.height if rows is None else len(rows)
    return counts


def count_sampled(job: PreparePlan, clock: DayAssigner, train: set[int], begun: PieceWithStart) -> int:
    """Return how many rows of the training days a piece has after negatives were drawn."""
    options = job.options
    chunks = file_source(job).piece(columns_to_read(job, []), begun.piece)
    return sum(part.frame.height for part in day_rows(chunks, clock, options, train, start=begun.start))


def observe(
    job: PreparePlan, clock: DayAssigner, train: set[int], begun: PieceWithStart
) -> Iterator[ChunkState | pl.DataFrame | LabelCopies]:
    """Yield what each chunk showed, then the counts of the values, the samples of the numbers, and the leaks."""
    encoders = new_encoders(job)
    counters = {each.name: ValueCounter() for each in encoders if has_vocabulary(each)}
    label, trained, leaks = job.options.label, begun.start.trained, LabelCopies(each.name for each in encoders)
    quantiles = {
        each.name: each.quantiles for each in new_encoders(job, trained) if isinstance(each, BinningEncoder)
    }
    chunks = file_source(job).piece(columns_to_read(job, encoders), begun.piece)
    for part in day_rows(chunks, clock, job.options, train, start=begun.start):
        digests = []
        chunk_encoders = new_encoders(job, trained)
        for each in chunk_encoders:  # new ones: means are merged chunk by chunk, in the order of the log
            digests.append(hash_arrays(each.observe(part.frame[each.name], part.where)()))
            if each.name in counters and isinstance(each, CategoricalEncoder):
                counters[each.name].add_counts(each.counter.result())
            if isinstance(each, BinningEncoder):
                quantiles[each.name].join(*each.quantiles.sample(), trained)
        leaks.add(part.frame, part.labels[label])
        trained += part.frame.height
        notes = tuple(each.partial_state() for each in chunk_encoders)
        yield ChunkState(part.frame.height, int(part.labels[label].sum()), notes, tuple(digests))
    for index, each in enumerate(encoders):
        if each.name in counters:
            yield counts_to_rows(index, counters[each.name].result())
        elif each.name in quantiles:
            yield sample_to_rows(index, *quantiles[each.name].sample())
    yield leaks


def encode_piece(
    job: PreparePlan, clock: DayAssigner, encoders: Sequence[Encoder], begun: PieceWithStart
) -> Iterator[tuple[int, Encoded]]:
    """Yield the encoded rows of a piece with their days."""
    chunks = file_source(job).piece(columns_to_read(job, encoders), begun.piece)
    parts = day_rows(chunks, clock, job.options, labelled=job.labelled, start=begun.start)
    for part, encoded in encode(parts, encoders, threads=1):
        yield from split_by_day(part, encoded)


def has_vocabulary(encoder: Encoder) -> bool:
    """Whether an encoder keeps a vocabulary."""
    return isinstance(encoder, CategoricalEncoder) and encoder.plan.hash is None


def file_source(job: PreparePlan) -> FileSource:
    """Return the source of a job that was checked to be files."""
    source = job.source
    if not isinstance(source, FileSource):
        raise TypeError(f"not files: {type(source).__name__}")
    return source


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes."""
    return pickle.dumps(value, protocol=5)


Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class VocabularyLimits:
    """Which values of a field get an id of their own."""

    least: int
    most: int | None


@dataclass
class PieceResults:
    """What all pieces showed.

    Args:
        notes: of every chunk, in the order of the log.
        leaks: of every piece.
        types: by field, those of its values; several where files store it as several types.
        counts: by field, of the values that can get an id, in the columns of ``values.COUNTS``.
        left_out: by field of one type, how many values are not in ``counts``, and how often they occur.
        samples: by field, the rows with the lowest marks.

    """

    notes: list[ChunkState] = field(default_factory=list)
    leaks: list[LabelCopies] = field(default_factory=list)
    types: dict[int, list[str]] = field(default_factory=dict)
    counts: dict[int, pl.DataFrame] = field(default_factory=dict)
    left_out: dict[int, tuple[int, int]] = field(default_factory=dict)
    samples: dict[int, pl.DataFrame] = field(default_factory=dict)


class ClusterEngine(Engine):
    """Who does the work has only to run functions over items, and to add up counts."""

    def __init__(self, job: PreparePlan, reporter: Reporter) -> None:
        super().__init__(job, reporter)
        if not isinstance(job.source, FileSource):
            raise InputError("only files can be read by many machines, found a table; use the engine 'embedded'")
        if job.options.ordered:
            raise InputError(
                "ordered: pieces are read side by side, a step back in time is not seen; "
                "leave ordered out, or use the engine 'embedded'"
            )
        self._pieces: list[Piece] = []
        self._rows: list[int] | None = None  # of each piece, those that its clock counts
        self._days: list[Tally[int]] | None = None  # of each piece, its rows by day

    @abstractmethod
    def map(self, what: str, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return what a function gives for each item, in their order."""

    @abstractmethod
    def map_large(
        self, what: str, function: Callable[[Item], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield all that a function yields for each item, in their order."""

    @abstractmethod
    def reduce_counts(
        self,
        what: str,
        function: Callable[[Item], Iterator[ChunkState | pl.DataFrame | LabelCopies]],
        items: Sequence[Item],
        limits: Mapping[int, VocabularyLimits],
    ) -> PieceResults:
        """Return what a function finds for all items, with the counts of like values added up.

        Values beyond the limits may be left out; of a field that has several types, in several files, none may:
        which of them are like is only seen when they are brought to one type.
        """

    def fingerprint(self) -> list[list[Any]]:
        """Hash every file, and cut it."""
        source = file_source(self.job)
        files = list(range(len(source.paths)))
        found = self.map("identifying", partial(identify, source), files)
        self._pieces = [piece for _, pieces in found for piece in pieces]
        return [identity for identity, _ in found]

    def assign_days(self) -> DayAssigner:
        """Read the time and split columns of every piece, or count its rows."""
        options, source = self.job.options, file_source(self.job)
        if options.time is None and options.split is None and options.parts == "files":
            return DayByFile(source)
        timed = None if options.time is None else DayByColumn(options.time, options.time_format)
        if timed is not None:
            self._see_how(timed)
        found = self.map("finding days", partial(scan_piece, self.job, timed), self._all_pieces())
        if timed is not None:
            timed = timed.copy_empty()
            for _, days in found:
                timed.add_days(days)
        counts: Tally[str] = Tally()
        for each, _ in found:
            counts.update(each)
        self._rows = [each["train"] for each, _ in found]
        return day_assigner_from_counts(
            options.split, timed, counts, options.parts, options.seed if options.shuffle else None
        )

    def _see_how(self, timed: DayByColumn) -> None:
        """Let the first rows tell how times are written, as they do for the embedded engine."""
        options, source = self.job.options, file_source(self.job)
        for chunk in source.chunks(day_columns(source, options.split, options.time)):
            count_roles([chunk], options.split, timed)
            if timed.seen():
                return

    def observe(self, clock: DayAssigner, train: set[int]) -> FitResult:
        """Have every piece of the training days counted, and put the counts together."""
        job = self.job
        encoders = new_encoders(job)
        files = clock.files(train)
        begun = [each for each in self._begun(clock) if files is None or each.piece.file in files]
        if any(isinstance(each, BinningEncoder) for each in encoders):
            rows = self.map("drawing", partial(count_sampled, job, clock, train), begun)
            before = accumulate(rows[:-1], initial=0)
            begun = [
                PieceWithStart(each.piece, PieceStart(each.start.row, each.start.days, trained))
                for each, trained in zip(begun, before, strict=True)
            ]
        limits = {
            index: VocabularyLimits(each.plan.min_count or 1, each.plan.max_values)
            for index, each in enumerate(encoders)
            if has_vocabulary(each)
        }
        found = self.reduce_counts("counting", partial(observe, job, clock, train), begun, limits)
        return merge_results(encoders, found)

    def encode(self, clock: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Have every piece encoded; its rows come here to be written."""
        function = partial(encode_piece, self.job, clock, encoders)
        return self.map_large("encoding", function, self._begun(clock))

    def _all_pieces(self) -> list[Piece]:
        if not self._pieces:
            raise StateError("identify comes first: it cuts the log into pieces")
        return self._pieces

    def _begun(self, clock: DayAssigner) -> list[PieceWithStart]:
        """Return the pieces with what comes before each: rows, and rows of each day where they matter."""
        pieces, job = self._all_pieces(), self.job
        rows = [0] * len(pieces) if self._rows is None else [0, *accumulate(self._rows[:-1])]
        begun = [PieceWithStart(piece, PieceStart(row)) for piece, row in zip(pieces, rows, strict=True)]
        if job.options.negatives == 1.0:
            return begun
        if self._days is None:
            self._days = self.map("counting days", partial(count_days, job, clock), begun)
        before: Tally[int] = Tally()
        result = []
        for each, here in zip(begun, self._days, strict=True):
            result.append(PieceWithStart(each.piece, PieceStart(each.start.row, dict(before))))
            before.update(here)
        return result


def merge_results(encoders: list[Encoder], found: PieceResults) -> FitResult:
    """Return finished encoders, as if they had observed chunk after chunk themselves."""
    twins, leaks = DuplicateColumns(encoders), LabelCopies(each.name for each in encoders)
    rows = positives = 0
    for noted in found.notes:
        rows, positives = rows + noted.rows, positives + noted.positives
        for each, notes in zip(encoders, noted.fields, strict=True):
            each.merge(notes)
        digests = zip(encoders, noted.digests, strict=True)
        twins.add({each.name: digest for each, digest in digests if twins.needs(each.name)})
    for other in found.leaks:
        leaks.join(other)
    for index, each in enumerate(encoders):
        if isinstance(each, CategoricalEncoder) and has_vocabulary(each):
            types = found.types.get(index, ())
            for type_ in types:
                left_out = found.left_out[index] if len(types) == 1 else (0, 0)
                each.counter.add_counts(rows_to_counts(found.counts[index], type_), left_out)
        elif isinstance(each, BinningEncoder) and index in found.samples:
            each.quantiles.join(*rows_to_sample(found.samples[index]), rows)
        each.finish()
    return FitResult(encoders, twins.result(), leaks.result(), rows, positives)
