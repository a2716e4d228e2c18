"""What kind of table X is: a pandas or a polars DataFrame, or an array; neither library is imported for it.

From the columns of a table to what the net reads: standardised numbers, ids, marks of missing values.

Rows: the same rows in another order, repeated or weighted, are the same data.

The target: what y asks the net to predict, and as which numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.errors import DataError, InputError

Floats = NDArray[np.float64]

# Standardised numbers are cut here: one wild value must not steer the search.
CLIP = 5.0
# Ids of the values that a categorical column has beside its frequent ones.
MISSING, RARE, FIRST = 0, 1, 2


@dataclass(frozen=True)
class EncodedTable:
    """A table for the net: numeric columns first, then categorical ones.

    Args:
        numbers: (n, C), standardised; 0 where missing.
        missing: (n, C), 1 where missing; without columns where nothing is.
        ids: (n, M).
        sizes: how many ids each categorical column has.
        order: the columns of the table in the order of the net (N,).

    """

    numbers: Tensor
    missing: Tensor
    ids: Tensor
    sizes: Sequence[int]
    order: Sequence[int]

    def __getitem__(self, rows: slice) -> EncodedTable:
        """Return some of the rows."""
        return EncodedTable(self.numbers[rows], self.missing[rows], self.ids[rows], self.sizes, self.order)


def renumber_codes(table: Floats, categorical: NDArray[np.bool_]) -> Floats:
    """Return the table with the codes of each categorical column numbered anew, by those that are there.

    >>> compact(np.array([[7.0, 7.0], [3.0, 3.0]]), np.array([False, True]))
    array([[7., 1.],
           [3., 0.]])
    """
    table = table.copy()
    for at in np.flatnonzero(categorical):
        there = ~np.isnan(table[:, at])
        table[there, at] = np.unique(table[there, at], return_inverse=True)[1]
    return table


def encode(table: Floats, categorical: NDArray[np.bool_], weight: Floats) -> EncodedTable:
    """Encode a table (n, N) of numbers and codes; means, deviations and frequencies are weighted.

    A column that is the same in every row, or missing in every row, becomes zeros: it must not serve as a bias.
    """
    ids = {int(at): frequent_ids(table[:, at], weight) for at in np.flatnonzero(categorical)}
    ids = {at: each for at, each in ids.items() if each.min() < each.max()}
    numeric = [at for at in range(table.shape[1]) if at not in ids]
    numbers = np.zeros((len(table), len(numeric)))
    missing = np.zeros((len(table), len(numeric)), dtype=np.bool_)
    for place, at in enumerate(numeric):
        if not categorical[at]:
            numbers[:, place] = standardised(table[:, at], weight)
            gone = np.isnan(table[:, at])
            missing[:, place] = gone & ~gone.all()
    return EncodedTable(
        numbers=torch.from_numpy(numbers).float(),
        missing=torch.from_numpy(missing).float() if missing.any() else torch.zeros(len(table), 0),
        ids=torch.from_numpy(np.stack(list(ids.values()), 1)) if ids else torch.zeros(len(table), 0).long(),
        sizes=[int(each.max()) + 1 for each in ids.values()],
        order=[*numeric, *ids],
    )


def standardised(values: Floats, weight: Floats) -> Floats:
    """Return (v - mean) / deviation, weighted, within ±5; 0 where v is missing or always the same.

    >>> standardised(np.array([1.0, 3.0, np.nan]), np.ones(3))
    array([-1.,  1.,  0.])
    """
    there = ~np.isnan(values)
    share = np.where(there, weight, 0.0) / max(float(weight[there].sum()), 1e-300)
    values = np.where(there, values, 0.0)
    values = values / max(float(np.abs(values).max()), 1e-300)  # squares of it can neither overflow nor vanish
    centred = np.where(there, values - float(share @ values), 0.0)
    deviation = math.sqrt(float(share @ centred**2))
    if deviation < 1e-12:
        return np.zeros_like(values)
    result: Floats = np.clip(centred / deviation, -CLIP, CLIP)
    return result


def frequent_ids(codes: Floats, weight: Floats) -> NDArray[np.int64]:
    """Return ids (n,): 0 for a missing value, 1 for a rare one, then the frequent ones by their codes.

    Rare is what has less than max(3, √n/4) of the total weight n: what is seen a few times can only be learnt
    by heart.

    >>> frequent_ids(np.array([0.0, 0, 0, 1, np.nan]), np.ones(5)).tolist()
    [2, 2, 2, 1, 0]
    """
    there = ~np.isnan(codes)
    ids = np.zeros(len(codes), dtype=np.int64)
    values, inverse = np.unique(codes[there], return_inverse=True)
    seen = np.bincount(inverse, weights=weight[there], minlength=len(values))
    frequent = seen >= max(3.0, math.sqrt(float(weight.sum())) / 4)
    ids[there] = np.where(frequent, FIRST - 1 + np.cumsum(frequent), RARE)[inverse]
    return ids


def merge_rows(table: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return each distinct row once, with the sum of its weights, in an order that depends on the rows alone.

    So a row of weight 3 and a row that is there three times give the very same search, bit for bit. Rows are
    sorted by a 64-bit hash of their values. Should two different rows have the same hash they stay apart.

    >>> rows, weight = merge_rows(np.array([[1.0], [2.0], [1.0]]), np.array([1.0, 1.0, 2.0]))
    >>> sorted(zip(rows[:, 0].tolist(), weight.tolist()))
    [(1.0, 3.0), (2.0, 1.0)]
    """
    table = np.where(np.isnan(table), np.nan, table + 0.0)  # one NaN and one zero, whatever their bits
    hashes = _hash(table)
    order = np.lexsort([table[:, 0], hashes])
    table, weight, hashes = table[order], weight[order], hashes[order]
    new = np.ones(len(table), dtype=np.bool_)
    new[1:] = hashes[1:] != hashes[:-1]
    same = np.flatnonzero(~new)
    new[same] = (table[same].view(np.uint64) != table[same - 1].view(np.uint64)).any(axis=1)
    first = np.flatnonzero(new)
    return table[first], np.add.reduceat(weight, first)


