"""Encoders of numbers: standardised, or as ids of quantile bins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.encoders.base import Encoder, Where
from lpfs.data.encoders.numeric import Moments, Numbers, Quantiles, as_numbers, as_vectors, bin_ids, bin_names, compress
from lpfs.data.fields import FieldPlan
from lpfs.data.store.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.errors import StateError


class NumericEncoder(Encoder):
    """Numbers, compressed and standardised."""

    kind = "numeric"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self._moments = Moments(plan.width)
        self._mean, self._deviation = self._moments.mean, self._moments.deviation
        self._negative = False

    @classmethod
    def restored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> NumericEncoder:
        """Return the encoder with this scale."""
        made = cls(plan)
        made._mean, made._deviation = np.array(about["mean"], float), np.array(about["deviation"], float)
        made._negative = about["signed"]
        return made

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

    def notes(self) -> Any:
        """Return mean and deviation so far, and whether anything is negative."""
        return self._moments, self._negative

    def join(self, notes: Any) -> None:
        """Merge mean and deviation."""
        moments, negative = notes
        self._moments.join(moments)
        self._negative = self._negative or negative

    def finish(self) -> None:
        """Set the scale."""
        self._mean, self._deviation = self._moments.mean, self._moments.deviation

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same."""
        return self._moments.constant

    def encode(self, column: pl.Series, where: Where) -> Any:
        """Return standardised numbers, NaN where missing."""
        numbers = compress(self._numbers(column, where), self.plan.transform)
        scaled = (numbers - self._mean) / self._deviation
        return np.clip(scaled, -1e38, 1e38).astype(np.float32)

    def about(self) -> dict[str, Any]:
        """Return the scale, so that new rows can be treated the same way."""
        scale = {"mean": self._mean.tolist(), "deviation": self._deviation.tolist()}
        return {"transform": self.plan.transform, "signed": self._negative, **scale}


class BinsEncoder(Encoder):
    """Numbers as the ids of quantile bins."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan, seed: int = 0, first: int = 0) -> None:
        super().__init__(plan)
        self._quantiles: Quantiles | None = Quantiles(seed, first)
        self._moments = Moments(1)
        self._edges: Numbers = np.zeros(0)

    @classmethod
    def restored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> BinsEncoder:
        """Return the encoder with these edges."""
        made = cls(plan)
        made._quantiles, made._edges = None, np.array(about["edges"], float)
        return made

    def observe(self, column: pl.Series, where: Where) -> Callable[[], list[AnyArray]]:
        """Sample numbers."""
        numbers = as_numbers(column, where)
        if self._quantiles is not None:
            self._quantiles.add(numbers)
        self._moments.add(compress(numbers.reshape(-1, 1), "log"))
        return lambda: [numbers]

    def notes(self) -> Any:
        """Return whether the numbers differ; the sample goes its own way."""
        return self._moments

    def join(self, notes: Any) -> None:
        """Merge whether the numbers differ."""
        self._moments.join(notes)

    @property
    def quantiles(self) -> Quantiles:
        """The sample, until the edges are set."""
        if self._quantiles is None:
            raise StateError(f"field {self.name!r}: its edges are set, the sample is gone")
        return self._quantiles

    def finish(self) -> None:
        """Set the edges."""
        if self._quantiles is not None:
            bins = self.plan.bins
            self._edges = self._quantiles.edges(bins if isinstance(bins, int) else self._quantiles.enough())
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
