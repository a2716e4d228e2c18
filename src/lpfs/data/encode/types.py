"""The raw type of a column in training and now: can its values still be known?"""

from __future__ import annotations

import polars as pl

from lpfs.data.encoders.vocabulary import Where, canonical, same_type
from lpfs.data.raw.cast import as_type
from lpfs.errors import DataError


def sort_of(values: pl.Series) -> str:
    """Return what canonical values are: ``text``, ``whole`` numbers or a ``fraction``."""
    if values.dtype == pl.String:
        return "text"
    return "whole" if values.dtype.is_integer() else "fraction"


def knowable(vocabulary: pl.Series, dtype: pl.DataType) -> bool:
    """Whether a column of a raw type can hold any value of a vocabulary: one that survives the way there and back.

    >>> [knowable(pl.Series(["1", "2"]), dtype) for dtype in (pl.Int8(), pl.Float64())]  # 1.0 is not "1"
    [True, False]
    """
    if not len(vocabulary) or dtype in (pl.Null, pl.String):
        return True
    if dtype == pl.Boolean:
        return vocabulary.dtype == pl.String and bool(vocabulary.is_in(["true", "false"]).any())
    try:
        back = canonical(as_type(vocabulary, dtype, strict=False), hexadecimal=False, where=str)
        return bool((same_type(back, vocabulary.dtype) == vocabulary).any())
    except DataError:
        return False


def hashable(dtype: pl.DataType, of: str | None, raw: str | None) -> bool:
    """Whether values of a raw type hash as those of training did, which were of a sort and a raw type."""
    if of is None or dtype == pl.Null or str(dtype) == raw:
        return True
    if dtype == pl.String:
        return of != "text"  # numbers are read from it; dates and truths may be spelled otherwise
    if dtype.is_integer():
        return of != "text" or raw == "String"
    return dtype.is_float() and of != "text"


def as_hashed(values: pl.Series, of: str | None, where: Where) -> pl.Series:
    """Bring canonical values to the sort that was hashed in training, or say which value is not of it."""
    if of is None or sort_of(values) == of or not len(values):
        return values
    if of == "text":
        return as_type(values, pl.String)
    for dtype in (pl.Int64(), pl.UInt64()) if of == "whole" else (pl.Float64(),):
        numbers = same_type(values, dtype)
        lost = numbers.is_null() & values.is_not_null()
        if not lost.any():
            return numbers
    row = int(lost.arg_max() or 0)
    what = "whole number" if of == "whole" else "number"
    raise DataError(
        f"{where(row)}: column {values.name!r}: {values[row]!r:.60} is not a {what}; only {what}s were hashed "
        "in training"
    )
