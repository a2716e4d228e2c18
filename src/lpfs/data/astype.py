"""Change the type of a column."""

from __future__ import annotations

from typing import Any

import polars as pl


def as_type(values: pl.Series, dtype: Any, *, strict: bool = True) -> pl.Series:
    """Return a column as another type; where ``strict`` is off, null for what does not fit."""
    result: pl.Series = values.cast(dtype, strict=strict)
    return result
