"""The embedded engine: polars in this process, chunk after chunk.

The contract of engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lpfs.data.days import DayAssigner, make_day_assigner
from lpfs.data.encoders.base import Encoder
from lpfs.data.fit_encoders import FitResult, columns_to_read, new_encoders, observe_training_rows
from lpfs.data.passes import day_rows, encode, split_by_day
from lpfs.data.planning import PreparePlan
from lpfs.data.progress import Reporter
from lpfs.data.sources.base import Chunk
from lpfs.data.stream import prefetch

if TYPE_CHECKING:
    from lpfs.data.days import DayAssigner
    from lpfs.data.encoders.base import Encoder
    from lpfs.data.fit_encoders import FitResult


Encoded = dict[str, dict[str, Any]]  # the arguments of ``DayWriter.append``


class Engine(ABC):
    """Reads a planned log, several times over; ``prepare`` decides and writes."""

    def __init__(self, job: PreparePlan, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter

    @abstractmethod
    def fingerprint(self) -> list[list[Any]]:
        """Return name, size and content hash of every part of the source."""

    @abstractmethod
    def assign_days(self) -> DayAssigner:
        """Return what tells the day of each row."""

    @abstractmethod
    def observe(self, clock: DayAssigner, train: set[int]) -> FitResult:
        """Return what the training days show."""

    @abstractmethod
    def encode(self, clock: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Yield all rows with their day, those of one day in the order of the log."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(  # noqa: B027
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of what the engine holds."""


SMALL = 1 << 20  # bytes of a source that needs no reading ahead


class LocalEngine(Engine):
    """Reads the whole source itself; memory grows with the vocabularies and not with the rows."""

    def fingerprint(self) -> list[list[Any]]:
        """Hash every file."""
        source = self.job.source
        with self.reporter.counting("identifying", "MB") as told:
            return source.fingerprint(lambda done: told(done >> 20, source.size >> 20))

    def assign_days(self) -> DayAssigner:
        """Read the time and split columns, or count the rows."""
        options = self.job.options
        return make_day_assigner(
            self.job.source,
            time=options.time,
            format=options.time_format,
            parts=options.parts,
            ordered=options.ordered,
            progress=lambda chunks: self._track("finding days", chunks),
            split=options.split,
            shuffle=options.seed if options.shuffle else None,
        )

    def observe(self, clock: DayAssigner, train: set[int]) -> FitResult:
        """Show the training days to the encoders."""
        job = self.job
        chunks = self._track(
            "counting", job.source.chunks(columns_to_read(job, new_encoders(job)), clock.files(train))
        )
        return observe_training_rows(day_rows(chunks, clock, job.options, train), job)

    def encode(self, clock: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Encode chunk after chunk."""
        job = self.job
        chunks = self._track("encoding", job.source.chunks(columns_to_read(job, encoders)))
        for part, encoded in encode(day_rows(chunks, clock, job.options, labelled=job.labelled), encoders):
            yield from split_by_day(part, encoded)

    def _track(self, what: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        size = self.job.source.size
        return self.reporter.track(prefetch(chunks, int(size > SMALL)), what, size)
