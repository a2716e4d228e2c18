"""How times are written, and the day of each.

Columns as another type, or a clear error.

How values are spelled in logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from lpfs.errors import DataError


def cast_column(values: pl.Series, dtype: Any, *, strict: bool = True) -> pl.Series:
    """Return a column as another type; where ``strict`` is off, null for what does not fit."""
    try:
        result: pl.Series = values.cast(dtype, strict=strict)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"column {values.name!r}: {values.dtype} cannot be used as {dtype}") from error
    except pl.exceptions.PanicException as error:  # a date that no calendar has
        raise DataError(f"column {values.name!r} holds a value that cannot be ({error})") from error
    return result


def to_python_list(values: pl.Series) -> list[Any]:
    """Return the values of a column as Python objects."""
    try:
        return values.to_list()
    except (ValueError, OverflowError, pl.exceptions.PanicException) as error:
        raise DataError(f"column {values.name!r} holds a value that cannot be ({error})") from error


def decode_dictionary_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Return dictionary-encoded columns as the text they stand for."""
    coded = [name for name, dtype in frame.schema.items() if dtype in (pl.Categorical, pl.Enum)]
    return frame.with_columns(pl.col(coded).cast(pl.String)) if coded else frame


def first_line(error: BaseException) -> str:
    """Return the first line of a message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def replace_missing_marks(frame: pl.DataFrame, marks: Sequence[str]) -> pl.DataFrame:
    """Replace the user's marks for a missing value by null, in text columns."""
    if not marks:
        return frame
    text = pl.col(pl.String)
    return frame.with_columns(pl.when(text.is_in(list(marks))).then(None).otherwise(text).name.keep())


DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?$"
AMBIGUOUS_DATE = r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b"  # which of them is the day, and which the month?
WITH_COMMA = r"^[+-]?\d+,\d+$"
WHOLE = r"^[+-]?\d+$"
LEADING_ZERO = r"^[+-]?0\d"
MISSING_NUMBER_TEXTS = {"", "na", "n/a", "nan", "null", "none", "\\n", "-"}  # instead of a number, in lower case
# Unix time from 2001 to 2286; the ranges of the units do not meet
UNITS = ((10**9, 10**10, "s"), (10**12, 10**13, "ms"), (10**15, 10**16, "us"), (10**18, 10**19, "ns"))
# words for the parts of a published split, in the order in which they are used
SPLIT_WORDS = dict.fromkeys(("train", "training"), 0)
SPLIT_WORDS |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), 1)
SPLIT_WORDS |= dict.fromkeys(("test", "testing", "holdout"), 2)


def unix_unit(low: float, high: float) -> str | None:
    """Return the unit of Unix times that lie between two numbers; None if they cannot be such times.

    >>> unix_unit(1.7e9, 1.8e9), unix_unit(0, 1.8e9)
    ('s', None)
    """
    return next((unit for least, most, unit in UNITS if least <= low and high < most), None)


def detect_time_format(values: pl.Series) -> str:
    """Tell how a time column of text or numbers is written from its first rows."""
    text = cast_column(values, pl.String)
    if bool(text.str.contains(DATE).all()):
        return "iso"
    if bool(text.str.contains(AMBIGUOUS_DATE).all()):
        raise DataError(
            f"column {values.name!r}: {text[0]!r} may be a date, but how it is written is not clear; "
            "give time_format, for example '%d/%m/%Y', or 'name' to take the days as they come"
        )
    numbers = cast_column(values, pl.Float64, strict=False)
    if numbers.null_count() or not bool((numbers == numbers.round()).all()):
        return "name"
    low, high = float(numbers.min() or 0), float(numbers.max() or 0)  # type: ignore[arg-type]
    unit = unix_unit(low, high)
    if unit is not None:
        return f"unix {unit}"
    if low >= 19000101 and high <= 21001231:
        return "%Y%m%d"
    return "number"


def as_integers(values: pl.Series) -> pl.Series:
    """Return whole numbers, also where they are written with a fraction of zero; null for anything else."""
    numbers = cast_column(values, pl.Int64, strict=False)
    if numbers.null_count():
        fractions = cast_column(values, pl.Float64, strict=False)
        fractions = fractions.set(fractions != fractions.round(), None)
        numbers = cast_column(fractions, pl.Int64, strict=False)
    return numbers


def read_days(values: pl.Series, how: str) -> tuple[pl.Series, pl.Series]:
    """Return the day of each row and what orders them; null where a value does not fit."""
    if how == "date":
        return cast_column(values, pl.Date), values
    if how == "number":
        numbers = as_integers(values)
        return numbers, numbers
    text = cast_column(values, pl.String)
    if how == "name":
        return text, pl.Series(text.name, np.zeros(len(text)))
    if how == "iso":  # the day as it is written, whatever the time zone
        return text.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False), text
    if how.startswith("unix "):
        numbers = as_integers(values)
        unit: Any = how[5:]
        times = pl.select(pl.from_epoch(numbers, time_unit=unit)).to_series()
        return cast_column(times, pl.Date), numbers
    try:
        if any(mark in how for mark in ("%H", "%I", "%T", "%R", "%s", "%X", "%c")):
            # Hours without minutes are not a time for the parser: give it minutes.
            suffix = ("", "") if "%M" in how or "%T" in how or "%R" in how or "%s" in how else (":00", ":%M")
            times = (text + suffix[0]).str.to_datetime(how + suffix[1], strict=False)
            return cast_column(times, pl.Date), times
        dates = text.str.to_date(how, strict=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"time_format {how!r} cannot be used: {str(error).splitlines()[0][:120]}") from error
    return dates, dates
