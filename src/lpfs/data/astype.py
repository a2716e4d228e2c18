"""Change the type of a column."""

from __future__ import annotations

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
