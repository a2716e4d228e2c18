"""Encoders of numeric columns: standardized numbers, or the ids of quantile bins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs._validation import is_number
from lpfs.data.bins import Numbers, bin_edges
from lpfs.data.encoders.base import Encoder, RowLocator
from lpfs.data.fields import FieldPlan
from lpfs.data.hashing import HashValues, splitmix64
from lpfs.data.parsing import MISSING_NUMBER_TEXTS, cast_column, parse_numbers
from lpfs.data.store.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.errors import DataError

MIN_BINS, MAX_BINS, ROWS_PER_BIN = 16, 256, 500  # for bins="auto"
SAMPLE_SIZE = 1 << 18  # values of a column kept for its quantiles
MAX_NUMBER = 1e150  # larger numbers are clipped: their squares would overflow
MAX_ENCODED = 1e38  # limit of encoded numbers, float32


def as_numbers(values: pl.Series, locate: RowLocator, decimal: str | None = None) -> Numbers:
    """Return a column as numbers, NaN where missing or infinite; raise DataError if a value is not a number.

    ``decimal`` is the decimal mark of numbers in text; None: a point.
    """
    if values.dtype == pl.Boolean:
        values = cast_column(values, pl.UInt8)
    if values.dtype.is_nested() or values.dtype.is_temporal() or values.dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {values.name!r}: {values.dtype} is not a number; set another kind")
    is_text = values.dtype == pl.String
    numbers = parse_numbers(values, decimal or ".") if is_text else cast_column(values, pl.Float64, strict=False)
    result = numbers.to_numpy(writable=True)
    if numbers.null_count() != values.null_count():
        text = cast_column(values, pl.String)
        for row in np.flatnonzero((numbers.is_null() & values.is_not_null()).to_numpy()).tolist():
            result[row] = _parse_number(text[row], values.name, locate, row)
    result[np.isinf(result)] = np.nan
    return result


def _parse_number(text: str, name: str, locate: RowLocator, row: int) -> float:
    """Parse a number that polars does not accept."""
    text = text.strip()
    if text.lower() in MISSING_NUMBER_TEXTS:
        return float("nan")
    try:
        return float(text.replace("_", "x"))
    except ValueError:
        advice = "repair it, or set kind = 'categorical' for this column"
        raise DataError(f"{locate(row)}: column {name!r}: {text!r:.60} is not a number; {advice}") from None


def as_vectors(
    values: pl.Series, width: int, separator: str | None, locate: RowLocator, decimal: str | None = None
) -> Numbers:
    """Return a list column, or text with separators, as (n, width) numbers; a missing list is all NaN."""
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    if values.dtype == pl.Null:
        values = cast_column(values, pl.List(pl.Float64))
    if values.dtype == pl.String and separator is not None:
        values = values.str.split(separator)
    name, result = values.name, np.full((len(values), width), np.nan)
    if not isinstance(values.dtype, pl.List):
        raise DataError(f"column {name!r} holds {values.dtype}, not lists of {width} numbers; give its separator")
    lengths = values.list.len().fill_null(width)
    invalid = lengths != width
    if invalid.any():
        row = int(invalid.arg_max() or 0)
        raise DataError(f"{locate(row)}: column {name!r}: {lengths[row]} numbers, expected {width} in all rows")
    rows = np.flatnonzero(values.is_not_null().to_numpy())
    if len(rows):
        flat = as_numbers(values.drop_nulls().explode(), lambda position: locate(int(rows[position // width])), decimal)
        result[rows] = flat.reshape(-1, width)
    return result


def stored_numbers(metadata: Mapping[str, Any], name: str) -> Numbers:
    """Return a list of finite numbers in the metadata of an encoder; raise ValueError if it is none."""
    values = metadata[name]
    if not isinstance(values, list) or not all(is_number(value) and math.isfinite(value) for value in values):
        raise ValueError(f"{name} must be a list of numbers, found {str(values)[:80]}")
    return np.array(values, float)


def signed_log1p(numbers: Numbers, transform: str) -> Numbers:
    """Return sign(x)·log1p(|x|); with transform ``none`` the numbers, clipped at ±``MAX_NUMBER``."""
    if transform == "none":
        return np.clip(numbers, -MAX_NUMBER, MAX_NUMBER)
    return np.copysign(np.log1p(np.abs(numbers)), numbers)


class Moments:
    """Mean and standard deviation of each component, merged chunk by chunk (Chan et al.)."""

    def __init__(self, width: int) -> None:
        self.count, self.mean, self.square = np.zeros(width), np.zeros(width), np.zeros(width)
        self.missing = 0
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    @classmethod
    def of(cls, numbers: Numbers) -> Moments:
        """Return the moments of (n, width) transformed numbers."""
        moments = cls(numbers.shape[1])
        present = ~np.isnan(numbers)
        moments.count = present.sum(0).astype(np.float64)
        moments.missing = int(numbers.size - moments.count.sum())
        moments.mean = np.where(present, numbers, 0.0).sum(0) / np.maximum(moments.count, 1)
        moments.square = (np.where(present, numbers - moments.mean, 0.0) ** 2).sum(0)
        moments.low = np.where(present, numbers, np.inf).min(0, initial=np.inf)
        moments.high = np.where(present, numbers, -np.inf).max(0, initial=-np.inf)
        return moments

    def merge(self, other: Moments) -> None:
        """Add the moments of the next chunk; the order of chunks affects the last digits."""
        total = np.maximum(self.count + other.count, 1)
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / total)
        self.square = self.square + other.square + delta**2 * self.count * other.count / total
        self.count = self.count + other.count
        self.missing += other.missing
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)

    @property
    def deviation(self) -> Numbers:
        """Standard deviation; 1 where all numbers are equal."""
        deviation = np.sqrt(self.square / np.maximum(self.count, 1))
        return np.where((deviation > 0) & np.isfinite(deviation), deviation, 1.0)

    @property
    def constant(self) -> bool:
        """Whether all rows are equal: the same number in each component, or all missing."""
        return not self.count.any() or (not self.missing and bool((self.low == self.high).all()))


class Quantiles:
    """Quantiles from a uniform sample of bounded size that does not depend on chunks."""

    def __init__(self, seed: int, first: int = 0) -> None:
        self.seed = seed
        self._values, self._hashes = np.zeros(0), np.zeros(0, np.uint64)
        self._rows = first  # number of the next training row

    def add(self, numbers: Numbers) -> None:
        """Add (n,) numbers; the sample keeps those whose row numbers have the lowest hashes."""
        rows = self._rows + len(numbers)
        hashes = splitmix64(np.arange(self._rows, rows), self.seed)
        present = ~np.isnan(numbers)
        self.merge(numbers[present], hashes[present], rows)

    def merge(self, values: Numbers, hashes: HashValues, rows: int) -> None:
        """Add a sample of the first ``rows`` rows."""
        self._values = np.concatenate([self._values, values])
        self._hashes = np.concatenate([self._hashes, hashes])
        self._rows = rows
        if len(self._values) > 2 * SAMPLE_SIZE:
            self.sample()

    def sample(self) -> tuple[Numbers, HashValues]:
        """Truncate the sample to its size; return its values and the hashes of their row numbers."""
        if len(self._values) > SAMPLE_SIZE:
            lowest = np.argpartition(self._hashes, SAMPLE_SIZE)[:SAMPLE_SIZE]
            self._values, self._hashes = self._values[lowest], self._hashes[lowest]
        return self._values, self._hashes

    def edges(self, bins: int | str | None) -> Numbers:
        """Return at most ``bins`` - 1 increasing inner edges of equally filled bins; ``auto``: one bin per 500 rows."""
        if not isinstance(bins, int):
            bins = min(MAX_BINS, max(MIN_BINS, self._rows // ROWS_PER_BIN))
        return bin_edges(self.sample()[0], bins)


class MomentsEncoder(Encoder):
    """Base of the encoders of numbers: moments of the training rows."""

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self._moments = Moments(plan.width)

    def partial_state(self) -> Any:
        return self._moments

    def merge(self, state: Any) -> None:
        self._moments.merge(state)

    @property
    def constant(self) -> bool:
        return self._moments.constant


class NumericEncoder(MomentsEncoder):
    """Numbers, transformed and standardized."""

    kind = "numeric"

    def __init__(self, plan: FieldPlan) -> None:
        super().__init__(plan)
        self.finish()

    @classmethod
    def from_stored(cls, plan: FieldPlan, metadata: Mapping[str, Any], values: Any) -> NumericEncoder:
        mean, deviation = (stored_numbers(metadata, name) for name in ("mean", "deviation"))
        if len(mean) != plan.width or len(deviation) != plan.width or not (deviation > 0).all():
            raise ValueError(f"mean and deviation need {plan.width} numbers, found {len(mean)} and {len(deviation)}")
        encoder = cls(plan)
        encoder._mean, encoder._deviation, encoder._negative = mean, deviation, bool(metadata["signed"])
        return encoder

    def _numbers(self, column: pl.Series, locate: RowLocator) -> Numbers:
        if self.plan.width == 1 and not column.dtype.is_nested():
            return as_numbers(column, locate, self.plan.decimal).reshape(-1, 1)
        return as_vectors(column, self.plan.width, self.plan.separator, locate, self.plan.decimal)

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        numbers = self._numbers(column, locate)
        self._moments.merge(Moments.of(signed_log1p(numbers, self.plan.transform)))
        return lambda: [numbers]

    def finish(self) -> None:
        self._mean, self._deviation = self._moments.mean, self._moments.deviation
        self._negative = bool((self._moments.low < 0).any())

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        numbers = signed_log1p(self._numbers(column, locate), self.plan.transform)
        return standardize(numbers, self._mean, self._deviation)

    def metadata(self) -> dict[str, Any]:
        scale = {"mean": self._mean.tolist(), "deviation": self._deviation.tolist()}
        return {"transform": self.plan.transform, "signed": self._negative, **scale}


def standardize(numbers: Numbers, mean: Numbers, deviation: Numbers) -> npt.NDArray[np.float32]:
    """Return (n, width) transformed numbers in standard deviations from their mean, within the range of float32."""
    return np.clip((numbers - mean) / deviation, -MAX_ENCODED, MAX_ENCODED).astype(np.float32)


def stack_scales(encoders: Sequence[NumericEncoder]) -> Callable[[Numbers], npt.NDArray[np.float32]]:
    """Return a function that encodes numbers (n, F) as F encoders of one number do, all columns at once."""
    mean, deviation = (np.array([getattr(item, name)[0] for item in encoders]) for name in ("_mean", "_deviation"))
    transforms = {item.plan.transform for item in encoders}
    columns = {name: [item.plan.transform == name for item in encoders] for name in transforms}

    def encode(numbers: Numbers) -> npt.NDArray[np.float32]:
        for transform, chosen in columns.items():
            if len(columns) == 1:
                numbers = signed_log1p(numbers, transform)
            else:
                numbers[:, chosen] = signed_log1p(numbers[:, chosen], transform)
        return standardize(numbers, mean, deviation)

    return encode


class BinningEncoder(MomentsEncoder):
    """Numbers as the ids of quantile bins."""

    kind = "categorical"

    def __init__(self, plan: FieldPlan, seed: int = 0, first: int = 0) -> None:
        super().__init__(plan)
        self.quantiles = Quantiles(seed, first)
        self._edges: Numbers = np.zeros(0)

    @classmethod
    def from_stored(cls, plan: FieldPlan, metadata: Mapping[str, Any], values: Any) -> BinningEncoder:
        edges = stored_numbers(metadata, "edges")
        if (np.diff(edges) <= 0).any():
            raise ValueError("the edges of bins do not increase")
        encoder = cls(plan)
        encoder._edges = edges
        return encoder

    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        numbers = as_numbers(column, locate, self.plan.decimal)
        self.quantiles.add(numbers)
        self._moments.merge(Moments.of(signed_log1p(numbers.reshape(-1, 1), "log")))
        return lambda: [numbers]

    def finish(self) -> None:
        self._edges = self.quantiles.edges(self.plan.bins)
        self.quantiles = Quantiles(self.quantiles.seed)  # the sample is not needed any more

    @property
    def constant(self) -> bool:
        return super().constant or not (len(self._edges) or self._moments.missing)

    @property
    def cardinality(self) -> int:
        return FIRST_ID + len(self._edges) + 1

    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        return self.bin(as_numbers(column, locate, self.plan.decimal))

    def bin(self, numbers: Numbers) -> npt.NDArray[np.uint32]:
        """Return the ids of numbers (n,); NaN is missing."""
        ids = (np.searchsorted(self._edges, numbers, side="right") + FIRST_ID).astype(np.uint32)
        ids[np.isnan(numbers)] = MISSING_ID
        return ids

    def values_to_store(self) -> Any:
        bounds = ["-inf", *(f"{edge:g}" for edge in self._edges), "inf"]
        return [f"[{low}, {high})" for low, high in pairwise(bounds)]  # the lower bound belongs to the bin

    def metadata(self) -> dict[str, Any]:
        return {"ids": "bins", "edges": self._edges.tolist(), "missing_id": MISSING_ID}
