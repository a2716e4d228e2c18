"""Numbers: log1p, standardised from the training period, or quantile bins.

Encoders of numbers: standardised, or as ids of quantile bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.fields import FieldPlan
from lpfs.data.hashing import HashValues, Ids, splitmix64
from lpfs.data.parsing import MISSING_NUMBER_TEXTS, cast_column
from lpfs.data.store.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.errors import DataError, StateError

Numbers = npt.NDArray[np.float64]
MIN_BINS, MOST_BINS, ROWS_PER_BIN = 16, 256, 500  # where the number of bins is found from that of rows
SAMPLED = 1 << 18  # values kept of a column for its quantiles


def as_numbers(values: pl.Series, where: Callable[[int], str]) -> Numbers:
    """Return a column as numbers, NaN where missing or not finite; say which value is no number."""
    if values.dtype == pl.Boolean:
        values = cast_column(values, pl.UInt8)
    if values.dtype.is_nested() or values.dtype.is_temporal() or values.dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {values.name!r}: {values.dtype} is not a number; set another kind")
    numbers = cast_column(values, pl.Float64, strict=False)
    result = numbers.to_numpy(writable=True)
    if numbers.null_count() != values.null_count():
        text = cast_column(values, pl.String)
        for row in np.flatnonzero((numbers.is_null() & values.is_not_null()).to_numpy()).tolist():
            result[row] = _parse_number(text[row], values.name, where, row)
    result[np.isinf(result)] = np.nan
    return result


def _parse_number(text: str, name: str, where: Callable[[int], str], row: int) -> float:
    """Read a number that polars does not take."""
    text = text.strip()
    if text.lower() in MISSING_NUMBER_TEXTS:
        return float("nan")
    try:
        return float(text.replace("_", "x"))
    except ValueError:
        raise DataError(
            f"{where(row)}: column {name!r}: {text!r:.60} is not a number; "
            "repair it, or set kind = 'categorical' for this column"
        ) from None


def as_vectors(values: pl.Series, width: int, separator: str | None, where: Callable[[int], str]) -> Numbers:
    """Return a list column, or text with separators, as (n, width) numbers; a missing list is all NaN."""
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    if values.dtype == pl.Null:
        values = cast_column(values, pl.List(pl.Float64))
    if values.dtype == pl.String and separator is not None:
        values = values.str.split(separator)
    if not isinstance(values.dtype, pl.List):
        raise DataError(
            f"column {values.name!r} holds {values.dtype}, not lists of {width} numbers; give its separator"
        )
    result = np.full((len(values), width), np.nan)
    present = values.is_not_null()
    lengths = values.list.len().fill_null(width)
    wrong = lengths != width
    if wrong.any():
        row = int(wrong.arg_max() or 0)
        raise DataError(
            f"{where(row)}: column {values.name!r}: {lengths[row]} numbers, expected {width}; "
            "all rows must have the same number"
        )
    rows = np.flatnonzero(present.to_numpy())
    if len(rows):
        flat = as_numbers(values.drop_nulls().explode(), lambda place: where(int(rows[place // width])))
        result[rows] = flat.reshape(-1, width)
    return result


def signed_log1p(numbers: Numbers, transform: str) -> Numbers:
    """Return sign(x)·log1p(|x|), which is log1p(x) where nothing is negative; or the numbers as they are.

    Beyond 1e150 squares would overflow: such numbers are cut there.
    """
    if transform == "none":
        return np.clip(numbers, -1e150, 1e150)
    return np.copysign(np.log1p(np.abs(numbers)), numbers)


class Moments:
    """Mean and deviation of each component, merged chunk by chunk (Chan et al.)."""

    def __init__(self, width: int) -> None:
        self.count, self.mean, self.square = np.zeros(width), np.zeros(width), np.zeros(width)
        self.missing = 0
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    @classmethod
    def of(cls, numbers: Numbers) -> Moments:
        """Return those of (n, width) transformed numbers."""
        made = cls(numbers.shape[1])
        there = ~np.isnan(numbers)
        made.count = there.sum(0).astype(np.float64)
        made.missing = int(numbers.size - made.count.sum())
        made.mean = np.where(there, numbers, 0.0).sum(0) / np.maximum(made.count, 1)
        made.square = (np.where(there, numbers - made.mean, 0.0) ** 2).sum(0)
        made.low = np.where(there, numbers, np.inf).min(0, initial=np.inf)
        made.high = np.where(there, numbers, -np.inf).max(0, initial=-np.inf)
        return made

    def add(self, numbers: Numbers) -> None:
        """Take (n, width) transformed numbers in."""
        self.join(Moments.of(numbers))

    def join(self, other: Moments) -> None:
        """Take in those of the next chunk; in which order chunks come shows in the last digits."""
        total = np.maximum(self.count + other.count, 1)
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        self.square = self.square + other.square + delta**2 * self.count * other.count / total
        self.count = self.count + other.count
        self.missing += other.missing
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)

    @property
    def deviation(self) -> Numbers:
        """Standard deviation; 1 where all numbers are the same."""
        deviation = np.sqrt(self.square / np.maximum(self.count, 1))
        return np.where((deviation > 0) & np.isfinite(deviation), deviation, 1.0)

    @property
    def constant(self) -> bool:
        """Whether every row holds the same: one number in each component, or nothing anywhere."""
        if not self.count.any():
            return True
        return not self.missing and bool((self.low == self.high).all())


class Quantiles:
    """Edges of equally filled bins, from a uniform sample of bounded size that does not depend on chunks."""

    def __init__(self, seed: int, first: int = 0) -> None:
        self.seed = seed
        self._values, self._marks = np.zeros(0), np.zeros(0, np.uint64)
        self._rows = first  # the number of the next training row

    def add(self, numbers: Numbers) -> None:
        """Take (n,) numbers in; the sample keeps those whose row number hashes lowest."""
        marks = splitmix64(np.arange(self._rows, self._rows + len(numbers)), self.seed)
        self._rows += len(numbers)
        there = ~np.isnan(numbers)
        self._values = np.concatenate([self._values, numbers[there]])
        self._marks = np.concatenate([self._marks, marks[there]])
        if len(self._values) > 2 * SAMPLED:
            self._truncate_sample()

    def join(self, values: Numbers, marks: HashValues, rows: int) -> None:
        """Take in a sample of the first ``rows`` rows, or the part of it that is among the lowest."""
        self._values = np.concatenate([self._values, values])
        self._marks = np.concatenate([self._marks, marks])
        self._rows = rows
        if len(self._values) > 2 * SAMPLED:
            self._truncate_sample()

    def sample(self) -> tuple[Numbers, HashValues]:
        """Return the sampled values and the marks by which they were chosen."""
        self._truncate_sample()
        return self._values, self._marks

    def _truncate_sample(self) -> None:
        if len(self._values) > SAMPLED:
            lowest = np.argpartition(self._marks, SAMPLED)[:SAMPLED]
            self._values, self._marks = self._values[lowest], self._marks[lowest]

    def bin_count(self) -> int:
        """Return how many bins so many rows can fill: one for every 500, from 16 to 256."""
        return min(MOST_BINS, max(MIN_BINS, self._rows // ROWS_PER_BIN))

    def edges(self, bins: int) -> Numbers:
        """Return at most ``bins`` - 1 increasing inner edges."""
        self._truncate_sample()
        if not len(self._values):
            return np.zeros(0)
        edges = np.unique(np.quantile(self._values, np.arange(1, bins) / bins, method="higher"))
        above: Numbers = edges[edges > self._values.min()]
        return above


def bin_ids(numbers: Numbers, edges: Numbers) -> Ids:
    """Return the id of the bin of each number; missing has its own."""
    ids = (np.searchsorted(edges, numbers, side="right") + FIRST_ID).astype(np.uint32)
    ids[np.isnan(numbers)] = MISSING_ID
    return ids


def bin_names(edges: Numbers) -> list[str]:
    """Name each bin by its bounds, the lower one included."""
    bounds = ["-inf", *(f"{edge:g}" for edge in edges), "inf"]
    return [f"[{low}, {high})" for low, high in pairwise(bounds)]


class NumericEncoder(Encoder):
    """Numbers, compressed and standardised."""

    kind = "numeric"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self._moments = Moments(plan.width)
        self._mean, self._deviation = self._moments.mean, self._moments.deviation
        self._negative = False

    @classmethod
    def from_stored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> NumericEncoder:
        """Return the encoder with this scale."""
        made = cls(plan)
        made._mean, made._deviation = np.array(about["mean"], float), np.array(about["deviation"], float)
        made._negative = about["signed"]
        return made

    def _numbers(self, column: pl.Series, where: RowLocator) -> Numbers:
        if self.plan.width == 1 and not column.dtype.is_nested():
            return as_numbers(column, where).reshape(-1, 1)
        return as_vectors(column, self.plan.width, self.plan.separator, where)

    def observe(self, column: pl.Series, where: RowLocator) -> Callable[[], list[AnyArray]]:
        """Add to mean and deviation."""
        numbers = self._numbers(column, where)
        self._negative = self._negative or bool((numbers < 0).any())
        self._moments.add(signed_log1p(numbers, self.plan.transform))
        return lambda: [numbers]

    def partial_state(self) -> Any:
        """Return mean and deviation so far, and whether anything is negative."""
        return self._moments, self._negative

    def merge(self, notes: Any) -> None:
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

    def encode(self, column: pl.Series, where: RowLocator) -> Any:
        """Return standardised numbers, NaN where missing."""
        numbers = signed_log1p(self._numbers(column, where), self.plan.transform)
        scaled = (numbers - self._mean) / self._deviation
        return np.clip(scaled, -1e38, 1e38).astype(np.float32)

    def metadata(self) -> dict[str, Any]:
        """Return the scale, so that new rows can be treated the same way."""
        scale = {"mean": self._mean.tolist(), "deviation": self._deviation.tolist()}
        return {"transform": self.plan.transform, "signed": self._negative, **scale}


class BinningEncoder(Encoder):
    """Numbers as the ids of quantile bins."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan, seed: int = 0, first: int = 0) -> None:
        super().__init__(plan)
        self._quantiles: Quantiles | None = Quantiles(seed, first)
        self._moments = Moments(1)
        self._edges: Numbers = np.zeros(0)

    @classmethod
    def from_stored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> BinningEncoder:
        """Return the encoder with these edges."""
        made = cls(plan)
        made._quantiles, made._edges = None, np.array(about["edges"], float)
        return made

    def observe(self, column: pl.Series, where: RowLocator) -> Callable[[], list[AnyArray]]:
        """Sample numbers."""
        numbers = as_numbers(column, where)
        if self._quantiles is not None:
            self._quantiles.add(numbers)
        self._moments.add(signed_log1p(numbers.reshape(-1, 1), "log"))
        return lambda: [numbers]

    def partial_state(self) -> Any:
        """Return whether the numbers differ; the sample goes its own way."""
        return self._moments

    def merge(self, notes: Any) -> None:
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
            self._edges = self._quantiles.edges(bins if isinstance(bins, int) else self._quantiles.bin_count())
        self._quantiles = None

    @property
    def constant(self) -> bool:
        """Whether every training row holds the same."""
        return self._moments.constant

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return FIRST_ID + len(self._edges) + 1

    def encode(self, column: pl.Series, where: RowLocator) -> Any:
        """Return the bin of each row."""
        return bin_ids(as_numbers(column, where), self._edges)

    def values_to_store(self) -> Any:
        """Return the names of the bins."""
        return bin_names(self._edges)

    def metadata(self) -> dict[str, Any]:
        """Return the edges."""
        return {"ids": "bins", "edges": self._edges.tolist(), "missing_id": MISSING_ID}
