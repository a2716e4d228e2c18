"""Values of a raw log: casts that raise clear errors, numbers, dates and labels in text, times to days."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import polars as pl

from lpfs._text import quote_command
from lpfs.errors import DataError

DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?$"
# a date in numbers with one separator, and a time of day: first, second and third number, T, seconds, AM or PM
DAY_DATE = r"^(\d{1,4})([./-])(\d{1,2})([./-])(\d{1,4})(?:([ T])\d{1,2}:\d{2}(:\d{2})?( ?[AaPp][Mm])?)?$"
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
NAMED_DATE = rf"^(?i:(?:[a-z]{{3,9}},? )?(?:\d{{1,2}}[ ./-])?(?:{MONTHS})[a-z]*)[ ./,-]+\d{{1,4}}\b"
ANY_DATE = f"(?:{DATE})|(?:{DAY_DATE})|(?:{NAMED_DATE})"
# Dates with names of months, to be tried one by one
NAMED_DATE_FORMATS = tuple(
    date.replace("%b", month) + clock
    for month in ("%b", "%B")
    for date in ("%d %b %Y", "%d-%b-%Y", "%d/%b/%Y", "%d.%b.%Y", "%b %d %Y", "%b %d, %Y", "%d-%b-%y", "%d %b %y")
    for clock in ("", " %H:%M", " %H:%M:%S")
)
MIN_DATE_SHARE = 0.5  # share of the texts of a column that must look like dates, for it to be a column of dates
INTEGER = r"^[+-]?\d+$"
LEADING_ZERO = r"^[+-]?0\d"
CURRENCY = "$€£¥₹"
# Numbers in text, by their decimal mark: a sign, a currency sign before or after, thousands separators, percent
NUMBER_TEXT = {
    decimal: rf"^\s*[+-]?[{CURRENCY}]?\s?[+-]?(?:\d{{1,3}}(?:[{thousands}'\u00a0\u202f]\d{{3}})+|\d+)?"
    rf"(?:[{decimal}]\d*)?(?:[eE][+-]?\d+)?\s?[{CURRENCY}%]?\s*$"
    for decimal, thousands in ((".", ","), (",", "."))
}
NUMBER_SIGNS = rf"[\s{CURRENCY}%'\u00a0\u202f]"  # removed from a number in text, and the thousands separator
MISSING_NUMBER_TEXTS = {"", "na", "n/a", "nan", "null", "none", "\\n", "-"}  # missing numbers, in lower case
MISSING_NUMBER_TEXTS |= {"#n/a", "#na", "#null!", "#div/0!", "#value!", "#ref!", "#num!", "#name?"}  # of spreadsheets
POSITIVE_WORDS = ("click", "clicked", "positive", "true", "yes", "converted", "conversion", "purchased", "bought")
NEGATIONS = [negation + space for negation in ("not", "no", "non") for space in (" ", "_", "-", "")]
# texts of a label in lower case, with the number that they stand for
LABEL_WORDS = dict.fromkeys((*POSITIVE_WORDS, "t", "y", "pos"), "1")
LABEL_WORDS |= dict.fromkeys(("false", "no", "f", "n", "negative", "neg", "unclicked"), "0")
LABEL_WORDS |= {negation + word: "0" for negation in NEGATIONS for word in POSITIVE_WORDS}
# Unix times from 2001 to 2286: (from, to, unit); the ranges do not overlap
UNIX_RANGES = ((10**9, 10**10, "s"), (10**12, 10**13, "ms"), (10**15, 10**16, "us"), (10**18, 10**19, "ns"))
MAX_DATE_SECONDS = 8 * 10**12  # seconds from 1970 to the last date that can be written as text, about the year 255,000
TICKS = {"ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
# words for the parts of a published split, with the index of the part: train, valid, test
SPLIT_WORDS = dict.fromkeys(("train", "training"), 0)
SPLIT_WORDS |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), 1)
SPLIT_WORDS |= dict.fromkeys(("test", "testing", "holdout"), 2)


def cast_column(values: pl.Series, dtype: Any, *, strict: bool = True) -> pl.Series:
    """Return a column as another type; with ``strict=False``, values that do not fit become null."""
    if dtype == pl.String and isinstance(values.dtype, (pl.Datetime, pl.Date)):  # polars panics, and prints it
        ticks = TICKS[values.dtype.time_unit] if isinstance(values.dtype, pl.Datetime) else 1 / 86_400
        numbers = values.to_physical().cast(pl.Float64).drop_nulls()
        if numbers.len() and not numbers.is_between(-MAX_DATE_SECONDS * ticks, MAX_DATE_SECONDS * ticks).all():
            problem = "a date outside the years -250,000 to 250,000"
            raise DataError(f"column {values.name!r} holds an invalid value: {problem}")
    try:
        result: pl.Series = values.cast(dtype, strict=strict)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"column {values.name!r}: {values.dtype} cannot be used as {dtype}") from error
    except pl.exceptions.PanicException as error:  # a date that is out of range
        raise DataError(f"column {values.name!r} holds an invalid value ({error})") from error
    return result


def to_python_list(values: pl.Series) -> list[Any]:
    """Return the values of a column as Python objects."""
    try:
        return values.to_list()
    except (ValueError, OverflowError, pl.exceptions.PanicException) as error:
        raise DataError(f"column {values.name!r} holds an invalid value ({error})") from error


def value_error(values: pl.Series, invalid: pl.Series, locate: Callable[[int], str], problem: str) -> DataError:
    """Return the error for the first of the invalid values of a column."""
    row = int(invalid.arg_max() or 0)
    return DataError(f"{locate(row)}: column {values.name!r}: {values[row]!r:.60} {problem}")


def drop_nulls(values: pl.Series) -> pl.Series:
    """Return the values that are not null; without a call of polars, which takes 30 µs, if none is."""
    return values.drop_nulls() if values.null_count() else values


def decode_dictionary_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Return dictionary-encoded columns as text."""
    coded = [name for name, dtype in frame.schema.items() if dtype in (pl.Categorical, pl.Enum)]
    return frame.with_columns(pl.col(coded).cast(pl.String)) if coded else frame


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, truncated."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def replace_missing_marks(frame: pl.DataFrame, marks: Sequence[str]) -> pl.DataFrame:
    """Replace the user's texts for a missing value by null, in text columns."""
    if not marks:
        return frame
    text = pl.col(pl.String)
    return frame.with_columns(pl.when(text.is_in(list(marks))).then(None).otherwise(text).name.keep())


