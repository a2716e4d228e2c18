"""An engine that cuts a log into pieces, has others do something with each, and puts together what they found."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import polars as pl

from lpfs.data.encoders.categorical import CategoricalEncoder
from lpfs.data.passes import Start
from lpfs.data.encoders.base import Encoder
from lpfs.data.fit_encoders import Observed, new_encoders
from lpfs.data.encode.numeric import BinsEncoder
from lpfs.data.encode.twins import Leaks, Twins
from lpfs.data.engines import pieces as work
from lpfs.data.engines.engine import Encoded, Engine
from lpfs.data.engines.pieces import Begun, Noted, counts_values, file_source
from lpfs.data.engines.values import sample_of, values_of
from lpfs.data.plan.job import Job
from lpfs.data.progress import Reporter
from lpfs.data.raw.choose import settled, survey, telling_columns
from lpfs.data.days import Clock, ColumnClock, FileClock
from lpfs.data.sources.base import FileSource, Piece
from lpfs.errors import InputError, StateError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Which values of a field get an id of their own."""

    least: int
    most: int | None


@dataclass
class Found:
    """What all pieces showed.

    Args:
        notes: of every chunk, in the order of the log.
        leaks: of every piece.
        types: by field, those of its values; several where files store it as several types.
        counts: by field, of the values that can get an id, in the columns of ``values.COUNTS``.
        left_out: by field of one type, how many values are not in ``counts``, and how often they occur.
        samples: by field, the rows with the lowest marks.

    """

    notes: list[Noted] = field(default_factory=list)
    leaks: list[Leaks] = field(default_factory=list)
    types: dict[int, list[str]] = field(default_factory=dict)
    counts: dict[int, pl.DataFrame] = field(default_factory=dict)
    left_out: dict[int, tuple[int, int]] = field(default_factory=dict)
    samples: dict[int, pl.DataFrame] = field(default_factory=dict)


class PieceEngine(Engine):
    """Who does the work has only to run functions over items, and to add up counts."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
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
    def each(self, what: str, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return what a function gives for each item, in their order."""

    @abstractmethod
    def lots(
        self, what: str, function: Callable[[Item], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield all that a function yields for each item, in their order."""

    @abstractmethod
    def add_up(
        self,
        what: str,
        function: Callable[[Item], Iterator[Noted | pl.DataFrame | Leaks]],
        items: Sequence[Item],
        limits: Mapping[int, Limits],
    ) -> Found:
        """Return what a function finds for all items, with the counts of like values added up.

        Values beyond the limits may be left out; of a field that has several types, in several files, none may:
        which of them are like is only seen when they are brought to one type.
        """

    def identify(self) -> list[list[Any]]:
        """Hash every file, and cut it."""
        source = file_source(self.job)
        files = list(range(len(source.paths)))
        found = self.each("identifying", partial(work.identify, source), files)
        self._pieces = [piece for _, pieces in found for piece in pieces]
        return [identity for identity, _ in found]

    def clock(self) -> Clock:
        """Read the time and split columns of every piece, or count its rows."""
        options, source = self.job.options, file_source(self.job)
        if options.time is None and options.split is None and options.parts == "files":
            return FileClock(source)
        timed = None if options.time is None else ColumnClock(options.time, options.time_format)
        if timed is not None:
            self._see_how(timed)
        found = self.each("finding days", partial(work.look, self.job, timed), self._all_pieces())
        if timed is not None:
            timed = timed.fresh()
            for _, days in found:
                timed.take(days)
        counts: Tally[str] = Tally()
        for each, _ in found:
            counts.update(each)
        self._rows = [each["train"] for each, _ in found]
        return settled(options.split, timed, counts, options.parts, options.seed if options.shuffle else None)

    def _see_how(self, timed: ColumnClock) -> None:
        """Let the first rows tell how times are written, as they do for the embedded engine."""
        options, source = self.job.options, file_source(self.job)
        for chunk in source.chunks(telling_columns(source, options.split, options.time)):
            survey([chunk], options.split, timed)
            if timed.seen():
                return

    def observe(self, clock: Clock, train: set[int]) -> Observed:
        """Have every piece of the training days counted, and put the counts together."""
        job = self.job
        encoders = new_encoders(job)
        files = clock.files(train)
        begun = [each for each in self._begun(clock) if files is None or each.piece.file in files]
        if any(isinstance(each, BinsEncoder) for each in encoders):
            rows = self.each("drawing", partial(work.drawn, job, clock, train), begun)
            before = accumulate(rows[:-1], initial=0)
            begun = [
                Begun(each.piece, Start(each.start.row, each.start.days, trained))
                for each, trained in zip(begun, before, strict=True)
            ]
        limits = {
            index: Limits(each.plan.min_count or 1, each.plan.max_values)
            for index, each in enumerate(encoders)
            if counts_values(each)
        }
        found = self.add_up("counting", partial(work.observe, job, clock, train), begun, limits)
        return put_together(encoders, found)

    def encode(self, clock: Clock, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Have every piece encoded; its rows come here to be written."""
        function = partial(work.encode_piece, self.job, clock, encoders)
        return self.lots("encoding", function, self._begun(clock))

    def _all_pieces(self) -> list[Piece]:
        if not self._pieces:
            raise StateError("identify comes first: it cuts the log into pieces")
        return self._pieces

    def _begun(self, clock: Clock) -> list[Begun]:
        """Return the pieces with what comes before each: rows, and rows of each day where they matter."""
        pieces, job = self._all_pieces(), self.job
        rows = [0] * len(pieces) if self._rows is None else [0, *accumulate(self._rows[:-1])]
        begun = [Begun(piece, Start(row)) for piece, row in zip(pieces, rows, strict=True)]
        if job.options.negatives == 1.0:
            return begun
        if self._days is None:
            self._days = self.each("counting days", partial(work.tally, job, clock), begun)
        before: Tally[int] = Tally()
        result = []
        for each, here in zip(begun, self._days, strict=True):
            result.append(Begun(each.piece, Start(each.start.row, dict(before))))
            before.update(here)
        return result


def put_together(encoders: list[Encoder], found: Found) -> Observed:
    """Return finished encoders, as if they had observed chunk after chunk themselves."""
    twins, leaks = Twins(encoders), Leaks(each.name for each in encoders)
    rows = positives = 0
    for noted in found.notes:
        rows, positives = rows + noted.rows, positives + noted.positives
        for each, notes in zip(encoders, noted.fields, strict=True):
            each.join(notes)
        digests = zip(encoders, noted.digests, strict=True)
        twins.add({each.name: digest for each, digest in digests if twins.needs(each.name)})
    for other in found.leaks:
        leaks.join(other)
    for index, each in enumerate(encoders):
        if isinstance(each, CategoricalEncoder) and counts_values(each):
            types = found.types.get(index, ())
            for type_ in types:
                left_out = found.left_out[index] if len(types) == 1 else (0, 0)
                each.counter.take(values_of(found.counts[index], type_), left_out)
        elif isinstance(each, BinsEncoder) and index in found.samples:
            each.quantiles.join(*sample_of(found.samples[index]), rows)
        each.finish()
    return Observed(encoders, twins.found(), leaks.found(), rows, positives)
