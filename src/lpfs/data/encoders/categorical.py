"""Encoders of categorical values: one id per row, or a bag of ids, from a vocabulary or by hashing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.encoders.vocabulary import (
    ValueCounter,
    Vocabulary,
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
    """Return the type of canonical values: ``text``, ``whole`` (integers) or ``fraction`` (floats)."""
    if values.dtype == pl.String:
        return "text"
    return "whole" if values.dtype.is_integer() else "fraction"


def can_contain_values(vocabulary: pl.Series, dtype: pl.DataType) -> bool:
    """Return whether a column of a raw type can hold a value of a vocabulary: one that survives a round trip.

    >>> [can_contain_values(pl.Series(["1", "2"]), dtype) for dtype in (pl.Int8(), pl.Float64())]  # 1.0 is not "1"
    [True, False]
    """
    if not len(vocabulary) or dtype in (pl.Null, pl.String):
        return True
    if dtype == pl.Boolean:
        return vocabulary.dtype == pl.String and bool(vocabulary.is_in(["true", "false"]).any())
    try:
        back = canonical_values(cast_column(vocabulary, dtype, strict=False), hexadecimal=False, locate=str)
        return bool((cast_to_vocabulary(back, vocabulary.dtype) == vocabulary).any())
    except DataError:
        return False


def hashes_alike(dtype: pl.DataType, fitted_type: str | None, raw_type: str | None) -> bool:
    """Return whether values of a column type hash as the training values did.

    ``fitted_type`` is the ``value_type`` of the training values, ``raw_type`` the type of their column.
    """
    if fitted_type is None or dtype == pl.Null or str(dtype) == raw_type:
        return True
    if dtype == pl.String:
        return fitted_type != "text"  # numbers are parsed from it; dates and booleans may be formatted otherwise
    if dtype.is_integer():
        return fitted_type != "text" or raw_type == "String"
    return dtype.is_float() and fitted_type != "text"


def cast_for_hashing(values: pl.Series, fitted_type: str | None, locate: RowLocator) -> pl.Series:
    """Cast canonical values to the value type that was hashed in training; raise DataError if one does not fit."""
    if fitted_type is None or value_type(values) == fitted_type or not len(values):
        return values
    if fitted_type == "text":
        return cast_column(values, pl.String)
    for dtype in (pl.Int64(), pl.UInt64()) if fitted_type == "whole" else (pl.Float64(),):
        numbers = cast_to_vocabulary(values, dtype)
        lost = numbers.is_null() & values.is_not_null()
        if not lost.any():
            return numbers
    row = int(lost.arg_max() or 0)
    expected = "an integer" if fitted_type == "whole" else "a number"
    raise DataError(
        f"{locate(row)}: column {values.name!r}: {values[row]!r:.60} is not {expected}, as all hashed values of "
        "training were"
    )


class CategoricalEncoder(Encoder):
    """One id per row, from a vocabulary or by hashing."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self.counter = ValueCounter()
        self._vocabulary: Vocabulary | None = None
        self._first: Any = None
        self._varies = self._started = False
        self._fitting = True
        self._raw_type: str | None = None  # type of the column in training
        self._value_type: str | None = None  # ``value_type`` of its values
        self._type_fits: dict[str, bool] = {}  # other column types seen after training

    @classmethod
    def from_stored(cls, plan: FieldPlan, metadata: Mapping[str, Any], values: Any) -> CategoricalEncoder:
        """Return the encoder with a stored vocabulary, or with the value type that was hashed."""
        encoder = cls(plan)
        encoder._raw_type = metadata["raw_type"]
        if plan.hash is None:
            encoder._vocabulary = Vocabulary.from_stored(values, metadata["values_seen"], metadata["covered"])
        else:
            encoder._value_type = metadata["value_type"]
        encoder._fitting = False
        return encoder

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        """Count values."""
        values = self._values(column, locate)
        if not self._varies and len(values):
            if not self._started:
                self._first, self._started = values[0], True
            nulls = values.null_count()
            if self._first is None or nulls == len(values):
                self._varies = nulls < len(values) or self._first is not None
            else:
                self._varies = not bool(values.eq_missing(self._first).all())
        if self.plan.hash is None:
            self.counter.add(values)
        return lambda: [value_keys(values), values.is_null().to_numpy()]

    def _values(self, column: pl.Series, locate: RowLocator) -> pl.Series:
        if not self._fitting:
            self._check_type(column.dtype)
        values = canonical_values(column, hexadecimal=self.plan.hexadecimal, locate=locate)
        if self._fitting:
            if column.dtype != pl.Null:
                self._add_type(str(column.dtype), value_type(values))
            return values
        return values if self.plan.hash is None else cast_for_hashing(values, self._value_type, locate)

    def _add_type(self, raw_type: str, value_type: str) -> None:
        """Record the type of training; floats, if some files store integers and others floats."""
        if self._raw_type is None:
            self._raw_type, self._value_type = raw_type, value_type
        elif (self._value_type, value_type) == ("whole", "fraction"):
            self._value_type = value_type

    def _check_type(self, dtype: pl.DataType) -> None:
        """Raise DataError for a column type that cannot hold any value of training."""
        name = str(dtype)
        if name == self._raw_type:
            return
        if name not in self._type_fits:
            self._type_fits[name] = (
                hashes_alike(dtype, self._value_type, self._raw_type)
                if self._vocabulary is None
                else can_contain_values(self._vocabulary.values, dtype)
            )
        if not self._type_fits[name]:
            raise DataError(
                f"column {self.name!r} holds {dtype} and held {self._raw_type or 'another type'} in training, all "
                "its values would be unseen; store it as it was"
            )

    def partial_state(self) -> Any:
        """Return the first value, whether values differ, and their type; counts are merged separately."""
        return self._started, self._first, self._varies, self._raw_type, self._value_type

    def merge(self, state: Any) -> None:
        """Merge whether values differ, and their type."""
        started, first, varies, raw_type, value_type = state
        if started:
            self._varies = self._varies or varies or (self._started and first != self._first)
            if not self._started:
                self._first, self._started = first, True
        if raw_type is not None:
            self._add_type(raw_type, value_type)

    def finish(self) -> None:
        """Build the vocabulary."""
        if self.plan.hash is None:
            self._vocabulary = Vocabulary.build(
                self.counter, min_count=self.plan.min_count or 1, max_values=self.plan.max_values
            )
        self.counter = ValueCounter()
        self._fitting = False

    @property
    def constant(self) -> bool:
        """Whether all training rows hold the same value, or all are missing."""
        return not self._varies

    @property
    def cardinality(self) -> int:
        """Number of ids, including the special ones."""
        return FIRST_ID + self.plan.hash if self._vocabulary is None else self._vocabulary.cardinality  # type: ignore[operator]

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        """Return the id of each row."""
        return self._ids(self._values(column, locate))

    def _ids(self, values: pl.Series) -> Ids:
        if self._vocabulary is None:
            return hashed_ids(values, self.plan.hash or 1)
        return self._vocabulary.encode(values)

    def values_to_store(self) -> Any:
        """Return the vocabulary."""
        return None if self._vocabulary is None else self._vocabulary.values_to_store()

    def metadata(self) -> dict[str, Any]:
        """Return how ids are computed."""
        if self._vocabulary is None:
            types = {"value_type": self._value_type, "raw_type": self._raw_type}
            return {"ids": "hash", "modulo": self.plan.hash, **types}
        seen, covered = self._vocabulary.seen, round(self._vocabulary.covered, 6)
        return {"ids": "vocabulary", "values_seen": seen, "covered": covered, "raw_type": self._raw_type}


