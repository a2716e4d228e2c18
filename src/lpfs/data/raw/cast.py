"""Columns as another type, or a clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from lpfs.errors import DataError


def as_type(values: pl.Series, dtype: Any, *, strict: bool = True) -> pl.Series:
    """Return a column as another type; where ``strict`` is off, null for what does not fit."""
    try:
        result: pl.Series = values.cast(dtype, strict=strict)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"column {values.name!r}: {values.dtype} cannot be used as {dtype}") from error
    except pl.exceptions.PanicException as error:  # a date that no calendar has
        raise DataError(f"column {values.name!r} holds a value that cannot be ({error})") from error
    return result


def as_list(values: pl.Series) -> list[Any]:
    """Return the values of a column as Python objects."""
    try:
        return values.to_list()
    except (ValueError, OverflowError, pl.exceptions.PanicException) as error:
        raise DataError(f"column {values.name!r} holds a value that cannot be ({error})") from error


def plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Return dictionary-encoded columns as the text they stand for."""
    coded = [name for name, dtype in frame.schema.items() if dtype in (pl.Categorical, pl.Enum)]
    return frame.with_columns(pl.col(coded).cast(pl.String)) if coded else frame


def first_line(error: BaseException) -> str:
    """Return the first line of a message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def mark_missing(frame: pl.DataFrame, marks: Sequence[str]) -> pl.DataFrame:
    """Replace the user's marks for a missing value by null, in text columns."""
    if not marks:
        return frame
    text = pl.col(pl.String)
    return frame.with_columns(pl.when(text.is_in(list(marks))).then(None).otherwise(text).name.keep())
