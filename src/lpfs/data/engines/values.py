"""Counts of values and samples of numbers as rows of one table, whatever the type of a column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.raw.chance import Marks

SAMPLE = "sample"  # the type of rows that are no counts
COUNTS = {  # of values: the field, the type of the value, itself as text or as the 64 bits of a number, how often
    "field": pl.Int32,
    "type": pl.String,
    "text": pl.String,
    "number": pl.Int64,
    "count": pl.Int64,
}
TYPES = {str(dtype): dtype for dtype in (pl.String(), pl.Int64(), pl.UInt64(), pl.UInt32(), pl.Float64())}
SIGN = np.uint64(1 << 63)


def plain_counts(field: int, counts: pl.DataFrame) -> pl.DataFrame:
    """Return values and counts of a field as rows of the table."""
    values = counts["value"]
    text = (
        values
        if values.dtype == pl.String
        else pl.Series("text", [None], pl.String).new_from_index(0, len(values))
    )
    numbers = np.zeros(len(values), np.int64) if values.dtype == pl.String else bits(values)
    return table(field, str(values.dtype), text, numbers, counts["count"].cast(pl.Int64))


def plain_sample(field: int, values: npt.NDArray[np.float64], marks: Marks) -> pl.DataFrame:
    """Return a sample as rows of the table: marks as numbers that sort as they do, the values' bits as counts."""
    counts = pl.Series(np.ascontiguousarray(values).view(np.int64))
    return table(field, SAMPLE, no_text(len(values)), (marks ^ SIGN).view(np.int64), counts)


def no_text(rows: int) -> pl.Series:
    """Return a column of text that is missing."""
    return pl.repeat(None, rows, dtype=pl.String, eager=True).alias("text")


def table(field: int, type: str, text: pl.Series, number: npt.NDArray[np.int64], count: pl.Series) -> pl.DataFrame:
    """Return rows of one field and type."""
    return pl.DataFrame({"text": text, "number": number, "count": count}).select(
        pl.lit(field, pl.Int32).alias("field"), pl.lit(type).alias("type"), "text", "number", "count"
    )


def bits(values: pl.Series) -> npt.NDArray[np.int64]:
    """Return numbers as 64 bits."""
    numbers = values.to_numpy()
    wide = numbers if numbers.dtype.itemsize == 8 else numbers.astype(np.int64)
    return np.ascontiguousarray(wide).view(np.int64)


def values_of(rows: pl.DataFrame, type: str) -> pl.DataFrame:
    """Return the values of one type with their counts, as ``Counter.take`` takes them."""
    part, dtype = rows.filter(pl.col("type") == type), TYPES[type]
    if dtype == pl.String:
        value = part["text"]
    else:
        numbers = np.ascontiguousarray(part["number"].to_numpy())
        value = pl.Series(numbers.astype(np.uint32) if dtype == pl.UInt32 else numbers.view(type.lower()))
    return pl.DataFrame({"value": value, "count": part["count"].cast(pl.UInt64)})


def sample_of(rows: pl.DataFrame) -> tuple[npt.NDArray[np.float64], Marks]:
    """Return the values and marks of sampled rows."""
    marks = np.ascontiguousarray(rows["number"].to_numpy()).view(np.uint64) ^ SIGN
    return np.ascontiguousarray(rows["count"].to_numpy()).view(np.float64), marks
