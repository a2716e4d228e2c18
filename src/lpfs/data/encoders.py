"""One encoder a field: looks at the training period, then turns columns into ids, numbers or bags."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.astype import as_type
from lpfs.data.fieldplan import FieldPlan
from lpfs.data.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.data.lookup import Ids
from lpfs.data.numeric import (
    Moments,
    Numbers,
    Quantiles,
    as_numbers,
    as_vectors,
    bin_ids,
    bin_names,
    compress,
)
from lpfs.data.vocab import Counter, Vocabulary, canonical, hashed, keys_of
from lpfs.errors import DataError
from lpfs.schema import Field

Where = Callable[[int], str]


class Encoder(ABC):
    """The contract: ``observe`` training rows, ``finish`` once, then ``encode`` any rows."""

    kind: str

    def __init__(self, plan: FieldPlan) -> None:
        self.plan = plan
        self.name = plan.name

    @abstractmethod
    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
        """Take in rows of the training period; return a function that gives what tells the column apart."""

    @abstractmethod
    def finish(self) -> None:
        """Decide on ids or scales."""

    @abstractmethod
    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return ids, numbers, or a bag (ids, lengths)."""

    @property
    @abstractmethod
    def constant(self) -> bool:
        """Whether every training row holds the same."""

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return 0

    def stored(self) -> Any:
        """Return raw values in id order, or None."""
        return None

    def about(self) -> dict[str, Any]:
        """Return JSON values that say how the column was turned into the field."""
        return {}

    @property
    def field(self) -> Field:
        """The field as it goes into the schema."""
        plan = self.plan
        dim = plan.width if self.kind == "numeric" else plan.dim
        return Field(plan.name, self.kind, self.cardinality, dim, plan.group, float(plan.cost))  # type: ignore[arg-type]


class CategoricalEncoder(Encoder):
    """One id a row, from a vocabulary or by hashing."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self._counter = Counter()
        self._vocabulary: Vocabulary | None = None
        self._first: Any = None
        self._varies = self._begun = False

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
            self._counter.add(values)
        return lambda: [keys_of(values), values.is_null().to_numpy()]

    def _values(self, column: pl.Series, where: Where) -> pl.Series:
        return canonical(column, hexadecimal=self.plan.hexadecimal, where=where)

    def finish(self) -> None:
        """Build the vocabulary."""
        if self.plan.hash is None:
            self._vocabulary = Vocabulary.build(
                self._counter.result(), min_count=self.plan.min_count or 1, max_values=self.plan.max_values
            )
        self._counter = Counter()

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
            return {"ids": "hash", "modulo": self.plan.hash}
        seen, covered = self._vocabulary.seen, round(self._vocabulary.covered, 6)
        return {"ids": "vocabulary", "values_seen": seen, "covered": covered}


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
        return as_type(canonical(column, hexadecimal=False, where=str), pl.String).str.split(
            self.plan.separator
        )

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
            self._counter.add(values)
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


class NumericEncoder(Encoder):
    """Numbers, compressed and standardised."""

    kind = "numeric"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self._moments = Moments(plan.width)
        self._negative = False

    def _numbers(self, column: pl.Series, where: Where) -> Numbers:
        if self.plan.width == 1 and not column.dtype.is_nested():
            return as_numbers(column, where).reshape(-1, 1)
        return as_vectors(column, self.plan.width, self.plan.separator, where)

    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
        """Add to mean and deviation."""
        numbers = self._numbers(column, where)
        self._negative = self._negative or bool((numbers < 0).any())
        self._moments.add(compress(numbers, self.plan.transform))
        return lambda: [numbers]

    def finish(self) -> None:
        """Nothing is left to decide."""

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same."""
        return self._moments.constant

    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return standardised numbers, NaN where missing."""
        numbers = compress(self._numbers(column, where), self.plan.transform)
        scaled = (numbers - self._moments.mean) / self._moments.deviation
        return np.clip(scaled, -1e38, 1e38).astype(np.float32)

    def about(self) -> dict[str, Any]:
        """Return the scale, so that new rows can be treated the same way."""
        return {"transform": self.plan.transform, "signed": self._negative, **self._moments.about()}


class BinsEncoder(Encoder):
    """Numbers as the ids of quantile bins."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan, seed: int) -> None:
        super().__init__(plan)
        self._quantiles: Quantiles | None = Quantiles(seed)
        self._moments = Moments(1)
        self._edges: Numbers = np.zeros(0)

    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
        """Sample numbers."""
        numbers = as_numbers(column, where)
        if self._quantiles is not None:
            self._quantiles.add(numbers)
        self._moments.add(compress(numbers.reshape(-1, 1), "log"))
        return lambda: [numbers]

    def finish(self) -> None:
        """Set the edges."""
        if self._quantiles is not None:
            self._edges = self._quantiles.edges(self.plan.bins or 2)
        self._quantiles = None

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same."""
        return self._moments.constant

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return FIRST_ID + len(self._edges) + 1

    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return the bin of each row."""
        return bin_ids(as_numbers(column, where), self._edges)

    def stored(self) -> Any:
        """Return the names of the bins."""
        return bin_names(self._edges)

    def about(self) -> dict[str, Any]:
        """Return the edges."""
        return {"ids": "bins", "edges": self._edges.tolist(), "missing_id": MISSING_ID}


def make_encoder(plan: FieldPlan, seed: int) -> Encoder:
    """Return the encoder for a plan."""
    if plan.kind == "multi":
        return MultiEncoder(plan)
    if plan.kind == "numeric":
        return BinsEncoder(plan, seed) if plan.bins else NumericEncoder(plan)
    return CategoricalEncoder(plan)