def _hash(table: Floats) -> NDArray[np.uint64]:
    """Return a hash of every row (n,): multiply, add and shift the bits of its values, column by column."""
    bits = np.ascontiguousarray(table).view(np.uint64)
    hashes = np.full(len(bits), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for column in bits.T:
        hashes = (hashes ^ column) * np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(29)
    return hashes


class WeightedSampler:
    """Batches of row numbers, each row with a probability in proportion to its weight.

    With no more rows than a batch takes there is nothing to draw: every batch is all rows.
    """

    def __init__(self, weight: Floats, batch_size: int, seed: int) -> None:
        self.all = np.arange(len(weight)) if len(weight) <= batch_size else None
        self.cumulated = np.cumsum(weight)
        self.batch_size = batch_size
        self.random = np.random.default_rng(seed)

    def draw(self) -> NDArray[np.intp]:
        """Return the rows of the next batch (B,)."""
        if self.all is not None:
            return self.all
        points = self.random.random(self.batch_size) * self.cumulated[-1]
        rows: NDArray[np.intp] = np.searchsorted(self.cumulated, points, side="right")
        return rows.clip(max=len(self.cumulated) - 1)


# What pandas finds in an object column whose values are all numbers.
NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")


def dataframe_library(table: Any) -> str | None:
    """Return ``"pandas"`` or ``"polars"`` for a DataFrame of theirs, else None.

    >>> library_of(np.ones((2, 2))) is None
    True
    """
    for name in ("pandas", "polars"):
        module = sys.modules.get(name)
        if module is not None and isinstance(table, module.DataFrame):
            return name
    return None


def take_columns(frame: Any, indices: Sequence[int], library: str) -> Any:
    """Return some columns of a DataFrame as a DataFrame of ``library``; exactly as they are if it is its own."""
    own = dataframe_library(frame)
    part = frame.iloc[:, list(indices)] if own == "pandas" else frame[:, list(indices)]
    if own == library:
        return part
    if library == "pandas":
        import pandas as pd  # type: ignore[import-untyped]

        return pd.DataFrame({name: part[name].to_list() for name in part.columns})
    import polars as pl

    missing = part.isna()
    return pl.DataFrame(
        {
            str(name): [None if gone else value for value, gone in zip(part[name], missing[name], strict=True)]
            for name in part.columns
        }
    )


def read_frame(frame: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a DataFrame as numbers (n, N), NaN where a value is missing, and which columns are categorical (N,).

    Numbers, dates and times stay numbers. Text, categories and truth values become codes 0, 1, … in sorted order.
    """
    if not frame.shape[0] or not frame.shape[1]:
        raise DataError(
            f"X has {frame.shape[0]} sample(s) and {frame.shape[1]} column(s): at least one of each is needed"
        )
    read = _read_pandas if dataframe_library(frame) == "pandas" else _read_polars
    table = np.empty((frame.shape[0], frame.shape[1]), dtype=np.float64)
    categorical = np.zeros(frame.shape[1], dtype=np.bool_)
    for at, name in enumerate(frame.columns):
        column = frame.iloc[:, at] if read is _read_pandas else frame[:, at]
        try:
            table[:, at], categorical[at] = read(column)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {name!r} has values of type {column.dtype} that are neither numbers, dates, text, "
                f"categories nor truth values ({error}); turn it into one of these, or leave it out"
            ) from error
        if not categorical[at] and np.isinf(table[:, at]).any():
            raise InputError(
                f"column {name!r} contains infinity; replace it by NaN, which is taken as missing, or by a number"
            )
    return table, categorical


def _read_pandas(column: Any) -> tuple[Floats, bool]:
    """Return the values of a pandas Series as numbers or codes, and whether they are codes."""
    import pandas as pd

    types, dtype = pd.api.types, column.dtype
    if types.is_complex_dtype(dtype):
        raise TypeError("complex numbers")
    if types.is_datetime64_any_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return _times(column.astype("int64").to_numpy(), column.isna().to_numpy()), False
    number = types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype)
    if number or (dtype.kind == "O" and types.infer_dtype(column, skipna=True) in NUMBERS):
        return column.to_numpy(dtype=np.float64, na_value=np.nan), False
    return _codes(column.astype("category").cat.codes.to_numpy()), True


def _read_polars(column: Any) -> tuple[Floats, bool]:
    """Return the values of a polars Series as numbers or codes, and whether they are codes."""
    import polars as pl

    dtype = column.dtype
    if dtype.is_numeric():
        return column.cast(pl.Float64).fill_null(float("nan")).to_numpy(), False
    if dtype.is_temporal():
        return _times(column.to_physical().fill_null(0).to_numpy(), column.is_null().to_numpy()), False
    if dtype == pl.Null:
        return np.full(len(column), np.nan), False
    if dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
        raise TypeError("a nested or foreign type")
    ranks = column.cast(pl.String).rank("dense").cast(pl.Int64) - 1
    return _codes(ranks.fill_null(-1).to_numpy()), True


def _times(ticks: NDArray[Any], missing: NDArray[np.bool_]) -> Floats:
    """Return times as numbers, NaN where missing."""
    return np.where(missing, np.nan, ticks.astype(np.float64))


def _codes(codes: NDArray[Any]) -> Floats:
    """Return codes as numbers, NaN for -1."""
    return np.where(codes < 0, np.nan, codes.astype(np.float64))


Task = Literal["binary", "multiclass", "regression"]
TASKS = ("auto", "binary", "multiclass", "regression")
# Up to this many distinct numbers are taken for classes.
FEW = 20


def read_target(y: NDArray[Any], task: str = "auto") -> tuple[NDArray[np.float64], Task, int]:
    """Return y as numbers (n,), the task, and how many logits it needs.

    Classes become 0, 1, … in sorted order; a continuous y stays as it is.

    >>> read_target(np.array(["no", "yes", "no"]))
    (array([0., 1., 0.]), 'binary', 1)
    """
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(map(repr, TASKS))}, found {task!r}")
    try:
        values, codes = np.unique(y, return_inverse=True)
    except TypeError as error:
        raise DataError(
            f"Unknown label type: y mixes values that cannot be sorted ({error}); make them all text or numbers"
        ) from error
    if len(values) < 2:
        raise DataError(
            f"y has one class only, {values[0]!r}, in {len(y)} sample(s) of positive weight (1 sample is never "
            "enough): there is nothing to tell apart; give rows of at least two classes, or two values of y"
        )
    chosen = guess_task(values, len(y)) if task == "auto" else task
    if chosen == "regression":
        try:
            return y.astype(np.float64), "regression", 1
        except (TypeError, ValueError) as error:
            raise DataError(
                f"task='regression' needs numbers in y ({error}); encode them, or say a task"
            ) from error
    if chosen == "binary":
        if len(values) > 2:
            raise DataError(
                f"task='binary' needs two classes in y, found {len(values)}; say task='multiclass' or 'regression'"
            )
        return codes.astype(np.float64), "binary", 1
    return codes.astype(np.float64), "multiclass", len(values)


def guess_task(values: NDArray[Any], rows: int) -> Task:
    """Return the task that these distinct values of y, in this many rows, stand for.

    Two values: ``binary``. Text: ``multiclass``. Numbers with a fraction: ``regression``. Whole numbers:
    ``regression`` if there are more than 20 of them and they are stored as floats or are more than a quarter
    of the rows; else ``multiclass``.

    >>> guess_task(np.array([0, 1, 2]), 100), guess_task(np.array([0.5, 1.0, 2.0]), 100)
    ('multiclass', 'regression')
    """
    if len(values) == 2:
        return "binary"
    if values.dtype.kind not in "fiu":
        return "multiclass"
    if values.dtype.kind == "f" and bool((values != np.floor(values)).any()):
        return "regression"
    many = len(values) > FEW and (values.dtype.kind == "f" or len(values) > rows / 4)
    return "regression" if many else "multiclass"
