"""The rows of each day, with their labels as 0 and 1 and the negatives drawn."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.encoders.numeric import as_numbers
from lpfs.data.planning import Options
from lpfs.data.raw.cast import as_type, mark_missing
from lpfs.data.raw.chance import mix
from lpfs.data.days import Clock
from lpfs.data.sources.base import Chunk
from lpfs.data.store.format import AnyArray
from lpfs.errors import DataError

Labels = dict[str, npt.NDArray[np.uint8]]
TRUTH = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class Start:
    """What comes before the first chunk, where that is not the first of the log.

    Args:
        row: how many rows, or training rows where the log has a split of its own.
        days: how many rows of each day.
        trained: how many rows of the training days, after negatives were drawn.

    """

    row: int = 0
    days: Mapping[int, int] = field(default_factory=dict)
    trained: int = 0


FIRST_ROW = Start()


@dataclass(frozen=True)
class DayRows:
    """Rows of a chunk after negatives were drawn, day after day; ``days`` says how many each day has."""

    days: tuple[tuple[int, int], ...]
    frame: pl.DataFrame
    labels: Labels
    where: Callable[[int], str]


def day_rows(
    chunks: Iterable[Chunk],
    clock: Clock,
    options: Options,
    days: set[int] | None = None,
    *,
    labelled: bool = True,
    start: Start = FIRST_ROW,
) -> Iterator[DayRows]:
    """Yield the rows chunk by chunk, sorted by day; of ``days`` only, where given. Absent labels are 0."""
    clock.begin(start.row)
    seen: Tally[int] = Tally(dict(start.days))
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        frame = mark_missing(chunk.frame, options.missing)
        parts = clock.assign(chunk)
        labels = read_labels(frame, options, chunk.place, labelled=labelled)
        drawn: list[tuple[int, AnyArray]] = []
        for day, rows in parts:
            rows = np.arange(frame.height) if rows is None else rows
            begin = seen[day]
            seen[day] += len(rows)
            if days is None or day in days:
                rate = options.rate(clock.days[day])
                drawn.append((day, draw(rows, labels[options.label], begin, rate, options.seed, day)))
        counts = tuple((day, len(rows)) for day, rows in drawn if len(rows))
        if len(counts) == 1 and counts[0][1] == frame.height:
            yield DayRows(counts, frame, labels, chunk.place)
        elif counts:
            chosen = np.concatenate([rows for _, rows in drawn])
            yield DayRows(
                counts,
                frame[chosen],
                {name: values[chosen] for name, values in labels.items()},
                lambda row, place=chunk.place, chosen=chosen: place(int(chosen[row])),  # type: ignore[misc]
            )


def draw(rows: AnyArray, labels: AnyArray, begin: int, rate: float, seed: int, day: int) -> AnyArray:
    """Return the rows to keep: every positive, and of the negatives those whose number in the day hashes low.

    What is kept depends on the seed, the day and the number of the row in it, not on chunks.
    """
    if rate >= 1.0:
        return rows
    marks = mix(np.arange(begin, begin + len(rows)), int(mix([day], seed)[0]))
    kept: AnyArray = rows[(labels[rows] == 1) | (marks < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048)))]
    return kept


def read_labels(frame: pl.DataFrame, options: Options, where: Callable[[int], str], *, labelled: bool) -> Labels:
    """Return the label and the tasks as 0 and 1; all 0 where the table has none."""
    targets = (options.label, *options.tasks)
    if not labelled:
        return {name: np.zeros(frame.height, np.uint8) for name in targets}
    return {name: read_label(frame[name], options, where) for name in targets}


def read_label(values: pl.Series, options: Options, where: Callable[[int], str]) -> npt.NDArray[np.uint8]:
    """Return a label as 0 and 1, or say which value is neither."""
    what = "label" if values.name == options.label else "task"
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{where(row)}: {what} {values.name!r} is missing; it must be 0 or 1")
    if options.positive is not None and values.name == options.label:
        if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
            raise DataError(f"{what} {values.name!r} is a column of {values.dtype}; it must hold 0 and 1")
        return (as_type(values, pl.String) == options.positive).to_numpy().astype(np.uint8)

    numbers = label_numbers(values, where)
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{where(row)}: {what} {values.name!r} must be 0 or 1, found {values[row]!r:.60}; "
            "repair the rows, or say which value counts as 1: positive='yes', or --positive yes"
        )
    return numbers.astype(np.uint8)


def label_numbers(values: pl.Series, where: Callable[[int], str]) -> npt.NDArray[np.float64]:
    """Return labels as numbers, true and false as 1 and 0; NaN for any other text."""
    if values.dtype != pl.String:
        return as_numbers(values, where)
    spelled = values.str.strip_chars().str.to_lowercase().replace(TRUTH)
    return as_type(spelled, pl.Float64, strict=False).to_numpy()
