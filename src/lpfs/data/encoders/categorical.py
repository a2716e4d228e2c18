"""Encoders of categorical values: one id per row, or a bag of ids, from a vocabulary or by hashing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from lpfs._validation import is_number
from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.encoders.vocabulary import (
    MIN_MERGE_ROWS,
    ValueCounter,
    Vocabulary,
    VocabularyLimits,
    canonical_values,
    cast_to_vocabulary,
    hashed_ids,
    null_mask,
    value_keys,
)
from lpfs.data.fields import FieldPlan
from lpfs.data.hashing import Ids
from lpfs.data.parsing import cast_column, value_error
from lpfs.data.store.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.errors import DataError

OTHER_ROWS = MIN_MERGE_ROWS // 64  # an encoder without a vocabulary counts as so many values in its group
VALUE_TYPES = ("text", "integer", "float")


def value_type(values: pl.Series) -> str:
    """Return the type of canonical values: ``text``, ``integer`` or ``float``."""
    return "text" if values.dtype == pl.String else "integer" if values.dtype.is_integer() else "float"


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
    if fitted_type == "text":  # dates and booleans may be formatted otherwise
        return dtype.is_integer() and raw_type == "String"
    return dtype == pl.String or dtype.is_integer() or dtype.is_float()  # numbers are parsed from text


def cast_for_hashing(values: pl.Series, fitted_type: str | None, locate: RowLocator) -> pl.Series:
    """Cast canonical values to the value type that was hashed in training; raise DataError if one does not fit."""
    if fitted_type is None or value_type(values) == fitted_type or not len(values):
        return values
    if fitted_type == "text":
        return cast_column(values, pl.String)
    for dtype in (pl.Int64(), pl.UInt64()) if fitted_type == "integer" else (pl.Float64(),):
        numbers = cast_to_vocabulary(values, dtype)
        lost = numbers.is_null() & values.is_not_null()
        if not lost.any():
            return numbers
    expected = "an integer" if fitted_type == "integer" else "a number"
    raise value_error(values, lost, locate, f"is not {expected}, as all hashed values of training were")


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
        encoder = cls(plan)
        encoder._raw_type = metadata["raw_type"]
        if plan.hash is None:
            if values is None:
                raise ValueError("it has no vocabulary")
            stored = pl.Series("value", values, pl.String if isinstance(values, list) else None)
            if stored.n_unique() != len(stored) or stored.null_count():
                raise ValueError("its vocabulary has a value twice")
            seen, covered = metadata["values_seen"], metadata["covered"]
            if not is_number(seen) or not is_number(covered):
                raise ValueError(f"values_seen and covered must be numbers, found {seen!r} and {covered!r}")
            encoder._vocabulary = Vocabulary(stored, seen, covered)
        else:
            encoder._value_type = metadata["value_type"]
        if not isinstance(encoder._raw_type, str | None) or encoder._value_type not in (None, *VALUE_TYPES):
            raise ValueError(f"raw_type {encoder._raw_type!r} and value_type {encoder._value_type!r} are not types")
        encoder._fitting = False
        return encoder

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        values = self._values(column, locate)
        if not self._varies and len(values):
            self._track_first(values[0], values.n_unique() > 1)
        if self.plan.hash is None:
            self.counter.add(values)
        return lambda: [value_keys(values), null_mask(values)]

    def _track_first(self, first: Any, varies: bool) -> None:
        """Compare the first value of a chunk, whose values may differ, with the first one of all."""
        self._varies = self._varies or varies or (self._started and first != self._first)
        if not self._started:
            self._first, self._started = first, True

    def _values(self, column: pl.Series, locate: RowLocator) -> pl.Series:
        if not self._fitting:
            self._check_type(column.dtype)
        values = canonical_values(column, hexadecimal=self.plan.hexadecimal, locate=locate)
        if not self._fitting:
            return values if self.plan.hash is None else cast_for_hashing(values, self._value_type, locate)
        if column.dtype != pl.Null:
            self._add_type(str(column.dtype), value_type(values))
        return values

    def _add_type(self, raw_type: str, value_type: str) -> None:
        """Record the type of training; floats, if some files store integers and others floats."""
        if self._raw_type is None:
            self._raw_type, self._value_type = raw_type, value_type
        elif (self._value_type, value_type) == ("integer", "float"):
            self._value_type = value_type

    def _check_type(self, dtype: pl.DataType) -> None:
        """Raise DataError for a column type that cannot hold any value of training."""
        name = str(dtype)
        if name not in self._type_fits:
            self._type_fits[name] = name == self._raw_type or (
                hashes_alike(dtype, self._value_type, self._raw_type)
                if self._vocabulary is None
                else can_contain_values(self._vocabulary.values, dtype)
            )
        if not self._type_fits[name]:
            types = f"{dtype} and held {self._raw_type or 'another type'} in training"
            raise DataError(f"column {self.name!r} holds {types}, all its values would be unseen; store it as it was")

    def partial_state(self) -> Any:
        return self._started, self._first, self._varies, self._raw_type, self._value_type

    def merge(self, state: Any) -> None:
        started, first, varies, raw_type, value_type = state
        if started:
            self._track_first(first, varies)
        if raw_type is not None:
            self._add_type(raw_type, value_type)

    @property
    def limits(self) -> VocabularyLimits:
        """Limits of the vocabulary."""
        return VocabularyLimits(self.plan.min_count or 0, self.plan.max_values)

    def finish(self) -> None:
        finish_together([self])

    def set_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Fix the ids; None if values are hashed."""
        self._vocabulary, self.counter, self._fitting = vocabulary, ValueCounter(), False

    @property
    def constant(self) -> bool:
        return not self._varies

    @property
    def near_unique(self) -> bool:
        return self._vocabulary is not None and self._vocabulary.near_unique

    @property
    def cardinality(self) -> int:
        return FIRST_ID + (self.plan.hash or 0 if self._vocabulary is None else len(self._vocabulary.values))

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        return self._ids(self._values(column, locate))

    def _ids(self, values: pl.Series) -> Ids:
        return hashed_ids(values, self.plan.hash or 1) if self._vocabulary is None else self._vocabulary.encode(values)

    def values_to_store(self) -> Any:
        if self._vocabulary is None:
            return None
        values = self._vocabulary.values  # numbers (also if hexadecimal) are stored as an array, texts as a list
        return values.to_list() if values.dtype == pl.String else values.to_numpy()

    def metadata(self) -> dict[str, Any]:
        if self._vocabulary is None:
            types = {"value_type": self._value_type, "raw_type": self._raw_type}
            return {"ids": "hash", "modulo": self.plan.hash, **types}
        seen, covered = self._vocabulary.seen, round(self._vocabulary.covered, 6)
        return {"ids": "vocabulary", "values_seen": seen, "covered": covered, "raw_type": self._raw_type}


