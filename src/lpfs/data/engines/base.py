"""Engine: how ``prepare`` reads a log. LocalEngine: with polars in this process, chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from lpfs._console import Console
from lpfs.data.days import DayAssigner, make_day_assigner
from lpfs.data.encoders.base import Encoder
from lpfs.data.fit_encoders import FitResult, columns_to_read, new_encoders, observe_training_rows
from lpfs.data.passes import day_rows, encode, split_by_day
from lpfs.data.planning import PreparePlan
from lpfs.data.sources.base import Chunk
from lpfs.data.stream import prefetch

MIN_PREFETCH_BYTES = 1 << 20  # smaller sources are read without a prefetch thread

Encoded = dict[str, dict[str, Any]]  # arguments of ``DayWriter.append``


class Engine(ABC):
    """Read a planned log in several passes; ``prepare`` decides what to keep and writes the Dataset."""

    def __init__(self, plan: PreparePlan, console: Console) -> None:
        self.plan, self.console = plan, console

    @abstractmethod
    def fingerprint(self) -> list[list[Any]]:
        """Return name, size and content hash of every part of the source."""

    @abstractmethod
    def assign_days(self) -> DayAssigner:
        """Return the assigner that gives the day of each row."""

    @abstractmethod
    def observe(self, assigner: DayAssigner, train: set[int]) -> FitResult:
        """Return encoders fitted on the training days, and the statistics of these days."""

    @abstractmethod
    def encode(self, assigner: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Yield all rows with the index of their day; the rows of a day are in the order of the log."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027
        """Release the resources of the engine."""


class LocalEngine(Engine):
    """Read the source in this process; memory grows with the vocabularies, not with the number of rows."""

    def fingerprint(self) -> list[list[Any]]:
        source = self.plan.source
        with self.console.progress("identifying", "MB") as update:
            return source.fingerprint(lambda done: update(done >> 20, source.size >> 20))

    def assign_days(self) -> DayAssigner:
        options = self.plan.options
        return make_day_assigner(
            self.plan.source,
            time=options.time,
            format=options.time_format,
            parts=options.parts,
            ordered=options.ordered,
            progress=lambda chunks: self._track("finding days", chunks),
            split=options.split,
            shuffle=options.seed if options.shuffle else None,
        )

    def observe(self, assigner: DayAssigner, train: set[int]) -> FitResult:
        plan = self.plan
        columns = columns_to_read(plan, new_encoders(plan))
        chunks = self._track("counting", plan.source.chunks(columns, assigner.files(train)))
        return observe_training_rows(day_rows(chunks, assigner, plan.options, train), plan)

    def encode(self, assigner: DayAssigner, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        plan = self.plan
        chunks = self._track("encoding", plan.source.chunks(columns_to_read(plan, encoders)))
        rows = day_rows(chunks, assigner, plan.options, labelled=plan.labelled)
        for part, encoded in encode(rows, encoders):
            yield from split_by_day(part, encoded)

    def _track(self, task: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks; show rows, rows per second and the remaining time, estimated from bytes."""
        rows, done, size = 0, 0, self.plan.source.size
        with self.console.progress(task) as update:
            for chunk in prefetch(chunks, int(size > MIN_PREFETCH_BYTES)):
                yield chunk
                rows += chunk.frame.height
                done += chunk.consumed
                update(done, size, rows)
