"""The contract of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lpfs.data.plan.job import Job
from lpfs.data.progress import Reporter

if TYPE_CHECKING:
    from lpfs.data.encoders.base import Encoder
    from lpfs.data.fit_encoders import Observed
    from lpfs.data.days import Clock

Encoded = dict[str, dict[str, Any]]  # the arguments of ``DayWriter.append``


class Engine(ABC):
    """Reads a planned log, several times over; ``prepare`` decides and writes."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter

    @abstractmethod
    def identify(self) -> list[list[Any]]:
        """Return name, size and content hash of every part of the source."""

    @abstractmethod
    def clock(self) -> Clock:
        """Return what tells the day of each row."""

    @abstractmethod
    def observe(self, clock: Clock, train: set[int]) -> Observed:
        """Return what the training days show."""

    @abstractmethod
    def encode(self, clock: Clock, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Yield all rows with their day, those of one day in the order of the log."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(  # noqa: B027
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of what the engine holds."""