def strip_blanks(frame: pl.DataFrame) -> pl.DataFrame:
    """Remove blanks around texts; a text of blanks alone becomes null."""
    return replace_missing_marks(frame.with_columns(pl.col(pl.String).str.strip_chars()), [""])


def parse_numbers(text: pl.Series, decimal: str = ".") -> pl.Series:
    """Return numbers from text, also with blanks, thousands separators, a currency or percent sign; null for others.

    ``decimal`` is the decimal mark. The sign of percent is only removed.

    >>> parse_numbers(pl.Series([" 7", "$2,641.21", "81.1%", "1.234,5"])).to_list()
    [7.0, 2641.21, 81.1, None]
    >>> parse_numbers(pl.Series(["3,14", "1.234,5"]), ",").to_list()
    [3.14, 1234.5]
    """
    numbers = cast_column(text, pl.Float64, strict=False)
    if decimal == ".":
        rows = (numbers.is_null() & text.is_not_null()).arg_true()
        if not len(rows):
            return numbers
    else:
        rows = pl.arange(len(text), eager=True)
    others = text.gather(rows)
    others = others.set(~others.str.contains(NUMBER_TEXT[decimal]), None).str.replace_all(NUMBER_SIGNS, "")
    others = others.str.replace_all("." if decimal == "," else ",", "", literal=True)
    if decimal == ",":
        others = others.str.replace(",", ".", literal=True)
    return numbers.scatter(rows, cast_column(others, pl.Float64, strict=False))


def looks_like_dates(text: pl.Series) -> bool:
    """Return whether most texts look like dates."""
    share = text.str.contains(ANY_DATE).mean()
    return isinstance(share, float) and share >= MIN_DATE_SHARE


def date_formats(text: pl.Series) -> list[str]:
    """Return the formats of dates in numbers that fit all texts: iso, or strptime formats such as %d/%m/%Y.

    >>> date_formats(pl.Series(["01/02/2026", "12/02/2026"]))
    ['%d/%m/%Y', '%m/%d/%Y']
    >>> date_formats(pl.Series(["01/02/2026 9:30", "13/02/2026 9:30"]))
    ['%d/%m/%Y %H:%M']
    """
    if bool(text.str.contains(DATE).all()):
        return ["iso"]
    parts = text.drop_nulls().str.extract_groups(DAY_DATE).struct.unnest()
    parts.columns = ["first", "mark", "second", "other_mark", "third", "space", "seconds", "half"]
    lengths_of_clock = [pl.col(name).str.len_chars() for name in ("seconds", "half")]
    layouts = parts.select("mark", "other_mark", "space", *lengths_of_clock).unique()
    mark, other_mark, space, seconds, half = layouts.row(0) if layouts.height == 1 else (None,) * 5
    if mark is None or mark != other_mark:
        return []
    clock = "" if space is None else space + ("%H:%M" if half is None else "%I:%M")
    clock += ":%S" * (seconds is not None) + {None: "", 2: "%p", 3: " %p"}[half]
    lengths = [set(parts[name].str.len_chars().unique().to_list()) for name in ("first", "third")]
    if lengths[0] == {4}:
        orders = [("%Y", "%m", "%d")]
    elif lengths[1] == {4}:
        orders = [("%d", "%m", "%Y"), ("%m", "%d", "%Y")]
    elif lengths[1] == {2}:
        orders = [("%d", "%m", "%y"), ("%m", "%d", "%y"), ("%y", "%m", "%d")]
    else:
        return []
    largest = [int(parts[name].cast(pl.Int64).max() or 0) for name in ("first", "second", "third")]
    limits = {"%d": 31, "%m": 12}
    return [
        mark.join(order) + clock
        for order in orders
        if all(value <= limits.get(code, 9999) for code, value in zip(order, largest, strict=True))
    ]


