"""The embedded engine: polars in this process, chunk after chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lpfs.data.passes import day_rows
from lpfs.data.encoders.base import Encoder
from lpfs.data.fit_encoders import Observed, columns, new_encoders, show
from lpfs.data.encode.passes import by_day, encode
from lpfs.data.engines.engine import Encoded, Engine
from lpfs.data.prefetch import prefetch
from lpfs.data.raw.choose import make_clock
from lpfs.data.days import Clock
from lpfs.data.sources.base import Chunk

SMALL = 1 << 20  # bytes of a source that needs no reading ahead


class EmbeddedEngine(Engine):
    """Reads the whole source itself; memory grows with the vocabularies and not with the rows."""

    def identify(self) -> list[list[Any]]:
        """Hash every file."""
        source = self.job.source
        with self.reporter.counting("identifying", "MB") as told:
            return source.fingerprint(lambda done: told(done >> 20, source.size >> 20))

    def clock(self) -> Clock:
        """Read the time and split columns, or count the rows."""
        options = self.job.options
        return make_clock(
            self.job.source,
            time=options.time,
            format=options.time_format,
            parts=options.parts,
            ordered=options.ordered,
            progress=lambda chunks: self._track("finding days", chunks),
            split=options.split,
            shuffle=options.seed if options.shuffle else None,
        )

    def observe(self, clock: Clock, train: set[int]) -> Observed:
        """Show the training days to the encoders."""
        job = self.job
        chunks = self._track("counting", job.source.chunks(columns(job, new_encoders(job)), clock.files(train)))
        return show(day_rows(chunks, clock, job.options, train), job)

    def encode(self, clock: Clock, encoders: Sequence[Encoder]) -> Iterator[tuple[int, Encoded]]:
        """Encode chunk after chunk."""
        job = self.job
        chunks = self._track("encoding", job.source.chunks(columns(job, encoders)))
        for part, encoded in encode(day_rows(chunks, clock, job.options, labelled=job.labelled), encoders):
            yield from by_day(part, encoded)

    def _track(self, what: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        size = self.job.source.size
        return self.reporter.track(prefetch(chunks, int(size > SMALL)), what, size)
