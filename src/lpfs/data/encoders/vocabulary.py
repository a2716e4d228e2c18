"""Vocabularies: how often each value occurs in the training period, and which id it gets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.hashing import HashTable, Ids, Keys
from lpfs.data.parsing import cast_column
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID
from lpfs.errors import DataError

Where = Callable[[int], str]


def canonical_values(values: pl.Series, *, hexadecimal: bool, where: Where) -> pl.Series:
    """Return the values of a categorical column as text, whole numbers or fractions; null is missing."""
    name, dtype = values.name, values.dtype
    if hexadecimal:
        return parse_hexadecimal(values, where)
    if dtype == pl.String or dtype in (pl.Int64, pl.UInt64):
        return values
    if dtype.is_integer() and dtype not in (pl.Int128, pl.UInt128):
        return cast_column(values, pl.Int64)
    if dtype.is_float():
        numbers: pl.Series = cast_column(values, pl.Float64).fill_nan(None)
        return numbers.set(numbers == 0.0, 0.0)  # -0.0 and 0.0 are one value
    if dtype == pl.Null:
        return cast_column(values, pl.String)
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {name!r}: {dtype} cannot be categorical; set kind = 'multi' or 'ignore'")
    return cast_column(values, pl.String)


def parse_hexadecimal(values: pl.Series, where: Where) -> pl.Series:
    """Return hexadecimal text as whole numbers below 2**32, or say which value is not."""
    if values.dtype.is_integer():
        return canonical_values(values, hexadecimal=False, where=where)
    if values.dtype not in (pl.String, pl.Null):
        raise DataError(f"column {values.name!r}: {values.dtype} is not hexadecimal text; set hexadecimal = false")
    text = cast_column(values, pl.String)
    numbers = text.str.to_integer(base=16, dtype=pl.UInt32, strict=False)
    if numbers.null_count() != text.null_count():
        row = int((numbers.is_null() & text.is_not_null()).arg_max() or 0)
        raise DataError(
            f"{where(row)}: column {values.name!r}: {text[row]!r:.60} is not a hexadecimal number of at most "
            "eight digits; set hexadecimal = false for this column"
        )
    return numbers


def value_keys(values: pl.Series) -> Keys:
    """Return a 64-bit key for each canonical value: its hash if it is text, its bits if it is a number."""
    if values.dtype == pl.String:
        return values.hash(11).to_numpy()
    filled = values.fill_null(0).to_numpy()
    if filled.dtype == np.float64:
        return np.ascontiguousarray(filled).view(np.uint64)
    return filled.astype(np.int64).view(np.uint64) if filled.dtype.kind == "i" else filled.astype(np.uint64)


class ValueCounter:
    """Counts values in memory that grows with the distinct values only."""

    def __init__(self) -> None:
        self._all: pl.DataFrame | None = None
        self._parts: list[pl.DataFrame] = []
        self._waiting = 0
        self.left_out = 0, 0  # values, and how often they occur, that ``take`` was not given

    def add(self, values: pl.Series) -> None:
        """Count the values of a chunk; nulls are not values."""
        part = values.rename("value").drop_nulls().value_counts(name="count")
        self.add_counts(part.with_columns(pl.col("count").cast(pl.UInt64)))

    def add_counts(self, part: pl.DataFrame, left_out: tuple[int, int] = (0, 0)) -> None:
        """Take in values with their counts; of those too rare for an id it is enough to say how many there are."""
        self.left_out = self.left_out[0] + left_out[0], self.left_out[1] + left_out[1]
        if not part.height and not left_out[0]:  # no value says nothing about their type either
            return
        self._parts.append(part)
        self._waiting += part.height
        if self._waiting > max(1 << 18, 0 if self._all is None else self._all.height):
            self._merge()

    def _merge(self) -> None:
        parts = self._parts if self._all is None else [self._all, *self._parts]
        if parts:
            merged = pl.concat(parts, how="vertical_relaxed") if len(parts) > 1 else parts[0]
            self._all = merged.group_by("value").agg(pl.col("count").sum()) if len(parts) > 1 else merged
        self._parts, self._waiting = [], 0

    def result(self) -> pl.DataFrame:
        """Return values by descending count, equal counts by value."""
        self._merge()
        if self._all is None:
            return pl.DataFrame({"value": [], "count": []}, {"value": pl.String, "count": pl.UInt64})
        return self._all.sort("count", "value", descending=[True, False])


@dataclass
class Vocabulary:
    """The values that have an id of their own, in id order from ``FIRST_ID``."""

    values: pl.Series
    lookup: HashTable
    seen: int
    covered: float

    @classmethod
    def build(cls, counter: ValueCounter, *, min_count: int, max_values: int | None) -> Vocabulary:
        """Keep values that are frequent enough, the most frequent first."""
        counts, (values_left, rows_left) = counter.result(), counter.left_out
        kept = counts.filter(pl.col("count") >= min_count)
        if max_values is not None:
            kept = kept.head(max_values)
        total = float((counts["count"].sum() or 0) + rows_left)
        values = kept["value"].rechunk()
        return cls(
            values,
            HashTable(value_keys(values), FIRST_ID),
            counts.height + values_left,
            float(kept["count"].sum() or 0) / total if total else 1.0,
        )

    @classmethod
    def restored(cls, stored: Any, seen: int, covered: float) -> Vocabulary:
        """Return the vocabulary that ``stored`` gave."""
        text = isinstance(stored, list)
        values = pl.Series("value", stored, pl.String) if text else pl.Series("value", stored)
        return cls(values, HashTable(value_keys(values), FIRST_ID), seen, covered)

    @property
    def cardinality(self) -> int:
        """Number of ids, the two special ones included."""
        return FIRST_ID + len(self.values)

    def encode(self, values: pl.Series) -> Ids:
        """Return the ids of canonical values."""
        missing = values.is_null().to_numpy()
        if len(self.values):
            values = cast_to_vocabulary(values, self.values.dtype)
        ids = self.lookup(value_keys(values))
        if values.null_count():
            ids[values.is_null().to_numpy()] = UNSEEN_ID  # a value that this type does not have
        ids[missing] = MISSING_ID
        return ids

    def stored(self) -> Any:
        """Return the values as they are stored: an array of numbers (hexadecimal ones too), or text."""
        return self.values.to_list() if self.values.dtype == pl.String else self.values.to_numpy()


def cast_to_vocabulary(values: pl.Series, dtype: pl.DataType) -> pl.Series:
    """Bring a chunk whose file stores a column as another type to that of the vocabulary, or to null."""
    if values.dtype == dtype:
        return values
    if dtype.is_integer() and values.dtype.is_float():
        values = values.set(values != values.round(), None)  # 5.5 is not 5
    return cast_column(values, dtype, strict=False)


def hashed_ids(values: pl.Series, modulo: int) -> Ids:
    """Return ``FIRST_ID`` + value modulo a range; text is hashed with BLAKE2b first. Missing has its own id.

    Whole numbers, hexadecimal ones too, are taken modulo the range themselves, as DLRM's max-ind-range does.
    """
    missing = values.is_null().to_numpy()
    numbers: npt.NDArray[Any]
    if values.dtype == pl.String:
        distinct = values.drop_nulls().unique()
        codes = [
            int.from_bytes(
                hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
            )
            % modulo
            for text in distinct.to_list()
        ]
        table = HashTable(value_keys(distinct), FIRST_ID)
        places = table(value_keys(values)).astype(np.int64) - FIRST_ID
        numbers = np.asarray([*codes, 0], np.uint32)[places]
    else:
        numbers = value_keys(values) % np.uint64(modulo)
    ids: Ids = numbers.astype(np.uint32) + np.uint32(FIRST_ID)
    ids[missing] = MISSING_ID
    return ids
