"""Tables and targets as the network reads them: DataFrames and arrays as numbers and codes, encoded columns, rows.

pandas and polars are not imported unless the user's table is one of theirs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import utils  # type: ignore[import-untyped]
from torch import Tensor

from lpfs.errors import DataError, InputError

Floats = NDArray[np.float64]
TaskName = Literal["binary", "multiclass", "regression"]
TASKS = ("auto", "binary", "multiclass", "regression")
MAX_CLASSES = 20  # distinct integers in y up to which they are always classes
CLIP = 5.0  # standardized numbers are clipped here, so that one extreme value cannot dominate the search
MISSING_ID, RARE_ID, FIRST_ID = 0, 1, 2  # ids of a categorical column; frequent values start at FIRST_ID
NUMBER_TYPES = ("integer", "floating", "mixed-integer-float", "decimal")  # pandas' inferred types of object columns


def dataframe_library(table: Any) -> str | None:
    """Return ``"pandas"`` or ``"polars"`` for one of their DataFrames, else None.

    >>> dataframe_library(np.ones((2, 2))) is None
    True
    """
    for name in ("pandas", "polars"):
        module = sys.modules.get(name)
        if module is not None and isinstance(table, module.DataFrame):
            return name
    return None


def take_columns(frame: Any, indices: Sequence[int], library: str) -> Any:
    """Return columns of a DataFrame as a DataFrame of ``library``; unchanged if it is of that library."""
    source = dataframe_library(frame)
    part = frame.iloc[:, list(indices)] if source == "pandas" else frame[:, list(indices)]
    if source == library:
        return part
    if library == "pandas":
        import pandas as pd  # type: ignore[import-untyped]

        return pd.DataFrame({name: part[name].to_list() for name in part.columns})
    import polars as pl

    def values(column: Any) -> list[Any]:
        return [None if is_missing else value for value, is_missing in zip(column, column.isna(), strict=True)]

    return pl.DataFrame({str(name): values(column) for name, column in part.items()})


def to_array(frame: Any) -> NDArray[Any]:
    """Return a DataFrame as an array with the common dtype of its columns; of objects if they have none."""
    try:
        array: NDArray[Any] = utils.check_array(frame, dtype=None, ensure_all_finite=False)
    except TypeError:  # durations beside floats, for example
        rows = frame.rows() if dataframe_library(frame) == "polars" else frame.astype(object).to_numpy()
        array = np.array(rows, dtype=object)
    return array


def read_frame(frame: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a DataFrame as numbers (n, N), NaN where a value is missing, and which columns are categorical (N,).

    Numbers, dates and times become numbers; text, categories and booleans become codes 0, 1, … in sorted order.
    """
    if not frame.shape[0] or not frame.shape[1]:
        raise DataError(f"X has {frame.shape[0]} sample(s) and {frame.shape[1]} column(s): give at least one of each")
    read = _read_pandas if dataframe_library(frame) == "pandas" else _read_polars
    table = np.empty((frame.shape[0], frame.shape[1]), dtype=np.float64)
    categorical = np.zeros(frame.shape[1], dtype=np.bool_)
    for number, name in enumerate(frame.columns):
        column = frame.iloc[:, number] if read is _read_pandas else frame[:, number]
        try:
            table[:, number], categorical[number] = read(column)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {name!r} has values of type {column.dtype} that are neither numbers, dates, text, "
                f"categories nor booleans ({error}); convert it to one of these, or leave it out"
            ) from error
        if not categorical[number] and np.isinf(table[:, number]).any():
            raise InputError(f"column {name!r} contains infinity; replace it by NaN (missing) or by a number")
    return table, categorical


def _read_pandas(column: Any) -> tuple[Floats, bool]:
    """Return the values of a pandas Series as numbers or codes, and whether they are codes."""
    import pandas as pd

    types, dtype = pd.api.types, column.dtype
    if types.is_complex_dtype(dtype):
        raise TypeError("complex numbers")
    if types.is_datetime64_any_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return _to_floats(column.astype("int64").to_numpy(), column.isna().to_numpy()), False
    is_number = types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype)
    if is_number or (dtype.kind == "O" and types.infer_dtype(column, skipna=True) in NUMBER_TYPES):
        return column.to_numpy(dtype=np.float64, na_value=np.nan), False
    return _to_floats(column.astype("category").cat.codes.to_numpy(), column.isna().to_numpy()), True


