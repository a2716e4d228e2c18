"""Encoders of values: one id a row, or a bag of them, from a vocabulary or by hashing.

The raw type of a column in training and now: can its values still be known?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.encoders.vocabulary import (
    ValueCounter,
    Vocabulary,
    Where,
    canonical_values,
    cast_to_vocabulary,
    hashed_ids,
    value_keys,
)
from lpfs.data.fields import FieldPlan
from lpfs.data.hashing import Ids
from lpfs.data.parsing import cast_column
from lpfs.data.store.format import FIRST_ID, AnyArray
from lpfs.errors import DataError


def value_type(values: pl.Series) -> str:
    """Return what canonical values are: ``text``, ``whole`` numbers or a ``fraction``."""
    if values.dtype == pl.String:
        return "text"
    return "whole" if values.dtype.is_integer() else "fraction"


def can_contain_values(vocabulary: pl.Series, dtype: pl.DataType) -> bool:
    """Whether a column of a raw type can hold any value of a vocabulary: one that survives the way there and back.

    >>> [knowable(pl.Series(["1", "2"]), dtype) for dtype in (pl.Int8(), pl.Float64())]  # 1.0 is not "1"
    [True, False]
    """
    if not len(vocabulary) or dtype in (pl.Null, pl.String):
        return True
    if dtype == pl.Boolean:
        return vocabulary.dtype == pl.String and bool(vocabulary.is_in(["true", "false"]).any())
    try:
        back = canonical_values(cast_column(vocabulary, dtype, strict=False), hexadecimal=False, where=str)
        return bool((cast_to_vocabulary(back, vocabulary.dtype) == vocabulary).any())
    except DataError:
        return False


def hashes_alike(dtype: pl.DataType, of: str | None, raw: str | None) -> bool:
    """Whether values of a raw type hash as those of training did, which were of a sort and a raw type."""
    if of is None or dtype == pl.Null or str(dtype) == raw:
        return True
    if dtype == pl.String:
        return of != "text"  # numbers are read from it; dates and truths may be spelled otherwise
    if dtype.is_integer():
        return of != "text" or raw == "String"
    return dtype.is_float() and of != "text"


def cast_for_hashing(values: pl.Series, of: str | None, where: Where) -> pl.Series:
    """Bring canonical values to the sort that was hashed in training, or say which value is not of it."""
    if of is None or value_type(values) == of or not len(values):
        return values
    if of == "text":
        return cast_column(values, pl.String)
    for dtype in (pl.Int64(), pl.UInt64()) if of == "whole" else (pl.Float64(),):
        numbers = cast_to_vocabulary(values, dtype)
        lost = numbers.is_null() & values.is_not_null()
        if not lost.any():
            return numbers
    row = int(lost.arg_max() or 0)
    what = "whole number" if of == "whole" else "number"
    raise DataError(
        f"{where(row)}: column {values.name!r}: {values[row]!r:.60} is not a {what}; only {what}s were hashed "
        "in training"
    )


class CategoricalEncoder(Encoder):
    """One id a row, from a vocabulary or by hashing."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self.counter = ValueCounter()
        self._vocabulary: Vocabulary | None = None
        self._first: Any = None
        self._varies = self._begun = False
        self._learning = True
        self._raw: str | None = None  # the type of the column in training, and the sort of its values
        self._of: str | None = None
        self._fits: dict[str, bool] = {}  # other types met since

    @classmethod
    def from_stored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> CategoricalEncoder:
        """Return the encoder with this vocabulary, or that hashed so."""
        made = cls(plan)
        if plan.hash is None:
            made._vocabulary = Vocabulary.restored(values, about["values_seen"], about["covered"])
            made._raw = about.get("raw")
        else:
            made._of, made._raw = about["of"], about["raw"]
        made._learning = False
        return made

    def observe(self, column: pl.Series, where: RowLocator) -> Callable[[], list[AnyArray]]:
        """Count values."""
        values = self._values(column, where)
        if not self._varies and len(values):
            if not self._begun:
                self._first, self._begun = values[0], True
            empty = values.null_count()
            if self._first is None or empty == len(values):
                self._varies = empty < len(values) or self._first is not None
            else:
                self._varies = not bool(values.eq_missing(self._first).all())
        if self.plan.hash is None:
            self.counter.add(values)
        return lambda: [value_keys(values), values.is_null().to_numpy()]

    def _values(self, column: pl.Series, where: RowLocator) -> pl.Series:
        if not self._learning:
            self._check_type(column.dtype)
        values = canonical_values(column, hexadecimal=self.plan.hexadecimal, where=where)
        if self._learning:
            self._note_type(column.dtype, value_type(values))
            return values
        return values if self.plan.hash is None else cast_for_hashing(values, self._of, where)

    def _note_type(self, dtype: pl.DataType, sort: str) -> None:
        """Remember the type of training; of whole numbers in some files and fractions in others, fractions."""
        if dtype != pl.Null:
            self._note(str(dtype), sort)

    def _note(self, raw: str, sort: str) -> None:
        if self._raw is None:
            self._raw, self._of = raw, sort
        elif (self._of, sort) == ("whole", "fraction"):
            self._of = sort

    def _check_type(self, dtype: pl.DataType) -> None:
        """Refuse a type in which no value of training can be written."""
        name = str(dtype)
        if name == self._raw:
            return
        if name not in self._fits:
            known = self._vocabulary
            self._fits[name] = (
                hashes_alike(dtype, self._of, self._raw)
                if known is None
                else can_contain_values(known.values, dtype)
            )
        if not self._fits[name]:
            then = self._raw or "another type"
            raise DataError(
                f"column {self.name!r} holds {dtype} and held {then} in training, no value would be known; "
                "store it as it was"
            )

    def partial_state(self) -> Any:
        """Return whether values differ, the first one, and the type they had; counts go their own way."""
        return self._begun, self._first, self._varies, self._raw, self._of

    def merge(self, notes: Any) -> None:
        """Merge whether values differ, and their type."""
        begun, first, varies, raw, of = notes
        if begun:
            self._varies = self._varies or varies or (self._begun and first != self._first)
            if not self._begun:
                self._first, self._begun = first, True
        if raw is not None:
            self._note(raw, of)

    def finish(self) -> None:
        """Build the vocabulary."""
        if self.plan.hash is None:
            self._vocabulary = Vocabulary.build(
                self.counter, min_count=self.plan.min_count or 1, max_values=self.plan.max_values
            )
        self.counter = ValueCounter()
        self._learning = False

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same value, or none does."""
        return not self._varies

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return FIRST_ID + self.plan.hash if self._vocabulary is None else self._vocabulary.cardinality  # type: ignore[operator]

    def encode(self, column: pl.Series, where: RowLocator) -> Any:
        """Return the id of each row."""
        return self._ids(self._values(column, where))

    def _ids(self, values: pl.Series) -> Ids:
        if self._vocabulary is None:
            return hashed_ids(values, self.plan.hash or 1)
        return self._vocabulary.encode(values)

    def values_to_store(self) -> Any:
        """Return the vocabulary."""
        return None if self._vocabulary is None else self._vocabulary.stored()

    def metadata(self) -> dict[str, Any]:
        """Return how ids were made."""
        if self._vocabulary is None:
            return {"ids": "hash", "modulo": self.plan.hash, "of": self._of, "raw": self._raw}
        seen, covered = self._vocabulary.seen, round(self._vocabulary.covered, 6)
        return {"ids": "vocabulary", "values_seen": seen, "covered": covered, "raw": self._raw}


class BagEncoder(CategoricalEncoder):
    """A bag of ids a row; a missing bag holds the id of missing, an empty one nothing."""

    kind = "multi"

    def _lists(self, column: pl.Series) -> pl.Series:
        if isinstance(column.dtype, pl.Array):
            return column.arr.to_list()
        if isinstance(column.dtype, pl.List):
            return column
        if column.dtype == pl.Null:
            return cast_column(column, pl.List(pl.String))
        if self.plan.separator is None:
            raise DataError(
                f"column {self.name!r} is multi but holds {column.dtype}, not lists; give its separator"
            )
        return cast_column(canonical_values(column, hexadecimal=False, where=str), pl.String).str.split(
            self.plan.separator
        )

    def _flat(self, column: pl.Series, where: RowLocator) -> tuple[pl.Series, AnyArray]:
        lists = self._lists(column)
        lengths = lists.list.len().fill_null(1).to_numpy().astype(np.int64)
        full = lists.filter((lists.list.len() > 0).fill_null(True))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        values = full.explode() if len(full) else pl.Series(self.name, [], lists.dtype.inner)  # type: ignore[attr-defined]
        if values.dtype == pl.String:
            values = values.replace("", None)
        return super()._values(values, lambda place: where(int(rows[place]))), lengths

    def observe(self, column: pl.Series, where: RowLocator) -> Callable[[], list[AnyArray]]:
        """Count the values of all bags."""
        values, lengths = self._flat(column, where)
        if self.plan.hash is None:
            self.counter.add(values)
        if not self._varies and len(lengths):
            first = values.head(int(lengths[0]))
            if not self._begun:
                self._first, self._begun = first.to_list(), True
            size = len(self._first)
            same = bool((lengths == size).all()) and values.to_list() == self._first * len(lengths)
            self._varies = not same
        return lambda: [value_keys(values), values.is_null().to_numpy(), lengths]

    def encode(self, column: pl.Series, where: RowLocator) -> Any:
        """Return all ids row after row, and how many each row has."""
        values, lengths = self._flat(column, where)
        return self._ids(values), lengths
