"""What is done with one piece of a log, wherever that is: the same functions that the embedded engine uses.

A piece begins with what came before it (``Start``), so that days, draws of negatives and samples are those of the
whole log. Everything here is a plain function of plain values that can be pickled.
"""

from __future__ import annotations

import pickle
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from lpfs.data.encoders.categorical import CategoricalEncoder
from lpfs.data.passes import Start, day_rows
from lpfs.data.encoders.base import Encoder
from lpfs.data.fit_encoders import columns, new_encoders
from lpfs.data.encode.numeric import BinsEncoder
from lpfs.data.encode.passes import by_day, encode
from lpfs.data.encode.twins import Leaks, digested
from lpfs.data.encoders.vocabulary import Counter
from lpfs.data.engines.engine import Encoded
from lpfs.data.engines.values import plain_counts, plain_sample
from lpfs.data.plan.job import Job
from lpfs.data.raw.choose import survey, telling_columns
from lpfs.data.days import Clock, ColumnClock
from lpfs.data.sources.base import FileSource, Piece


@dataclass(frozen=True)
class Begun:
    """A piece and what comes before it."""

    piece: Piece
    start: Start


@dataclass(frozen=True)
class Noted:
    """What the training rows of one chunk showed, apart from counts and samples."""

    rows: int
    positives: int
    fields: tuple[Any, ...]  # notes of each encoder
    digests: tuple[bytes, ...]  # of each column, to tell twins by


def identify(source: FileSource, index: int) -> tuple[list[Any], list[Piece]]:
    """Return who a file is, and how it can be cut."""
    return source.identity(index), source.pieces(index)


def look(job: Job, timed: ColumnClock | None, piece: Piece) -> tuple[Tally[str], list[Any]]:
    """Return how many rows of a piece are for training, validation and test, and the days of the first."""
    options, source = job.options, file_source(job)
    own = None if timed is None else timed.fresh()
    chunks = source.piece(telling_columns(source, options.split, options.time), piece)
    counts = survey(chunks, options.split, own)
    return counts, [] if own is None else own.seen()


def tally(job: Job, clock: Clock, begun: Begun) -> Tally[int]:
    """Return how many rows of a piece each day has."""
    options, source = job.options, file_source(job)
    counts: Tally[int] = Tally()
    clock.begin(begun.start.row)
    for chunk in source.piece(telling_columns(source, options.split, options.time), begun.piece):
        if chunk.frame.height:
            for day, rows in clock.assign(chunk):
                counts[day] += chunk.frame.height if rows is None else len(rows)
    return counts


def drawn(job: Job, clock: Clock, train: set[int], begun: Begun) -> int:
    """Return how many rows of the training days a piece has after negatives were drawn."""
    options = job.options
    chunks = file_source(job).piece(columns(job, []), begun.piece)
    return sum(part.frame.height for part in day_rows(chunks, clock, options, train, start=begun.start))


def observe(job: Job, clock: Clock, train: set[int], begun: Begun) -> Iterator[Noted | pl.DataFrame | Leaks]:
    """Yield what each chunk showed, then the counts of the values, the samples of the numbers, and the leaks."""
    encoders = new_encoders(job)
    counters = {each.name: Counter() for each in encoders if counts_values(each)}
    label, trained, leaks = job.options.label, begun.start.trained, Leaks(each.name for each in encoders)
    quantiles = {each.name: each.quantiles for each in new_encoders(job, trained) if isinstance(each, BinsEncoder)}
    chunks = file_source(job).piece(columns(job, encoders), begun.piece)
    for part in day_rows(chunks, clock, job.options, train, start=begun.start):
        digests = []
        chunk_encoders = new_encoders(job, trained)
        for each in chunk_encoders:  # new ones: means are merged chunk by chunk, in the order of the log
            digests.append(digested(each.observe(part.frame[each.name], part.where)()))
            if each.name in counters and isinstance(each, CategoricalEncoder):
                counters[each.name].take(each.counter.result())
            if isinstance(each, BinsEncoder):
                quantiles[each.name].join(*each.quantiles.sample(), trained)
        leaks.add(part.frame, part.labels[label])
        trained += part.frame.height
        notes = tuple(each.notes() for each in chunk_encoders)
        yield Noted(part.frame.height, int(part.labels[label].sum()), notes, tuple(digests))
    for index, each in enumerate(encoders):
        if each.name in counters:
            yield plain_counts(index, counters[each.name].result())
        elif each.name in quantiles:
            yield plain_sample(index, *quantiles[each.name].sample())
    yield leaks


def encode_piece(
    job: Job, clock: Clock, encoders: Sequence[Encoder], begun: Begun
) -> Iterator[tuple[int, Encoded]]:
    """Yield the encoded rows of a piece with their days."""
    chunks = file_source(job).piece(columns(job, encoders), begun.piece)
    parts = day_rows(chunks, clock, job.options, labelled=job.labelled, start=begun.start)
    for part, encoded in encode(parts, encoders, threads=1):
        yield from by_day(part, encoded)


def counts_values(encoder: Encoder) -> bool:
    """Whether an encoder keeps a vocabulary."""
    return isinstance(encoder, CategoricalEncoder) and encoder.plan.hash is None


def file_source(job: Job) -> FileSource:
    """Return the source of a job that was checked to be files."""
    source = job.source
    if not isinstance(source, FileSource):
        raise TypeError(f"not files: {type(source).__name__}")
    return source


def packed(value: Any) -> bytes:
    """Return a value as bytes."""
    return pickle.dumps(value, protocol=5)
