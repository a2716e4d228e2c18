"""Encoders of values: one id a row, or a bag of them, from a vocabulary or by hashing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.encoders.base import Encoder, Where
from lpfs.data.hashing import Ids
from lpfs.data.encode.types import as_hashed, hashable, knowable, sort_of
from lpfs.data.encoders.vocabulary import Counter, Vocabulary, canonical, hashed, keys_of
from lpfs.data.fields import FieldPlan
from lpfs.data.raw.cast import as_type
from lpfs.data.store.format import FIRST_ID, AnyArray
from lpfs.errors import DataError


class CategoricalEncoder(Encoder):
    """One id a row, from a vocabulary or by hashing."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self.counter = Counter()
        self._vocabulary: Vocabulary | None = None
        self._first: Any = None
        self._varies = self._begun = False
        self._learning = True
        self._raw: str | None = None  # the type of the column in training, and the sort of its values
        self._of: str | None = None
        self._fits: dict[str, bool] = {}  # other types met since

    @classmethod
    def restored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> CategoricalEncoder:
        """Return the encoder with this vocabulary, or that hashed so."""
        made = cls(plan)
        if plan.hash is None:
            made._vocabulary = Vocabulary.restored(values, about["values_seen"], about["covered"])
            made._raw = about.get("raw")
        else:
            made._of, made._raw = about["of"], about["raw"]
        made._learning = False
        return made

    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
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
        return lambda: [keys_of(values), values.is_null().to_numpy()]

    def _values(self, column: pl.Series, where: Where) -> pl.Series:
        if not self._learning:
            self._check_type(column.dtype)
        values = canonical(column, hexadecimal=self.plan.hexadecimal, where=where)
        if self._learning:
            self._note_type(column.dtype, sort_of(values))
            return values
        return values if self.plan.hash is None else as_hashed(values, self._of, where)

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
                hashable(dtype, self._of, self._raw) if known is None else knowable(known.values, dtype)
            )
        if not self._fits[name]:
            then = self._raw or "another type"
            raise DataError(
                f"column {self.name!r} holds {dtype} and held {then} in training, no value would be known; "
                "store it as it was"
            )

    def notes(self) -> Any:
        """Return whether values differ, the first one, and the type they had; counts go their own way."""
        return self._begun, self._first, self._varies, self._raw, self._of

    def join(self, notes: Any) -> None:
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
        self.counter = Counter()
        self._learning = False

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same value, or none does."""
        return not self._varies

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return FIRST_ID + self.plan.hash if self._vocabulary is None else self._vocabulary.cardinality  # type: ignore[operator]

    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return the id of each row."""
        return self._ids(self._values(column, where))

    def _ids(self, values: pl.Series) -> Ids:
        if self._vocabulary is None:
            return hashed(values, self.plan.hash or 1)
        return self._vocabulary.encode(values)

    def stored(self) -> Any:
        """Return the vocabulary."""
        return None if self._vocabulary is None else self._vocabulary.stored()

    def about(self) -> dict[str, Any]:
        """Return how ids were made."""
        if self._vocabulary is None:
            return {"ids": "hash", "modulo": self.plan.hash, "of": self._of, "raw": self._raw}
        seen, covered = self._vocabulary.seen, round(self._vocabulary.covered, 6)
        return {"ids": "vocabulary", "values_seen": seen, "covered": covered, "raw": self._raw}


class MultiEncoder(CategoricalEncoder):
    """A bag of ids a row; a missing bag holds the id of missing, an empty one nothing."""

    kind = "multi"

    def _lists(self, column: pl.Series) -> pl.Series:
        if isinstance(column.dtype, pl.Array):
            return column.arr.to_list()
        if isinstance(column.dtype, pl.List):
            return column
        if column.dtype == pl.Null:
            return as_type(column, pl.List(pl.String))
        if self.plan.separator is None:
            raise DataError(
                f"column {self.name!r} is multi but holds {column.dtype}, not lists; give its separator"
            )
        return as_type(canonical(column, hexadecimal=False, where=str), pl.String).str.split(self.plan.separator)

    def _flat(self, column: pl.Series, where: Where) -> tuple[pl.Series, AnyArray]:
        lists = self._lists(column)
        lengths = lists.list.len().fill_null(1).to_numpy().astype(np.int64)
        full = lists.filter((lists.list.len() > 0).fill_null(True))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        values = full.explode() if len(full) else pl.Series(self.name, [], lists.dtype.inner)  # type: ignore[attr-defined]
        if values.dtype == pl.String:
            values = values.replace("", None)
        return super()._values(values, lambda place: where(int(rows[place]))), lengths

    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
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
        return lambda: [keys_of(values), values.is_null().to_numpy(), lengths]

    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return all ids row after row, and how many each row has."""
        values, lengths = self._flat(column, where)
        return self._ids(values), lengths
