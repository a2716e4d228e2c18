"""ClusterEngine: process the pieces of a log on many machines and merge the results.

A piece starts with the state at its first row (``PieceStart``), so that days, sampled negatives and samples of
numbers are those of the whole log; the result is bitwise identical to that of the local engine. The functions for
one piece take and return values that can be pickled. Counts of values and samples of numbers of all columns are
rows of one table.
"""

from __future__ import annotations

import pickle
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs._console import Console
from lpfs.data.days import DayAssigner, DayByColumn, DayByFile, count_roles, day_assigner_from_counts, day_columns
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import CategoricalEncoder
from lpfs.data.encoders.numeric import BinningEncoder
from lpfs.data.encoders.vocabulary import ValueCounter, VocabularyLimits
from lpfs.data.engines.base import Encoded, Engine
from lpfs.data.fit_encoders import FitResult, columns_to_read, new_encoders
from lpfs.data.hashing import HashValues
from lpfs.data.passes import DuplicateColumns, LabelCopies, PieceStart, day_rows, encode, hash_arrays, split_by_day
from lpfs.data.planning import PreparePlan
from lpfs.data.remote import as_url, remote_access
from lpfs.data.sources.base import FileSource, Piece
from lpfs.errors import InputError, StateError

COUNT_COLUMNS = {  # the table of counts of values and samples of numbers
    "field": pl.Int32,  # index of the field
    "type": pl.String,  # type of the value, or SAMPLE_TYPE
    "text": pl.String,  # the value, if it is text
    "number": pl.Int64,  # the 64 bits of the value, if it is a number; of a sample, the sampling hash
    "count": pl.Int64,  # number of occurrences; of a sample, the 64 bits of the number
}
SAMPLE_TYPE = "sample"
PICKLE_PROTOCOL = 5
VALUE_TYPES = {str(dtype): dtype for dtype in (pl.String(), pl.Int64(), pl.UInt64(), pl.UInt32(), pl.Float64())}
SIGN_BIT = np.uint64(1 << 63)

Item = TypeVar("Item")
Result = TypeVar("Result")


class PieceWithStart(NamedTuple):
    """A piece and the state at its first row."""

    piece: Piece
    start: PieceStart


class ChunkState(NamedTuple):
    """The statistics of the training rows of one chunk, without counts and samples."""

    rows: int
    positives: int
    states: tuple[Any, ...]  # partial state of each encoder
    digests: tuple[bytes, ...]  # digest of each column, to find duplicate columns


@dataclass
class PieceResults:
    """The merged results of all pieces; dictionaries have the index of a field as key."""

    chunks: list[ChunkState] = field(default_factory=list)  # in the order of the log
    label_copies: list[LabelCopies] = field(default_factory=list)  # candidates of every piece
    types: dict[int, list[str]] = field(default_factory=dict)  # several if the files store different types
    counts: dict[int, pl.DataFrame] = field(default_factory=dict)  # COUNT_COLUMNS, of values that can get an id
    left_out: dict[int, tuple[int, int]] = field(default_factory=dict)  # other values and their rows, if one type
    samples: dict[int, pl.DataFrame] = field(default_factory=dict)  # rows with the lowest hashes