def _read_polars(column: Any) -> tuple[Floats, bool]:
    """Return the values of a polars Series as numbers or codes, and whether they are codes."""
    import polars as pl

    dtype = column.dtype
    if dtype.is_numeric():
        return column.cast(pl.Float64).fill_null(float("nan")).to_numpy(), False
    if dtype.is_temporal():
        return _to_floats(column.to_physical().fill_null(0).to_numpy(), column.is_null().to_numpy()), False
    if dtype == pl.Null:
        return np.full(len(column), np.nan), False
    if dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
        raise TypeError("a nested or unsupported type")
    ranks = column.cast(pl.String).rank("dense").cast(pl.Int64) - 1
    return _to_floats(ranks.fill_null(0).to_numpy(), column.is_null().to_numpy()), True


def _to_floats(values: NDArray[Any], missing: NDArray[np.bool_]) -> Floats:
    return np.where(missing, np.nan, values.astype(np.float64))


def read_target(y: NDArray[Any], task: str = "auto") -> tuple[Floats, TaskName]:
    """Return y as numbers (n,), and the task.

    Classes become 0, 1, … in sorted order; a continuous y is not changed.

    >>> read_target(np.array(["no", "yes", "no"]))
    (array([0., 1., 0.]), 'binary')
    """
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(map(repr, TASKS))}, found {task!r}")
    if y.dtype.kind in "mM":
        raise DataError(f"y has dates or durations ({y.dtype}); convert them to numbers, such as days, or to text")
    if y.dtype.kind == "O" and all(isinstance(value, Real) for value in y):
        y = np.array(y.tolist())  # numbers, whose task depends on their values
    try:
        values, codes = np.unique(y, return_inverse=True)
    except TypeError as error:
        raise DataError(
            f"Unknown label type: y mixes values that cannot be sorted ({error}); convert all to text or numbers"
        ) from error
    if len(values) < 2:
        raise DataError(
            f"y has one class only, {values[0]!r}, in {len(y)} sample(s) of positive weight (1 sample is never "
            "enough); give rows of at least two classes, or two values of y"
        )
    resolved = guess_task(values, len(y)) if task == "auto" else task
    if resolved == "regression":
        try:
            return y.astype(np.float64), "regression"
        except (TypeError, ValueError) as error:
            message = f"task='regression' needs numbers in y ({error}); encode them, or give another task"
            raise DataError(message) from error
    if resolved == "binary" and len(values) > 2:
        raise DataError(f"task='binary' needs two classes in y, found {len(values)}; use 'multiclass' or 'regression'")
    return codes.astype(np.float64), "binary" if resolved == "binary" else "multiclass"


def guess_task(values: NDArray[Any], rows: int) -> TaskName:
    """Return the task for these distinct values of y and this number of rows.

    Two values: ``binary``. Text: ``multiclass``. Non-integer numbers: ``regression``. Integers: ``regression`` if
    there are more than 20 distinct ones and they are stored as floats or outnumber a quarter of the rows; else
    ``multiclass``.

    >>> guess_task(np.array([0, 1, 2]), 100), guess_task(np.array([0.5, 1.0, 2.0]), 100)
    ('multiclass', 'regression')
    """
    if len(values) == 2:
        return "binary"
    if values.dtype.kind not in "fiu":
        return "multiclass"
    if values.dtype.kind == "f" and bool((values != np.floor(values)).any()):
        return "regression"
    is_continuous = len(values) > MAX_CLASSES and (values.dtype.kind == "f" or len(values) > rows / 4)
    return "regression" if is_continuous else "multiclass"


def renumber_codes(table: Floats, categorical: NDArray[np.bool_]) -> Floats:
    """Return the table with the codes of each categorical column renumbered without gaps.

    >>> renumber_codes(np.array([[7.0, 7.0], [3.0, 3.0]]), np.array([False, True]))
    array([[7., 1.],
           [3., 0.]])
    """
    table = table.copy()
    for column in np.flatnonzero(categorical):
        present = ~np.isnan(table[:, column])
        table[present, column] = np.unique(table[present, column], return_inverse=True)[1]
    return table


