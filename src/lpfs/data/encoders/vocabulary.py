"""Vocabularies: canonical values, their counts in the training days, and their ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.encoders.base import RowLocator
from lpfs.data.hashing import HashTable, Ids, Keys
from lpfs.data.parsing import cast_column, drop_nulls, value_error
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID
from lpfs.errors import DataError

MIN_UNIQUE_ROWS = 1000  # values below which no column counts as near-unique
MIN_MERGE_ROWS = 1 << 18  # rows of counts that are collected before they are merged
NO_COUNTS = pl.DataFrame({"value": [], "count": []}, {"value": pl.String, "count": pl.UInt64})


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
    filled = (values.fill_null(0) if values.null_count() else values).to_numpy()
    if filled.dtype == np.float64:
        return np.ascontiguousarray(filled).view(np.uint64)
    return filled.astype(np.int64).view(np.uint64) if filled.dtype.kind == "i" else filled.astype(np.uint64)


def null_mask(values: pl.Series) -> npt.NDArray[np.bool_]:
    """Return where values are null; without a call of polars if none is."""
    return values.is_null().to_numpy() if values.null_count() else np.zeros(len(values), np.bool_)


class VocabularyLimits(NamedTuple):
    """Limits of the vocabulary of a field."""

    min_count: int  # 0: see ``automatic_min_count``
    max_values: int | None


class ValueCounter:
    """Counts values; memory grows with the number of distinct values only."""

    def __init__(self) -> None:
        self._merged: pl.DataFrame | None = None
        self._parts: list[pl.DataFrame] = []
        self._part_rows = 0
        self.left_out = 0, 0  # number of values that were not passed to ``add_counts``, and their total count

    def add(self, values: pl.Series) -> None:
        """Count the values of a chunk; nulls are not values."""
        self.add_counts(drop_nulls(values).rename("value").value_counts(name="count"))

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
            total = pl.col("count").cast(pl.UInt64).sum()
            self._merged = pl.concat(parts, how="vertical_relaxed").group_by("value").agg(total)
        self._parts, self._part_rows = [], 0

    def kind_and_rows(self) -> tuple[str, int]:
        """Return the type of the values, and at least the number of distinct ones."""
        parts = self._parts if self._merged is None else [self._merged, *self._parts]
        types = {str(part.get_column("value").dtype) for part in parts}
        if len(types) > 1:
            self._merge()
            return self.kind_and_rows()
        return next(iter(types), "String"), sum(part.height for part in parts)

    def counts(self) -> pl.DataFrame:
        """Return values and counts, in any order."""
        self._merge()
        return NO_COUNTS if self._merged is None else self._merged

    def result(self) -> pl.DataFrame:
        """Return values and counts, sorted by descending count, then by value."""
        return sort_counts([self.counts()]).drop("field")


def sort_counts(counts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the values of several fields, all of one type; of each field by descending count, then by value."""
    field = np.repeat(np.arange(len(counts), dtype=np.uint32), [part.height for part in counts])
    frame = pl.concat(counts, how="vertical_relaxed").with_columns(pl.col("count").cast(pl.UInt64), field=field)
    if len(counts) == 1:
        return frame.sort("count", "value", descending=[True, False])
    return frame.sort("field", "count", "value", descending=[False, True, False])


def is_near_unique(distinct: int, total: int) -> bool:
    """Return whether a column has another value in most of its ``total`` rows: more than one per two rows.

    Such a column, an identifier or noise, lets a model memorize single rows.
    """
    return total >= MIN_UNIQUE_ROWS and 2 * distinct > total


def automatic_min_count(distinct: int, total: int) -> int:
    """Return the least count of a value with its own id where ``min_count`` is not given: 2 if near-unique, else 1."""
    return 2 if is_near_unique(distinct, total) else 1


@dataclass
class Vocabulary:
    """The values that have an id, in id order from ``FIRST_ID``."""

    values: pl.Series  # canonical
    seen: int  # number of distinct values in the training days
    covered: float  # share of the training values that have an id
    near_unique: bool = False  # whether most of the training values occur once
    keys: InitVar[Keys | None] = None  # of the values, if they are known

    def __post_init__(self, keys: Keys | None) -> None:
        self.lookup = HashTable(value_keys(self.values) if keys is None else keys, FIRST_ID)

    @classmethod
    def build(cls, counters: Sequence[ValueCounter], limits: Sequence[VocabularyLimits]) -> list[Vocabulary]:
        """Build the vocabularies of fields whose values have the same type, the most frequent values first.

        All fields are sorted at once: for a short vocabulary, the calls of polars take longer than its values.
        """
        parts = [counter.counts() for counter in counters]
        counts = sort_counts(parts)
        rows, ends = counts["count"].to_numpy(), np.cumsum([0, *(part.height for part in parts)])
        totals, kept = [], []  # (distinct values, all values) and number of values with an id, of each field
        for counter, (start, stop), limit in zip(counters, pairwise(ends.tolist()), limits, strict=True):
            rare_values, rare_rows = counter.left_out
            seen, total = stop - start + rare_values, int(rows[start:stop].sum()) + rare_rows
            min_count = limit.min_count or automatic_min_count(seen, total)
            frequent = int(np.count_nonzero(rows[start:stop] >= min_count))  # the counts of a field decrease
            totals.append((seen, total))
            kept.append(min(frequent, limit.max_values or stop - start))
        is_kept = np.arange(len(rows)) - np.repeat(ends[:-1], np.diff(ends)) < np.repeat(kept, np.diff(ends))
        values = counts["value"].filter(pl.Series(is_kept)).rechunk()
        keys, vocabularies, first = value_keys(values), [], 0
        for (seen, total), start, size in zip(totals, ends[:-1], kept, strict=True):
            covered = float(rows[start : start + size].sum()) / float(total) if total else 1.0
            unique, own_keys = is_near_unique(seen, total), keys[first : first + size]
            vocabularies.append(cls(values.slice(first, size), seen, covered, unique, own_keys))
            first += size
        return vocabularies

    def encode(self, values: pl.Series) -> Ids:
        """Return the ids of canonical values."""
        missing = null_mask(values)
        if len(self.values):
            values = cast_to_vocabulary(values, self.values.dtype)
        ids = self.lookup(value_keys(values))
        if values.null_count():
            ids[null_mask(values)] = UNSEEN_ID  # a value that does not exist in the type of the vocabulary
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
    missing = null_mask(values)
    numbers: npt.NDArray[Any]
    if values.dtype == pl.String:
        distinct = drop_nulls(values).unique()
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
