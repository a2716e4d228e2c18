"""Vocabularies: canonical values, their counts in the training days, and their ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.encoders.base import RowLocator
from lpfs.data.hashing import HashTable, Ids, Keys
from lpfs.data.parsing import cast_column, value_error
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID
from lpfs.errors import DataError

MIN_MERGE_ROWS = 1 << 18  # rows of counts that are collected before they are merged


def canonical_values(values: pl.Series, *, hexadecimal: bool, locate: RowLocator) -> pl.Series:
    """Return the values of a categorical column as text, integers or floats; null is missing."""
    name, dtype = values.name, values.dtype
    if hexadecimal:
        return parse_hexadecimal(values, locate)
    if dtype in (pl.String, pl.Int64, pl.UInt64):
        return values
    if dtype.is_integer() and dtype not in (pl.Int128, pl.UInt128):
        return cast_column(values, pl.Int64)
    if dtype.is_float():
        numbers: pl.Series = cast_column(values, pl.Float64).fill_nan(None)
        return numbers.set(numbers == 0.0, 0.0)  # -0.0 and 0.0 are the same value
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {name!r}: {dtype} cannot be categorical; set kind = 'multi' or 'ignore'")
    return cast_column(values, pl.String)


def parse_hexadecimal(values: pl.Series, locate: RowLocator) -> pl.Series:
    """Return hexadecimal text as integers below 2**32; raise DataError for any other value."""
    if values.dtype.is_integer():
        return canonical_values(values, hexadecimal=False, locate=locate)
    if values.dtype not in (pl.String, pl.Null):
        raise DataError(f"column {values.name!r}: {values.dtype} is not hexadecimal text; set hexadecimal = false")
    text = cast_column(values, pl.String)
    numbers = text.str.to_integer(base=16, dtype=pl.UInt32, strict=False)
    if numbers.null_count() != text.null_count():
        problem = "is not a hexadecimal number of at most eight digits; set hexadecimal = false for this column"
        raise value_error(text, numbers.is_null() & text.is_not_null(), locate, problem)
    return numbers


def value_keys(values: pl.Series) -> Keys:
    """Return a 64-bit key of each canonical value: the hash of a text, the bits of a number."""
    if values.dtype == pl.String:
        return values.hash(11).to_numpy()
    filled = values.fill_null(0).to_numpy()
    if filled.dtype == np.float64:
        return np.ascontiguousarray(filled).view(np.uint64)
    return filled.astype(np.int64).view(np.uint64) if filled.dtype.kind == "i" else filled.astype(np.uint64)


class ValueCounter:
    """Counts values; memory grows with the number of distinct values only."""

    def __init__(self) -> None:
        self._merged: pl.DataFrame | None = None
        self._parts: list[pl.DataFrame] = []
        self._part_rows = 0
        self.left_out = 0, 0  # number of values that were not passed to ``add_counts``, and their total count

    def add(self, values: pl.Series) -> None:
        """Count the values of a chunk; nulls are not values."""
        part = values.rename("value").drop_nulls().value_counts(name="count")
        self.add_counts(part.with_columns(pl.col("count").cast(pl.UInt64)))

    def add_counts(self, part: pl.DataFrame, left_out: tuple[int, int] = (0, 0)) -> None:
        """Add values with their counts; of values too rare for an id, ``left_out`` is enough."""
        self.left_out = self.left_out[0] + left_out[0], self.left_out[1] + left_out[1]
        if not part.height and not left_out[0]:  # an empty part would add its type
            return
        self._parts.append(part)
        self._part_rows += part.height
        if self._part_rows > max(MIN_MERGE_ROWS, 0 if self._merged is None else self._merged.height):
            self._merge()

    def _merge(self) -> None:
        parts = self._parts if self._merged is None else [self._merged, *self._parts]
        if len(parts) == 1:
            self._merged = parts[0]
        elif parts:
            self._merged = pl.concat(parts, how="vertical_relaxed").group_by("value").agg(pl.col("count").sum())
        self._parts, self._part_rows = [], 0

    def result(self) -> pl.DataFrame:
        """Return values and counts, sorted by descending count, then by value."""
        self._merge()
        if self._merged is None:
            return pl.DataFrame({"value": [], "count": []}, {"value": pl.String, "count": pl.UInt64})
        return self._merged.sort("count", "value", descending=[True, False])


@dataclass
class Vocabulary:
    """The values that have an id, in id order from ``FIRST_ID``."""

    values: pl.Series  # canonical
    seen: int  # number of distinct values in the training days
    covered: float  # share of the training values that have an id

    def __post_init__(self) -> None:
        self._lookup = HashTable(value_keys(self.values), FIRST_ID)

    @classmethod
    def build(cls, counter: ValueCounter, *, min_count: int, max_values: int | None) -> Vocabulary:
        """Build the vocabulary of the values with at least ``min_count`` occurrences, the most frequent first."""
        counts, (rare_values, rare_rows) = counter.result(), counter.left_out
        kept = counts.filter(pl.col("count") >= min_count)
        if max_values is not None:
            kept = kept.head(max_values)
        total = float((counts["count"].sum() or 0) + rare_rows)
        covered = float(kept["count"].sum() or 0) / total if total else 1.0
        return cls(kept["value"].rechunk(), counts.height + rare_values, covered)

    def encode(self, values: pl.Series) -> Ids:
        """Return the ids of canonical values."""
        missing = values.is_null().to_numpy()
        if len(self.values):
            values = cast_to_vocabulary(values, self.values.dtype)
        ids = self._lookup(value_keys(values))
        if values.null_count():
            ids[values.is_null().to_numpy()] = UNSEEN_ID  # a value that does not exist in the type of the vocabulary
        ids[missing] = MISSING_ID
        return ids


def cast_to_vocabulary(values: pl.Series, dtype: pl.DataType) -> pl.Series:
    """Cast values to the type of the vocabulary; null where a value does not exist in that type."""
    if values.dtype == dtype:
        return values
    if dtype.is_integer() and values.dtype.is_float():
        values = values.set(values != values.round(), None)  # 5.5 is not 5
    return cast_column(values, dtype, strict=False)


def hashed_ids(values: pl.Series, modulo: int) -> Ids:
    """Return ``FIRST_ID`` + value modulo a range, ``MISSING_ID`` for null; text is hashed with BLAKE2b first.

    Integers, also hexadecimal ones, are taken modulo the range directly, as DLRM's max-ind-range does.
    """
    missing = values.is_null().to_numpy()
    numbers: npt.NDArray[Any]
    if values.dtype == pl.String:
        distinct = values.drop_nulls().unique()
        hashes = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8) for text in distinct.to_list())
        codes = [int.from_bytes(digest.digest(), "little") % modulo for digest in hashes]
        table = HashTable(value_keys(distinct), FIRST_ID)
        positions = table(value_keys(values)).astype(np.int64) - FIRST_ID
        numbers = np.asarray([*codes, 0], np.uint32)[positions]
    else:
        numbers = value_keys(values) % np.uint64(modulo)
    ids: Ids = numbers.astype(np.uint32) + np.uint32(FIRST_ID)
    ids[missing] = MISSING_ID
    return ids