class ClusterEngine(Engine):
    """Process a log by pieces; a subclass runs functions over items and sums up counts."""

    def __init__(self, plan: PreparePlan, console: Console) -> None:
        super().__init__(plan, console)
        if not isinstance(plan.source, FileSource):
            raise InputError("a cluster can only read files, found a table in memory; use the engine 'embedded'")
        if plan.options.ordered:
            raise InputError(
                "ordered: pieces are read in parallel, so the order of times cannot be checked; "
                "omit ordered, or use the engine 'embedded'"
            )
        self._pieces: list[Piece] = []
        self._rows: list[int] | None = None  # of each piece, the rows that the day assigner counts
        self._days: list[Counter[int]] | None = None  # of each piece, the rows by day

    @abstractmethod
    def map(self, task: str, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the result of a function for each item, in order."""

    @abstractmethod
    def map_large(
        self, task: str, function: Callable[[Item], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield all results of a function for each item, in order."""

    @abstractmethod
    def reduce_counts(
        self,
        task: str,
        function: Callable[[Item], Iterator[ChunkState | pl.DataFrame | LabelCopies]],
        items: Sequence[Item],
        limits: Mapping[int, VocabularyLimits],
    ) -> PieceResults:
        """Return the results of a function for all items, with the counts of equal values summed up.

        Values beyond the limits may be left out, except for a field that has different types in different files:
        which of its values are equal is only known after they are converted to one type.
        """

    def fingerprint(self) -> list[list[Any]]:
        source = file_source(self.plan)
        results = self.map("identifying", partial(identify_file, source), list(range(len(source.paths))))
        self._pieces = [piece for _, pieces in results for piece in pieces]
        return [identity for identity, _ in results]

    def assign_days(self) -> DayAssigner:
        options, source = self.plan.options, file_source(self.plan)
        if options.time is None and options.split is None and options.parts == "files":
            return DayByFile(source)
        timed = None if options.time is None else DayByColumn(options.time, options.time_format)
        if timed is not None:  # the format of the times is detected from the first rows, as by the local engine
            for chunk in source.chunks(day_columns(source, options.split, options.time)):
                count_roles([chunk], options.split, timed)
                if timed.seen():
                    break
        results = self.map("finding days", partial(scan_piece, self.plan, timed), self._all_pieces())
        self._rows = [counts["train"] for counts, _ in results]
        if timed is not None:
            timed = timed.copy_empty()
            for _, days in results:
                timed.add_days(days)
        total = sum((counts for counts, _ in results), Counter())
        seed = options.seed if options.shuffle else None
        return day_assigner_from_counts(options.split, timed, total, options.parts, seed)

    def observe(self, assigner: DayAssigner, train: set[int]) -> FitResult:
        plan, encoders, files = self.plan, new_encoders(self.plan), assigner.files(train)
        items = [item for item in self._pieces_with_start(assigner) if files is None or item.piece.file in files]
        if any(isinstance(encoder, BinningEncoder) for encoder in encoders):
            rows = self.map("sampling", partial(count_sampled, plan, assigner, train), items)
            items = [
                PieceWithStart(piece, PieceStart(start.row, start.days, trained))
                for (piece, start), trained in zip(items, accumulate(rows[:-1], initial=0), strict=True)
            ]
        limits = {
            index: encoder.limits
            for index, encoder in enumerate(encoders)
            if isinstance(encoder, CategoricalEncoder) and encoder.plan.hash is None
        }
        results = self.reduce_counts("counting", partial(observe_piece, plan, assigner, train), items, limits)
        return merge_results(encoders, results)

    def encode(self, assigner: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        items = self._pieces_with_start(assigner)
        return self.map_large("encoding", partial(encode_piece, self.plan, assigner, encoders), items)

    def _all_pieces(self) -> list[Piece]:
        if not self._pieces:
            raise StateError("the log has no pieces yet; call fingerprint first, it divides the log into pieces")
        return self._pieces

    def _pieces_with_start(self, assigner: DayAssigner) -> list[PieceWithStart]:
        """Return the pieces with the rows before each, and the rows before it by day if negatives are sampled."""
        pieces, plan = self._all_pieces(), self.plan
        rows = [0] * len(pieces) if self._rows is None else accumulate(self._rows[:-1], initial=0)
        items = [PieceWithStart(piece, PieceStart(row)) for piece, row in zip(pieces, rows, strict=True)]
        if plan.options.negatives == 1.0:
            return items
        if self._days is None:
            self._days = self.map("counting days", partial(count_days, plan, assigner), items)
        before: Counter[int] = Counter()
        result = []
        for item, days in zip(items, self._days, strict=True):
            result.append(PieceWithStart(item.piece, PieceStart(item.start.row, dict(before))))
            before.update(days)
        return result


def merge_results(encoders: list[Encoder], results: PieceResults) -> FitResult:
    """Return finished encoders, identical to encoders that observed all chunks in order."""
    duplicates, copies = DuplicateColumns(encoders), LabelCopies(encoder.name for encoder in encoders)
    rows = positives = 0
    for chunk in results.chunks:
        rows, positives = rows + chunk.rows, positives + chunk.positives
        for encoder, state in zip(encoders, chunk.states, strict=True):
            encoder.merge(state)
        digests = zip(encoders, chunk.digests, strict=True)
        duplicates.add({encoder.name: digest for encoder, digest in digests if duplicates.needs(encoder.name)})
    for piece_copies in results.label_copies:
        copies.merge(piece_copies)
    for index, encoder in enumerate(encoders):
        if isinstance(encoder, CategoricalEncoder) and has_vocabulary(encoder):
            types = results.types.get(index, ())
            for value_type in types:
                left_out = results.left_out[index] if len(types) == 1 else (0, 0)
                encoder.counter.add_counts(rows_to_counts(results.counts[index], value_type), left_out)
        elif isinstance(encoder, BinningEncoder) and index in results.samples:
            encoder.quantiles.merge(*rows_to_sample(results.samples[index]), rows)
        encoder.finish()
    return FitResult(encoders, duplicates.result(), copies.result(), rows, positives)


# Functions for one piece of the log. They run on the workers.


def identify_file(source: FileSource, index: int) -> tuple[list[Any], list[Piece]]:
    """Return the identity of a file (name, size, content hash) and its pieces."""
    return source.identity(index), source.pieces(index)


def scan_piece(plan: PreparePlan, timed: DayByColumn | None, piece: Piece) -> tuple[Counter[str], list[Any]]:
    """Return the number of training, validation and test rows of a piece, and the days of its training rows."""
    split, source = plan.options.split, file_source(plan)
    timed = None if timed is None else timed.copy_empty()
    counts = count_roles(source.piece(day_columns(source, split, plan.options.time), piece), split, timed)
    return counts, [] if timed is None else timed.seen()


def count_days(plan: PreparePlan, assigner: DayAssigner, item: PieceWithStart) -> Counter[int]:
    """Return the number of rows of a piece by day."""
    options, source = plan.options, file_source(plan)
    counts: Counter[int] = Counter()
    assigner.start_at(item.start.row)
    for chunk in source.piece(day_columns(source, options.split, options.time), item.piece):
        if chunk.frame.height:
            for day, rows in assigner.assign(chunk):
                counts[day] += chunk.frame.height if rows is None else len(rows)
    return counts


def count_sampled(plan: PreparePlan, assigner: DayAssigner, train: set[int], item: PieceWithStart) -> int:
    """Return the number of training rows of a piece after the negatives are sampled."""
    chunks = file_source(plan).piece(columns_to_read(plan, []), item.piece)
    return sum(part.frame.height for part in day_rows(chunks, assigner, plan.options, train, start=item.start))


def observe_piece(
    plan: PreparePlan, assigner: DayAssigner, train: set[int], item: PieceWithStart
) -> Iterator[ChunkState | pl.DataFrame | LabelCopies]:
    """Yield the state of each chunk, then the counts of values, the samples of numbers, and the label copies."""
    label, trained = plan.options.label, item.start.trained
    encoders = new_encoders(plan, trained)
    copies = LabelCopies(encoder.name for encoder in encoders)
    counters = {encoder.name: ValueCounter() for encoder in encoders if has_vocabulary(encoder)}
    quantiles = {encoder.name: encoder.quantiles for encoder in encoders if isinstance(encoder, BinningEncoder)}
    chunks = file_source(plan).piece(columns_to_read(plan, encoders), item.piece)
    for part in day_rows(chunks, assigner, plan.options, train, start=item.start):
        digests = []
        chunk_encoders = new_encoders(plan, trained)  # new ones: states are merged in the order of the log
        for encoder in chunk_encoders:
            digests.append(hash_arrays(encoder.observe(part.frame[encoder.name], part.locate)()))
            if encoder.name in counters and isinstance(encoder, CategoricalEncoder):
                counters[encoder.name].add_counts(encoder.counter.result())
            if isinstance(encoder, BinningEncoder):
                quantiles[encoder.name].merge(*encoder.quantiles.sample(), trained)
        copies.add(part.frame, part.labels[label])
        trained += part.frame.height
        states = tuple(encoder.partial_state() for encoder in chunk_encoders)
        yield ChunkState(part.frame.height, int(part.labels[label].sum()), states, tuple(digests))
    for index, encoder in enumerate(encoders):
        if encoder.name in counters:
            yield counts_to_rows(index, counters[encoder.name].result())
        elif isinstance(encoder, BinningEncoder):
            yield sample_to_rows(index, *encoder.quantiles.sample())
    yield copies


def encode_piece(
    plan: PreparePlan, assigner: DayAssigner, encoders: Sequence[Encoder], item: PieceWithStart
) -> Iterator[tuple[int, Encoded]]:
    """Yield the encoded rows of a piece with the index of their day."""
    chunks = file_source(plan).piece(columns_to_read(plan, encoders), item.piece)
    rows = day_rows(chunks, assigner, plan.options, labelled=plan.labelled, start=item.start)
    for part, encoded in encode(rows, encoders, threads=1):
        yield from split_by_day(part, encoded)


def has_vocabulary(encoder: Encoder) -> bool:
    """Return whether an encoder has a vocabulary."""
    return isinstance(encoder, CategoricalEncoder) and encoder.plan.hash is None


def file_source(plan: PreparePlan) -> FileSource:
    """Return the source of a plan, which ``ClusterEngine`` has checked to be files."""
    return cast(FileSource, plan.source)


# Counts and samples as rows of one table.


def counts_to_rows(field: int, counts: pl.DataFrame) -> pl.DataFrame:
    """Return the values and counts of a field as rows of the table."""
    values = counts["value"]
    text, numbers = (
        (values, np.zeros(len(values), np.int64)) if values.dtype == pl.String else (None, values.to_numpy())
    )
    if numbers.dtype.itemsize < 8:
        numbers = numbers.astype(np.int64)
    bits, type = np.ascontiguousarray(numbers).view(np.int64), str(values.dtype)
    rows = {"field": field, "type": type, "text": text, "number": bits, "count": counts["count"].cast(pl.Int64)}
    return pl.DataFrame(rows, schema=COUNT_COLUMNS)


def sample_to_rows(field: int, values: npt.NDArray[np.float64], hashes: HashValues) -> pl.DataFrame:
    """Return a sample as rows of the table: hashes as signed numbers in the same order, values as 64 bits."""
    number, bits = (hashes ^ SIGN_BIT).view(np.int64), np.ascontiguousarray(values).view(np.int64)
    rows = {"field": field, "type": SAMPLE_TYPE, "text": None, "number": number, "count": bits}
    return pl.DataFrame(rows, schema=COUNT_COLUMNS)


def rows_to_counts(rows: pl.DataFrame, type: str) -> pl.DataFrame:
    """Return the values of one type with their counts, as ``ValueCounter.add_counts`` expects them."""
    part, dtype = rows.filter(pl.col("type") == type), VALUE_TYPES[type]
    if dtype == pl.String:
        value = part["text"]
    else:
        numbers = np.ascontiguousarray(part["number"].to_numpy())
        value = pl.Series(numbers.astype(np.uint32) if dtype == pl.UInt32 else numbers.view(type.lower()))
    return pl.DataFrame({"value": value, "count": part["count"].cast(pl.UInt64)})


def rows_to_sample(rows: pl.DataFrame) -> tuple[npt.NDArray[np.float64], HashValues]:
    """Return the values and hashes of a sample."""
    hashes = np.ascontiguousarray(rows["number"].to_numpy()).view(np.uint64) ^ SIGN_BIT
    return np.ascontiguousarray(rows["count"].to_numpy()).view(np.float64), hashes


# Transfer of values between machines.


@dataclass(frozen=True)
class SharedFolder:
    """A new directory at a path or URL that all machines can access, for values that are passed as files."""

    path: str

    @classmethod
    def create_in(cls, parent: str) -> SharedFolder:
        """Return a directory with a unique name in ``parent``."""
        folder = cls(f"{(as_url(parent) or parent).rstrip('/')}/lpfs-{uuid.uuid4().hex}")
        with remote_access(folder.path) as (system, root):
            system.makedirs(root, exist_ok=True)
        return folder

    def write(self, value: Any) -> str:
        """Write a value; return its name."""
        name = uuid.uuid4().hex
        with remote_access(self.path) as (system, root):
            system.pipe_file(f"{root}/{name}", pickle.dumps(value, PICKLE_PROTOCOL))
        return name

    def write_all(self, function: Callable[[Any], Iterator[Any]], item: Any) -> list[str]:
        """Write all values that a function yields for an item; return their names in order."""
        return [self.write(value) for value in function(item)]

    def pop(self, name: str) -> Any:
        """Return a value and remove its file."""
        with remote_access(self.path) as (system, root):
            data = system.cat_file(f"{root}/{name}")
            system.rm_file(f"{root}/{name}")
        return pickle.loads(data)

    def remove(self) -> None:
        """Remove the directory with all files in it, for example of tasks that ran twice."""
        with remote_access(self.path) as (system, root):
            if system.exists(root):
                system.rm(root, recursive=True)