class BagEncoder(CategoricalEncoder):
    """A bag of ids per row; a missing bag holds ``MISSING_ID``, an empty one no id."""

    kind = "multi"

    def _lists(self, column: pl.Series) -> pl.Series:
        if isinstance(column.dtype, pl.Array):
            return column.arr.to_list()
        if isinstance(column.dtype, pl.List):
            return column
        if column.dtype == pl.Null:
            return cast_column(column, pl.List(pl.String))
        if self.plan.separator is None:
            raise DataError(f"column {self.name!r} is multi but holds {column.dtype}, not lists; give its separator")
        text = cast_column(canonical_values(column, hexadecimal=False, locate=str), pl.String)
        return text.str.split(self.plan.separator)

    def _flat(self, column: pl.Series, locate: RowLocator) -> tuple[pl.Series, AnyArray]:
        lists = self._lists(column)
        lengths = lists.list.len().fill_null(1).to_numpy().astype(np.int64)
        nonempty = lists.filter((lists.list.len() > 0).fill_null(True))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        values = nonempty.explode() if len(nonempty) else pl.Series(self.name, [], lists.dtype.inner)  # type: ignore[attr-defined]
        if values.dtype == pl.String:
            values = values.replace("", None)
        return super()._values(values, lambda position: locate(int(rows[position]))), lengths

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        """Count the values of all bags."""
        values, lengths = self._flat(column, locate)
        if self.plan.hash is None:
            self.counter.add(values)
        if not self._varies and len(lengths):
            first = values.head(int(lengths[0]))
            if not self._started:
                self._first, self._started = first.to_list(), True
            size = len(self._first)
            same = bool((lengths == size).all()) and values.to_list() == self._first * len(lengths)
            self._varies = not same
        return lambda: [value_keys(values), values.is_null().to_numpy(), lengths]

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        """Return the ids of all rows, concatenated, and their number per row."""
        values, lengths = self._flat(column, locate)
        return self._ids(values), lengths