def most_date_formats(text: pl.Series) -> list[str]:
    """Return the formats that fit the most frequent layout of the dates among texts.

    >>> most_date_formats(pl.Series(["2026-01-01", "soon", "2026-01-02"]))
    ['iso']
    >>> most_date_formats(pl.Series(["Jan 31 2026", "Feb 1 2026", "02/01/2026"]))
    ['%b %d %Y']
    """
    dates = text.drop_nulls().to_frame("text").filter(pl.col("text").str.contains(ANY_DATE))
    layout = pl.col("text").str.replace_all("[A-Za-z]+", "a").str.replace_all(r"\d{4}", "Y")
    dates = dates.with_columns(layout=layout.str.replace_all(r"\d{1,2}", "0"))
    if dates.is_empty():
        return []
    counts = dates["layout"].value_counts(name="count").sort("count", "layout", descending=[True, False])
    most = dates.filter(pl.col("layout") == counts["layout"][0])["text"].unique(maintain_order=True)
    named = (name for name in NAMED_DATE_FORMATS if not read_days(most, name)[0].null_count())
    return date_formats(most) or list(islice(named, 1))


def not_of_format(text: pl.Series, time_format: str) -> pl.Series:
    """Return for each text whether it is present and does not fit a time format."""
    return read_days(text, time_format)[0].is_null() & text.is_not_null()


def unix_unit(low: float, high: float) -> str | None:
    """Return the unit of Unix times that lie between two numbers; None if they cannot be Unix times.

    >>> unix_unit(1.7e9, 1.8e9), unix_unit(0, 1.8e9)
    ('s', None)
    """
    return next((unit for start, stop, unit in UNIX_RANGES if start <= low and high < stop), None)


def detect_time_format(values: pl.Series) -> str:
    """Detect the format of a time column of text or numbers from its first rows."""
    text = cast_column(values, pl.String)
    if looks_like_dates(text):
        formats = date_formats(text)
        if len(formats) == 1:
            return formats[0]
        raise unreadable_dates(text, formats)
    numbers = cast_column(values, pl.Float64, strict=False)
    if numbers.null_count() or not bool((numbers == numbers.round()).all()):
        return "name"
    low, high = float(numbers.min() or 0), float(numbers.max() or 0)  # type: ignore[arg-type]
    if unit := unix_unit(low, high):
        return f"unix {unit}"
    return "%Y%m%d" if low >= 19000101 and high <= 21001231 else "number"


def unreadable_dates(text: pl.Series, formats: Sequence[str]) -> DataError:
    """Return the error for dates that no format, or more than one, fits."""
    problem = f"{text.drop_nulls().head(1).item()!r:.60} may be a date, but its format is "
    problem += "ambiguous: " + " or ".join(formats) if formats else "unknown"
    formats = formats or most_date_formats(text)
    example = (formats or ["%d/%m/%Y"])[0]
    advice = f"give time_format={example!r}, or {quote_command('--time-format', example)}"
    others = text.filter(not_of_format(text, example)) if len(formats) == 1 else []
    if len(others):
        problem = f"the other rows are dates, but {others[0]!r:.60} is not one of the format {example}"
        advice = "repair it"
    return DataError(
        f"column {text.name!r}: {problem}; {advice}; time_format='name' uses the texts as day names in row order"
    )


def as_integers(values: pl.Series) -> pl.Series:
    """Return integers, also from floats such as 3.0; null for any other value."""
    numbers = cast_column(values, pl.Int64, strict=False)
    if numbers.null_count():
        floats = cast_column(values, pl.Float64, strict=False)
        numbers = cast_column(floats.set(floats != floats.round(), None), pl.Int64, strict=False)
    return numbers


def read_days(values: pl.Series, time_format: str) -> tuple[pl.Series, pl.Series]:
    """Return the day of each row and a column that sorts the rows; null where a value does not fit the format."""
    if time_format == "date":
        return cast_column(values, pl.Date), values
    if time_format == "number":
        numbers = as_integers(values)
        return numbers, numbers
    text = cast_column(values, pl.String)
    if time_format == "name":
        return text, pl.Series(text.name, np.zeros(len(text)))
    if time_format == "iso":  # the date as written, without conversion of time zones
        return text.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False), text
    if time_format.startswith("unix "):
        numbers = as_integers(values)
        unit: Any = time_format[5:]
        times = pl.select(pl.from_epoch(numbers, time_unit=unit)).to_series()
        return cast_column(times, pl.Date), numbers
    try:
        if any(code in time_format for code in ("%H", "%I", "%T", "%R", "%s", "%X", "%c")):
            # The parser does not accept hours without minutes: append them.
            has_minutes = any(code in time_format for code in ("%M", "%T", "%R", "%s"))
            suffix = ("", "") if has_minutes else (":00", ":%M")
            times = (text + suffix[0]).str.to_datetime(time_format + suffix[1], strict=False)
            return cast_column(times, pl.Date), times
        dates = text.str.to_date(time_format, strict=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"time_format {time_format!r} cannot be used: {first_line(error)}") from error
    return dates, dates
