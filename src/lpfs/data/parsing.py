"""How times are written, and the day of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from lpfs.data.raw.cast import as_type
from lpfs.data.raw.spelling import AMBIGUOUS_DATE, DATE, unix_unit
from lpfs.errors import DataError


def how_to_read(values: pl.Series) -> str:
    """Tell how a time column of text or numbers is written from its first rows."""
    text = as_type(values, pl.String)
    if bool(text.str.contains(DATE).all()):
        return "iso"
    if bool(text.str.contains(AMBIGUOUS_DATE).all()):
        raise DataError(
            f"column {values.name!r}: {text[0]!r} may be a date, but how it is written is not clear; "
            "give time_format, for example '%d/%m/%Y', or 'name' to take the days as they come"
        )
    numbers = as_type(values, pl.Float64, strict=False)
    if numbers.null_count() or not bool((numbers == numbers.round()).all()):
        return "name"
    low, high = float(numbers.min() or 0), float(numbers.max() or 0)  # type: ignore[arg-type]
    unit = unix_unit(low, high)
    if unit is not None:
        return f"unix {unit}"
    if low >= 19000101 and high <= 21001231:
        return "%Y%m%d"
    return "number"


def whole_numbers(values: pl.Series) -> pl.Series:
    """Return whole numbers, also where they are written with a fraction of zero; null for anything else."""
    numbers = as_type(values, pl.Int64, strict=False)
    if numbers.null_count():
        fractions = as_type(values, pl.Float64, strict=False)
        fractions = fractions.set(fractions != fractions.round(), None)
        numbers = as_type(fractions, pl.Int64, strict=False)
    return numbers


def read_days(values: pl.Series, how: str) -> tuple[pl.Series, pl.Series]:
    """Return the day of each row and what orders them; null where a value does not fit."""
    if how == "date":
        return as_type(values, pl.Date), values
    if how == "number":
        numbers = whole_numbers(values)
        return numbers, numbers
    text = as_type(values, pl.String)
    if how == "name":
        return text, pl.Series(text.name, np.zeros(len(text)))
    if how == "iso":  # the day as it is written, whatever the time zone
        return text.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False), text
    if how.startswith("unix "):
        numbers = whole_numbers(values)
        unit: Any = how[5:]
        times = pl.select(pl.from_epoch(numbers, time_unit=unit)).to_series()
        return as_type(times, pl.Date), numbers
    try:
        if any(mark in how for mark in ("%H", "%I", "%T", "%R", "%s", "%X", "%c")):
            # Hours without minutes are not a time for the parser: give it minutes.
            suffix = ("", "") if "%M" in how or "%T" in how or "%R" in how or "%s" in how else (":00", ":%M")
            times = (text + suffix[0]).str.to_datetime(how + suffix[1], strict=False)
            return as_type(times, pl.Date), times
        dates = text.str.to_date(how, strict=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"time_format {how!r} cannot be used: {str(error).splitlines()[0][:120]}") from error
    return dates, dates
