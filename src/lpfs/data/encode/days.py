"""The rows of each day, with their labels as 0 and 1 and the negatives drawn."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.encode.numbers import as_numbers
from lpfs.data.plan.options import Options
from lpfs.data.raw.cast import as_type, mark_missing
from lpfs.data.raw.chance import mix
from lpfs.data.raw.clock import Clock
from lpfs.data.raw.source import Chunk
from lpfs.data.store.format import AnyArray
from lpfs.errors import DataError

Labels = dict[str, npt.NDArray[np.uint8]]
TRUTH = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class DayRows:
    """Rows of one day in one chunk, after negatives were drawn."""

    day: int
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
) -> Iterator[DayRows]:
    """Yield the rows of each day, in order; of ``days`` only, where given. Without labels they are all 0."""
    clock.begin()
    seen: Tally[int] = Tally()
    for chunk in chunks:
        if not chunk.frame.height:
            continue
        frame = mark_missing(chunk.frame, options.missing)
        parts = clock.assign(chunk)
        labels = read_labels(frame, options, chunk.place, labelled=labelled)
        for day, rows in parts:
            count = chunk.frame.height if rows is None else len(rows)
            begin = seen[day]
            seen[day] += count
            if days is not None and day not in days:
                continue
            rows = draw(rows, labels[options.label], begin, options.rate(clock.days[day]), options.seed, day)
            if rows is None:
                yield DayRows(day, frame, labels, chunk.place)
            elif len(rows):
                yield DayRows(
                    day,
                    frame[rows],
                    {name: values[rows] for name, values in labels.items()},
                    lambda row, place=chunk.place, rows=rows: place(int(rows[row])),  # type: ignore[misc]
                )


def draw(rows: AnyArray | None, labels: AnyArray, begin: int, rate: float, seed: int, day: int) -> AnyArray | None:
    """Return the rows to keep: every positive, and of the negatives those whose number in the day hashes low.

    What is kept depends on the seed, the day and the number of the row in it, not on chunks.
    """
    if rate >= 1.0:
        return rows
    rows = np.arange(len(labels)) if rows is None else rows
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
