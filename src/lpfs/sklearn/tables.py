"""What kind of table X is: a pandas or a polars DataFrame, or an array; neither library is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpfs.errors import DataError, InputError

Floats = NDArray[np.float64]
# What pandas finds in an object column whose values are all numbers.
NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")


def library_of(table: Any) -> str | None:
    """Return ``"pandas"`` or ``"polars"`` for a DataFrame of theirs, else None.

    >>> library_of(np.ones((2, 2))) is None
    True
    """
    for name in ("pandas", "polars"):
        module = sys.modules.get(name)
        if module is not None and isinstance(table, module.DataFrame):
            return name
    return None


def take_columns(frame: Any, indices: Sequence[int], library: str) -> Any:
    """Return some columns of a DataFrame as a DataFrame of ``library``; exactly as they are if it is its own."""
    own = library_of(frame)
    part = frame.iloc[:, list(indices)] if own == "pandas" else frame[:, list(indices)]
    if own == library:
        return part
    if library == "pandas":
        import pandas as pd  # type: ignore[import-untyped]

        return pd.DataFrame({name: part[name].to_list() for name in part.columns})
    import polars as pl

    missing = part.isna()
    return pl.DataFrame(
        {
            str(name): [None if gone else value for value, gone in zip(part[name], missing[name], strict=True)]
            for name in part.columns
        }
    )


def read_frame(frame: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a DataFrame as numbers (n, N), NaN where a value is missing, and which columns are categorical (N,).

    Numbers, dates and times stay numbers. Text, categories and truth values become codes 0, 1, … in sorted order.
    """
    if not frame.shape[0] or not frame.shape[1]:
        raise DataError(
            f"X has {frame.shape[0]} sample(s) and {frame.shape[1]} column(s): at least one of each is needed"
        )
    read = _read_pandas if library_of(frame) == "pandas" else _read_polars
    table = np.empty((frame.shape[0], frame.shape[1]), dtype=np.float64)
    categorical = np.zeros(frame.shape[1], dtype=np.bool_)
    for at, name in enumerate(frame.columns):
        column = frame.iloc[:, at] if read is _read_pandas else frame[:, at]
        try:
            table[:, at], categorical[at] = read(column)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {name!r} has values of type {column.dtype} that are neither numbers, dates, text, "
                f"categories nor truth values ({error}); turn it into one of these, or leave it out"
            ) from error
        if not categorical[at] and np.isinf(table[:, at]).any():
            raise InputError(
                f"column {name!r} contains infinity; replace it by NaN, which is taken as missing, or by a number"
            )
    return table, categorical


def _read_pandas(column: Any) -> tuple[Floats, bool]:
    """Return the values of a pandas Series as numbers or codes, and whether they are codes."""
    import pandas as pd

    types, dtype = pd.api.types, column.dtype
    if types.is_complex_dtype(dtype):
        raise TypeError("complex numbers")
    if types.is_datetime64_any_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return _times(column.astype("int64").to_numpy(), column.isna().to_numpy()), False
    number = types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype)
    if number or (dtype.kind == "O" and types.infer_dtype(column, skipna=True) in NUMBERS):
        return column.to_numpy(dtype=np.float64, na_value=np.nan), False
    return _codes(column.astype("category").cat.codes.to_numpy()), True


def _read_polars(column: Any) -> tuple[Floats, bool]:
    """Return the values of a polars Series as numbers or codes, and whether they are codes."""
    import polars as pl

    dtype = column.dtype
    if dtype.is_numeric():
        return column.cast(pl.Float64).fill_null(float("nan")).to_numpy(), False
    if dtype.is_temporal():
        return _times(column.to_physical().fill_null(0).to_numpy(), column.is_null().to_numpy()), False
    if dtype == pl.Null:
        return np.full(len(column), np.nan), False
    if dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
        raise TypeError("a nested or foreign type")
    ranks = column.cast(pl.String).rank("dense").cast(pl.Int64) - 1
    return _codes(ranks.fill_null(-1).to_numpy()), True


def _times(ticks: NDArray[Any], missing: NDArray[np.bool_]) -> Floats:
    """Return times as numbers, NaN where missing."""
    return np.where(missing, np.nan, ticks.astype(np.float64))


def _codes(codes: NDArray[Any]) -> Floats:
    """Return codes as numbers, NaN for -1."""
    return np.where(codes < 0, np.nan, codes.astype(np.float64))