def group_encoders(encoders: Iterable[Encoder]) -> list[list[Encoder]]:
    """Divide encoders into groups for ``finish_together``, each with at most ``MIN_MERGE_ROWS`` values and one more."""
    groups: list[list[Encoder]] = []
    open_groups: dict[str, tuple[list[Encoder], int]] = {}  # by type: group and number of its values
    for encoder in encoders:
        has_vocabulary = isinstance(encoder, CategoricalEncoder) and encoder.plan.hash is None
        kind, rows = encoder.counter.kind_and_rows() if has_vocabulary else ("", OTHER_ROWS)  # type: ignore[attr-defined]
        group, size = open_groups.get(kind, ([], MIN_MERGE_ROWS))
        if size >= MIN_MERGE_ROWS:
            group, size = [], 0
            groups.append(group)
        group.append(encoder)
        open_groups[kind] = group, size + rows
    return groups


def finish_together(encoders: Sequence[Encoder]) -> None:
    """Finish a group of encoders; their vocabularies, all of one type, are built at once."""
    with_vocabulary = []
    for encoder in encoders:
        if not isinstance(encoder, CategoricalEncoder):
            encoder.finish()
        elif encoder.plan.hash is not None:
            encoder.set_vocabulary(None)
        else:
            with_vocabulary.append(encoder)
    if with_vocabulary:
        counters = [encoder.counter for encoder in with_vocabulary]
        vocabularies = Vocabulary.build(counters, [encoder.limits for encoder in with_vocabulary])
        for encoder, vocabulary in zip(with_vocabulary, vocabularies, strict=True):
            encoder.set_vocabulary(vocabulary)


def plain_vocabulary(encoder: Encoder) -> pl.Series | None:
    """Return the vocabulary, if an encoder looks up the values of rows, one per row, as they are; else None."""
    if type(encoder) is not CategoricalEncoder or encoder.plan.hexadecimal or encoder._vocabulary is None:
        return None
    return encoder._vocabulary.values


def is_text_vocabulary(encoder: Encoder) -> bool:
    """Return whether an encoder looks up texts, one per row, in a vocabulary; see ``encode_texts``."""
    values = plain_vocabulary(encoder)
    return values is not None and values.dtype == pl.String


def encode_texts(encoders: Sequence[Encoder], columns: Sequence[pl.Series]) -> list[Ids]:
    """Return the ids of columns of text, for encoders with ``is_text_vocabulary``; each is what ``encode`` returns.

    All texts are hashed in one call of polars, which takes 90 µs however few they are.
    """
    values = pl.concat([column.rename("") for column in columns])
    keys, missing, rows, result = value_keys(values), null_mask(values), len(columns[0]), []
    for number, encoder in enumerate(encoders):
        part = slice(number * rows, (number + 1) * rows)
        ids = encoder._vocabulary.lookup(keys[part])  # type: ignore[attr-defined]
        ids[missing[part]] = MISSING_ID
        result.append(ids)
    return result


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
        sizes = lists.list.len()  # every call of polars takes about 60 µs
        lengths = (sizes.fill_null(1) if sizes.null_count() else sizes).to_numpy().astype(np.int64)
        nonempty = lists if lengths.all() else lists.filter(pl.Series(lengths > 0))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        values = nonempty.explode() if len(nonempty) else pl.Series(self.name, [], lists.dtype.inner)  # type: ignore[attr-defined]
        if values.dtype == pl.String and (values == "").any():
            values = values.replace("", None)
        return super()._values(values, lambda position: locate(int(rows[position]))), lengths

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        values, lengths = self._flat(column, locate)
        if self.plan.hash is None:
            self.counter.add(values)
        if not self._varies and len(lengths):
            first = values.head(int(lengths[0])).to_list()
            same = bool((lengths == lengths[0]).all()) and values.to_list() == first * len(lengths)
            self._track_first(first, not same)
        return lambda: [value_keys(values), null_mask(values), lengths]

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        values, lengths = self._flat(column, locate)
        return self._ids(values), lengths