def merge_rows(table: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return each distinct row once, with the sum of its weights, in an order that depends only on the rows.

    A row of weight 3 and three equal rows therefore give the same search, bit for bit. Rows are sorted by a
    64-bit hash of their values; different rows with the same hash are not merged.

    >>> rows, weight = merge_rows(np.array([[1.0], [2.0], [1.0]]), np.array([1.0, 1.0, 2.0]))
    >>> sorted(zip(rows[:, 0].tolist(), weight.tolist()))
    [(1.0, 3.0), (2.0, 1.0)]
    """
    table = np.where(np.isnan(table), np.nan, table + 0.0)  # one bit pattern for NaN, one for zero
    hashes = _hash(table)
    order = np.lexsort([table[:, 0], hashes])
    table, weight, hashes = table[order], weight[order], hashes[order]
    is_new = np.ones(len(table), dtype=np.bool_)
    is_new[1:] = hashes[1:] != hashes[:-1]
    same = np.flatnonzero(~is_new)
    is_new[same] = (table[same].view(np.uint64) != table[same - 1].view(np.uint64)).any(axis=1)
    first = np.flatnonzero(is_new)
    return table[first], np.add.reduceat(weight, first)


def _hash(table: Floats) -> NDArray[np.uint64]:
    """Return a hash of every row (n,): multiply, add and shift the bits of its values, column by column."""
    bits = np.ascontiguousarray(table).view(np.uint64)
    hashes = np.full(len(bits), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for column in bits.T:
        hashes = (hashes ^ column) * np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(29)
    return hashes


@dataclass(frozen=True)
class EncodedTable:
    """A table as the network reads it: numeric columns first, then categorical ones.

    Args:
        numbers: (n, C), standardized; 0 where missing.
        missing: (n, C), 1 where missing; (n, 0) if no value is missing.
        ids: (n, M).
        sizes: number of ids of each categorical column.
        order: original column at each position of the network (N,).
    """

    numbers: Tensor
    missing: Tensor
    ids: Tensor
    sizes: Sequence[int]
    order: Sequence[int]

    def __getitem__(self, rows: slice) -> EncodedTable:
        """Return a slice of the rows."""
        return EncodedTable(self.numbers[rows], self.missing[rows], self.ids[rows], self.sizes, self.order)


def encode(table: Floats, categorical: NDArray[np.bool_], weight: Floats) -> EncodedTable:
    """Encode a table (n, N) of numbers and codes; means, deviations and frequencies are weighted.

    A column that is constant or missing in every row becomes zeros: it must not act as a bias.
    """
    ids = {int(column): frequent_ids(table[:, column], weight) for column in np.flatnonzero(categorical)}
    ids = {column: codes for column, codes in ids.items() if codes.min() < codes.max()}
    numeric = [column for column in range(table.shape[1]) if column not in ids]
    numbers = np.zeros((len(table), len(numeric)))
    missing = np.zeros((len(table), len(numeric)), dtype=np.bool_)
    for position, column in enumerate(numeric):
        if not categorical[column]:
            numbers[:, position] = standardize(table[:, column], weight)
            is_nan = np.isnan(table[:, column])
            missing[:, position] = is_nan & ~is_nan.all()
    return EncodedTable(
        numbers=torch.from_numpy(numbers).float(),
        missing=torch.from_numpy(missing).float() if missing.any() else torch.zeros(len(table), 0),
        ids=torch.from_numpy(np.stack(list(ids.values()), 1)) if ids else torch.zeros(len(table), 0).long(),
        sizes=[int(codes.max()) + 1 for codes in ids.values()],
        order=[*numeric, *ids],
    )


def standardize(values: Floats, weight: Floats) -> Floats:
    """Return (v - mean) / deviation, weighted and clipped to ±5; 0 where v is missing or constant.

    >>> standardize(np.array([1.0, 3.0, np.nan]), np.ones(3))
    array([-1.,  1.,  0.])
    """
    present = ~np.isnan(values)
    fractions = np.where(present, weight, 0.0) / max(float(weight[present].sum()), 1e-300)
    values = np.where(present, values, 0.0)
    values = values / max(float(np.abs(values).max()), 1e-300)  # squares neither overflow nor underflow
    centred = np.where(present, values - float(fractions @ values), 0.0)
    deviation = math.sqrt(float(fractions @ centred**2))
    return np.zeros_like(values) if deviation < 1e-12 else np.clip(centred / deviation, -CLIP, CLIP)


def frequent_ids(codes: Floats, weight: Floats) -> NDArray[np.int64]:
    """Return ids (n,): 0 for a missing value, 1 for a rare one, then the frequent ones in the order of codes.

    A value is rare if its weight is below max(3, √n/4), n being the total weight: the network could only
    memorize the few rows that have it.

    >>> frequent_ids(np.array([0.0, 0, 0, 1, np.nan]), np.ones(5)).tolist()
    [2, 2, 2, 1, 0]
    """
    present = ~np.isnan(codes)
    ids = np.full(len(codes), MISSING_ID, dtype=np.int64)
    values, inverse = np.unique(codes[present], return_inverse=True)
    totals = np.bincount(inverse, weights=weight[present], minlength=len(values))
    frequent = totals >= max(3.0, math.sqrt(float(weight.sum())) / 4)
    ids[present] = np.where(frequent, FIRST_ID - 1 + np.cumsum(frequent), RARE_ID)[inverse]
    return ids
