"""The kind of a column, inferred from its first rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from lpfs._fileio import pause_garbage_collection
from lpfs.data.fields import INTEGERS, FieldPlan
from lpfs.data.parsing import (
    ANY_DATE,
    INTEGER,
    LEADING_ZERO,
    MISSING_NUMBER_TEXTS,
    NUMBER_SIGNS,
    NUMBER_TEXT,
    SPLIT_WORDS,
    cast_column,
    date_formats,
    drop_nulls,
    looks_like_dates,
    parse_numbers,
    unix_unit,
)

SAMPLE_ROWS = 100_000  # rows from which kinds are inferred
MAX_CODES = 50  # integers with at most this many distinct values are codes
MIN_UNIQUE_ROWS = 1000  # more rows than this, all different: the column identifies the row
FEW_ROWS, FIRST_ROWS = 20, 1000  # rows that rule out most kinds of text
MIN_BAG_SHARE = 0.2  # share of the values that must contain the separator of a bag
MAX_EXACT = 2**53  # integers from here on are identifiers: too long for an amount, not exact as float64
BAG_SEPARATORS = ("|", "^", "\x01", "\x02", "\x03", ";")
ANY_BAG_SEPARATOR = "|".join(map(re.escape, BAG_SEPARATORS))
IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|code|zip|zipcode|hash|key|sku|uuid|guid)$|[a-z0-9](Id|ID)$|_idx?$")
TIME_NAME = re.compile(r"(^|[^a-z])(time|times|timestamp|datetime|ts|date|at|epoch)$|time(stamp)?$")
TIME_REASON = "a time; give it as the time column to order the rows by it"
SPLIT_REASON = "names a split; give it as the split column to split by it"
UNREADABLE_DATES = "dates in a format that is not known; give it as the time column, with its time format, to use it"
ROW_IDENTIFIER = "a different value in every row: it identifies the row"


@pause_garbage_collection()
def infer_columns(frame: pl.DataFrame, *, typed: bool = True, decimal: str | None = None) -> dict[str, FieldPlan]:
    """Return the plan for each column of a table; see ``infer``."""
    text = frame.select(pl.col(pl.String))  # one call for all columns: a call takes as long as hundreds of values
    padded = text.select(pl.all().str.contains(LEADING_ZERO).any()).row(0) if text.width and not typed else ()
    zero_padded = dict(zip(text.columns, padded, strict=not typed))
    return {
        column.name: _infer(column, typed, decimal, zero_padded=zero_padded.get(column.name, False)) for column in frame
    }


def infer(column: pl.Series, *, typed: bool = True, decimal: str | None = None) -> FieldPlan:
    """Return the plan for a column, with the reason.

    ``typed`` says whether the source has types: otherwise numbers are text too. ``decimal`` is the decimal mark of
    numbers in text; None: detected.

    ==================================  ==============================================================
    text                                categorical; multi if a separator splits it into fewer values
    numbers in text, without types      as numbers; also $2,641.21, 81.1% and 3,14
    integers                            categorical if few or named like an identifier, else numeric
    other numbers                       numeric
    true/false                          categorical
    lists                               multi; numeric if all hold the same number of floats
    dates, times                        ignored (``time=`` orders the rows by it)
    a different text in every row       ignored: it identifies the row
    ==================================  ==============================================================
    """
    return infer_columns(column.to_frame(), typed=typed, decimal=decimal)[column.name]


def _infer(column: pl.Series, typed: bool, decimal: str | None, *, zero_padded: bool) -> FieldPlan:
    name, dtype = column.name, column.dtype
    if dtype == pl.Null:
        return FieldPlan(name, why="no value in the sample")
    if dtype == pl.Boolean:
        return FieldPlan(name, why="true/false")
    if dtype == pl.Duration:
        return FieldPlan(name, "ignore", why="a duration; store it as a number to use it")
    if dtype == pl.Time:
        return FieldPlan(name, "ignore", why="a time of day without a date; store it as a number to use it")
    if dtype.is_temporal():
        return FieldPlan(name, "ignore", why=TIME_REASON)
    if isinstance(dtype, (pl.List, pl.Array)):
        return infer_list(column)
    if dtype == pl.String:
        return infer_text(column, typed=typed, decimal=decimal, zero_padded=zero_padded)
    if dtype.is_integer():
        return infer_integers(column, INTEGERS)
    if isinstance(dtype, pl.Decimal) and dtype.scale == 0:
        return infer_integers(column, INTEGERS, numbers=column.cast(pl.Int128))
    if dtype.is_float() or dtype.is_decimal():
        return infer_floats(column)
    return FieldPlan(name, "ignore", why=f"a column of {dtype} cannot be used; flatten or convert it")


def infer_list(column: pl.Series) -> FieldPlan:
    """Distinguish bags of values from vectors of numbers."""
    inner = column.dtype.inner  # type: ignore[attr-defined]
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if inner.is_nested() or inner in (pl.Binary, pl.Object):
        return FieldPlan(column.name, "ignore", why=f"a list of {inner} cannot be used; flatten it")
    if inner.is_float() or inner.is_decimal():
        width, *other_widths = column.drop_nulls().list.len().unique().to_list() or [0]
        if width and not other_widths:
            return FieldPlan(column.name, "numeric", width=width, transform="none", why=f"lists of {width} numbers")
        return FieldPlan(column.name, "ignore", why="lists of floats of different lengths")
    return FieldPlan(column.name, "multi", why="a list column")


def infer_text(column: pl.Series, *, typed: bool, decimal: str | None, zero_padded: bool) -> FieldPlan:
    """Distinguish numbers, dates, bags, splits and row identifiers from plain categories."""
    name, values = column.name, drop_nulls(column)
    if not len(values):
        return FieldPlan(name, why="no value in the sample")
    number_text = None if typed or zero_padded else read_number_text(values, decimal)  # 007 is not 7
    if number_text is not None:
        return infer_number_text(column, number_text)
    some_dates = any(re.search(ANY_DATE, text) for text in values.head(FEW_ROWS).to_list())
    if some_dates and looks_like_dates(values.head(FIRST_ROWS)):
        return FieldPlan(name, "ignore", why=TIME_REASON if date_formats(values) else UNREADABLE_DATES)
    distinct = values.n_unique()
    words = set(values.unique().head(8).str.to_lowercase().to_list()) if distinct <= 4 else {""}
    if words <= set(SPLIT_WORDS):
        return FieldPlan(name, "ignore", why=SPLIT_REASON)
    for separator in BAG_SEPARATORS if values.str.contains(ANY_BAG_SEPARATOR).any() else ():
        share = values.str.contains(separator, literal=True).mean()
        if not isinstance(share, float) or share < MIN_BAG_SHARE:
            continue
        bags = values.str.split(separator)
        elements = bags.explode().n_unique()
        if bags.list.len().n_unique() > 1 and elements < distinct:
            return FieldPlan(name, "multi", separator=separator, why=f"{elements} values between {separator!r}")
    if distinct == len(column) > MIN_UNIQUE_ROWS:
        return FieldPlan(name, "ignore", why=ROW_IDENTIFIER)
    return FieldPlan(name, why=f"text, {_describe_count(distinct, column)}")


@dataclass(frozen=True)
class NumberText:
    """Numbers of a column of text."""

    numbers: pl.Series  # null where the text stands for a missing number
    decimal: str = "."  # decimal mark
    signs: str = ""  # what the text has besides plain numbers, as "$ ,"


def read_number_text(values: pl.Series, decimal: str | None = None) -> NumberText | None:
    """Return text as numbers; None if a value is neither a number nor a usual text for a missing one.

    ``1,234`` has a thousands separator if no value of the column decides otherwise, as ``3,14`` does.
    """
    plain = cast_column(values, pl.Float64, strict=False)
    if decimal != "," and not plain.null_count():
        return NumberText(plain)
    first, head = values[0], values.head(FIRST_ROWS)
    for mark in (".", ",") if decimal is None else (decimal,):
        if first.strip().lower() not in MISSING_NUMBER_TEXTS and not re.search(NUMBER_TEXT[mark], first):
            continue  # rules out nearly every column of text
        if plain.head(FIRST_ROWS).null_count() and _numbers_or_missing(head, mark) is None:
            continue
        numbers = _numbers_or_missing(values, mark)
        if numbers is not None:
            odd = values.filter(numbers.is_not_null() & (plain.is_null() | (mark == ",")))
            signs = "".join(sorted(set("".join(odd.head(FIRST_ROWS).to_list())) - set("0123456789+-eE.")))
            return NumberText(numbers, mark, signs)
    return None


def _numbers_or_missing(values: pl.Series, decimal: str) -> pl.Series | None:
    """Return text as numbers; None if another text than those of missing numbers is among them."""
    numbers = parse_numbers(values, decimal)
    missing = numbers.is_null()
    if missing.all():
        return None
    others = values.filter(missing).unique()
    unknown = len(others) > 4 * len(MISSING_NUMBER_TEXTS)  # each may be in capitals
    unknown = unknown or any(text.strip().lower() not in MISSING_NUMBER_TEXTS for text in others.to_list())
    codes = bool(values.filter(~missing).str.replace_all(NUMBER_SIGNS, "").str.contains(LEADING_ZERO).any())
    return None if unknown or codes else numbers  # 007 is not 7


def infer_number_text(column: pl.Series, text: NumberText) -> FieldPlan:
    """Distinguish identifiers, codes, counts and amounts that are written as text."""
    name, values = column.name, drop_nulls(column)
    array = drop_nulls(text.numbers).to_numpy()  # NumPy needs a tenth of the time for a short column
    present = array[~np.isnan(array)]
    largest = float(np.abs(present).max(initial=0))
    if largest >= MAX_EXACT and bool(values.head(FIRST_ROWS).str.contains(INTEGER).all()):
        return infer_long_integers(column)
    if not len(present) or largest >= MAX_EXACT or not bool((present == np.rint(present)).all()):
        plan = infer_floats(text.numbers.rename(name))
    else:
        plan = infer_integers(column, INTEGERS, numbers=pl.Series(name, present.astype(np.int64)))
    if not text.signs:
        return plan
    marks = " ".join(sorted(set(text.signs) - set(" \xa0\u202f")))
    why = f"{plan.why}, written with {marks}" if marks and plan.kind == "numeric" else plan.why
    return replace(plan, decimal="," if text.decimal == "," else None, why=why)


def infer_integers(column: pl.Series, description: str, numbers: pl.Series | None = None) -> FieldPlan:
    """Distinguish codes and identifiers from counts and amounts."""
    name, values = column.name, drop_nulls(column if numbers is None else numbers)
    if not len(values):
        return FieldPlan(name, why="no value in the sample")
    distinct = values.n_unique()
    unique = len(values) == len(column) > MIN_UNIQUE_ROWS and distinct == len(values)
    low, high = float(values.min()), float(values.max())  # type: ignore[arg-type]
    if TIME_NAME.search(name.lower()) and unix_unit(low, high):
        return FieldPlan(name, "ignore", why=TIME_REASON)
    if unique and bool(values.is_sorted()):
        return FieldPlan(name, "ignore", why="the row number")
    if max(-low, high) >= MAX_EXACT:
        return infer_long_integers(column)
    if IDENTIFIER.search(name) or IDENTIFIER.search(name.lower()):
        if unique:
            return FieldPlan(name, "ignore", why=ROW_IDENTIFIER)
        return FieldPlan(name, why=f"named like an identifier, {_describe_count(distinct, column)}")
    if distinct <= max(2, min(MAX_CODES, len(values) // 20)):
        return FieldPlan(name, why=f"{description}, only {distinct} values")
    return FieldPlan(name, "numeric", why=f"{description}, {_describe_count(distinct, column)}")


def infer_long_integers(column: pl.Series) -> FieldPlan:
    """Treat integers that are too long for an amount as identifiers, with all their digits."""
    distinct = column.drop_nulls().n_unique()
    if distinct == len(column) > MIN_UNIQUE_ROWS:
        return FieldPlan(column.name, "ignore", why=ROW_IDENTIFIER)
    return FieldPlan(column.name, why=f"too long for an amount, {_describe_count(distinct, column)}")


def infer_floats(column: pl.Series) -> FieldPlan:
    """Keep floats as numbers, except codes that are floats only because some are missing."""
    numbers = column.cast(pl.Float64).to_numpy()  # NaN where missing
    finite = numbers[np.isfinite(numbers)]
    values = pl.Series(column.name, finite)
    if len(finite) and np.isnan(numbers).any() and bool((finite == np.rint(finite)).all()):
        return infer_integers(column, f"{INTEGERS}, some missing", numbers=values)
    return FieldPlan(column.name, "numeric", why=f"numbers, {_describe_count(values.n_unique(), column)}")


def _describe_count(distinct: int, column: pl.Series) -> str:
    return f"{distinct:,} value{'s' * (distinct != 1)} in {len(column):,} rows"
