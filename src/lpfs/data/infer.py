"""Which kind each column is, told from its first rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lpfs.data.fields import FieldPlan
from lpfs.data.parsing import DATE, LEADING_ZERO, MISSING_NUMBER_TEXTS, SPLIT_WORDS, WHOLE, WITH_COMMA, unix_unit

if TYPE_CHECKING:
    import polars as pl

SAMPLE = 100_000  # rows looked at
FEW = 50  # whole numbers with at most this many values are taken for codes
BAG_SEPARATORS = ("|", "^", "\x01", "\x02", "\x03", ";")
IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|code|zip|zipcode|hash|key|sku|uuid|guid)$|[a-z0-9](Id|ID)$|_idx?$")
TIME_NAME = re.compile(r"(^|[^a-z])(time|times|timestamp|datetime|ts|date|at|epoch)$|time(stamp)?$")
EXACT = 2**53  # whole numbers from here on are too long for an amount, and no longer exact as fractions
TIME = "a time; give it as the time column to order the rows by it"
ROW_IDENTIFIER = "another value in every row: it names the row"


def infer(column: pl.Series) -> FieldPlan:
    """Return the plan for a column, with the reason.

    ==================================  ==============================================================
    text                                categorical; multi when a separator cuts it into fewer values
    whole numbers                       categorical when few or named like an identifier, else numeric
    numbers                             numeric
    true/false                          categorical
    lists                               multi; numeric when all hold the same number of fractions
    dates, times                        ignored (``time=`` orders the rows by it)
    a different text in every row       ignored: it names the row
    ==================================  ==============================================================
    """
    import polars as pl

    name, dtype = column.name, column.dtype
    if dtype == pl.Null:
        return FieldPlan(name, why="no value in the sample")
    if dtype == pl.Boolean:
        return FieldPlan(name, why="true/false")
    if dtype.is_temporal() and dtype != pl.Duration:
        return FieldPlan(name, "ignore", why=TIME)
    if isinstance(dtype, (pl.List, pl.Array)):
        return infer_list(column)
    if dtype == pl.String:
        return infer_text(column)
    if dtype.is_integer():
        return infer_integers(column, "whole numbers")
    if isinstance(dtype, pl.Decimal) and dtype.scale == 0:
        return infer_integers(column, "whole numbers", numbers=column.cast(pl.Int128))
    if dtype.is_float() or dtype.is_decimal():
        return infer_fractions(column)
    if dtype == pl.Duration:
        return FieldPlan(name, "ignore", why="a duration; store it as a number to use it")
    return FieldPlan(name, "ignore", why=f"a column of {dtype} cannot be used; flatten or convert it")


def infer_list(column: pl.Series) -> FieldPlan:
    """Tell bags of values from vectors of numbers."""
    import polars as pl

    inner = column.dtype.inner  # type: ignore[attr-defined]
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if inner.is_nested() or inner in (pl.Binary, pl.Object):
        return FieldPlan(column.name, "ignore", why=f"a list of {inner} cannot be used; flatten it")
    if inner.is_float() or inner.is_decimal():
        widths = column.drop_nulls().list.len().unique().to_list()
        if len(widths) == 1 and widths[0]:
            return FieldPlan(
                column.name,
                "numeric",
                width=int(widths[0]),
                transform="none",
                why=f"lists of {widths[0]} numbers",
            )
        return FieldPlan(column.name, "ignore", why="lists of fractions of different lengths")
    return FieldPlan(column.name, "multi", why="a list column")


def infer_text(column: pl.Series) -> FieldPlan:
    """Tell numbers, dates, bags, splits and row names from plain categories."""
    import polars as pl

    name = column.name
    values = column.drop_nulls()
    if not len(values):
        return FieldPlan(name, why="no value in the sample")
    number = _text_as_numbers(values)
    if number is not None:
        if bool(values.head(1000).str.contains(WHOLE).all()) and float(number.abs().max() or 0) >= EXACT:  # type: ignore[arg-type]
            return infer_long_integers(column)
        whole = number.fill_nan(None).drop_nulls()
        if len(whole) and bool((whole == whole.round()).all()) and float(whole.abs().max() or 0) < EXACT:  # type: ignore[arg-type]
            return infer_integers(column.rename(name), "whole numbers", numbers=whole.cast(pl.Int64))
        return infer_fractions(number.rename(name))
    if bool(values.str.contains(WITH_COMMA).all()):
        return FieldPlan(name, "ignore", why="numbers with a comma; write them with a point, 3.14, to use them")
    if bool(values.head(1000).str.contains(DATE).all()):
        return FieldPlan(name, "ignore", why=TIME)
    distinct = values.n_unique()
    lowered = set(values.unique().head(8).str.to_lowercase().to_list()) if distinct <= 4 else {""}
    if lowered <= set(SPLIT_WORDS):
        return FieldPlan(name, "ignore", why="names a split; give it as the split column to cut by it")
    for separator in BAG_SEPARATORS:
        share = values.str.contains(separator, literal=True).mean()
        if not isinstance(share, float) or share < 0.2:
            continue
        bags = values.str.split(separator)
        elements = bags.explode().n_unique()
        if bags.list.len().n_unique() > 1 and elements < distinct:
            return FieldPlan(name, "multi", separator=separator, why=f"{elements} values between {separator!r}")
    if distinct == len(column) > 1000:
        return FieldPlan(name, "ignore", why=ROW_IDENTIFIER)
    return FieldPlan(name, why=f"text, {_describe_count(distinct, column)}")


def _text_as_numbers(values: pl.Series) -> pl.Series | None:
    """Return text as numbers if every value is one or a usual mark for a missing one."""
    import polars as pl

    numbers: pl.Series = values.cast(pl.Float64, strict=False)
    odd = values.filter(numbers.is_null()).unique()
    if numbers.null_count() == len(values) or len(odd) > len(MISSING_NUMBER_TEXTS):
        return None
    if any(text.strip().lower() not in MISSING_NUMBER_TEXTS for text in odd.to_list()):
        return None
    texts = values.filter(numbers.is_not_null())
    if bool(texts.str.contains(LEADING_ZERO).any()):  # leading zeros are spelling, not size
        return None
    return numbers


def infer_integers(column: pl.Series, what: str, numbers: pl.Series | None = None) -> FieldPlan:
    """Tell codes and identifiers from counts and amounts."""
    name = column.name
    values = column.drop_nulls() if numbers is None else numbers.drop_nulls()
    if not len(values):
        return FieldPlan(name, why="no value in the sample")
    distinct = values.n_unique()
    each_row = len(values) == len(column) > 1000 and distinct == len(values)
    low, high = float(values.min()), float(values.max())  # type: ignore[arg-type]
    if TIME_NAME.search(name.lower()) and unix_unit(low, high):
        return FieldPlan(name, "ignore", why=TIME)
    if each_row and bool(values.is_sorted()):
        return FieldPlan(name, "ignore", why="numbers the rows")
    if max(-low, high) >= EXACT:
        return infer_long_integers(column)
    if each_row and is_identifier(name):
        return FieldPlan(name, "ignore", why=ROW_IDENTIFIER)
    if is_identifier(name):
        return FieldPlan(name, why=f"named like an identifier, {_describe_count(distinct, column)}")
    if distinct <= max(2, min(FEW, len(values) // 20)):
        return FieldPlan(name, why=f"{what}, only {distinct} values")
    return FieldPlan(name, "numeric", why=f"{what}, {_describe_count(distinct, column)}")


def infer_long_integers(column: pl.Series) -> FieldPlan:
    """Whole numbers too long for an amount are identifiers; they stay as they are written."""
    distinct = column.drop_nulls().n_unique()
    if distinct == len(column) > 1000:
        return FieldPlan(column.name, "ignore", why=ROW_IDENTIFIER)
    return FieldPlan(column.name, why=f"too long for an amount, {_describe_count(distinct, column)}")


def is_identifier(name: str) -> bool:
    """Whether a column is named like an identifier: ad_id, userId, zip."""
    return bool(IDENTIFIER.search(name) or IDENTIFIER.search(name.lower()))


def infer_fractions(column: pl.Series) -> FieldPlan:
    """Numbers stay numbers, except codes that became fractions because some are missing."""
    import polars as pl

    numbers = column.cast(pl.Float64).fill_nan(None)
    values = numbers.drop_nulls()
    values = values.filter(values.is_finite())
    if len(values) and numbers.null_count() and bool((values == values.round()).all()):
        return infer_integers(column, "whole numbers, some missing", numbers=values)
    return FieldPlan(column.name, "numeric", why=f"numbers, {_describe_count(values.n_unique(), column)}")


def _describe_count(distinct: int, column: pl.Series) -> str:
    """Say how many values there are in the sample."""
    return f"{distinct:,} value{'s' * (distinct != 1)} in {len(column):,} rows"
