"""How values are spelled in logs."""

DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?$"
AMBIGUOUS_DATE = r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b"  # which of them is the day, and which the month?
WITH_COMMA = r"^[+-]?\d+,\d+$"
WHOLE = r"^[+-]?\d+$"
LEADING_ZERO = r"^[+-]?0\d"
NUMBER_MARKS = {"", "na", "n/a", "nan", "null", "none", "\\n", "-"}  # instead of a number, in lower case
# Unix time from 2001 to 2286; the ranges of the units do not meet
UNITS = ((10**9, 10**10, "s"), (10**12, 10**13, "ms"), (10**15, 10**16, "us"), (10**18, 10**19, "ns"))
# words for the parts of a published split, in the order in which they are used
SPLITS = dict.fromkeys(("train", "training"), 0)
SPLITS |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), 1)
SPLITS |= dict.fromkeys(("test", "testing", "holdout"), 2)


def unix_unit(low: float, high: float) -> str | None:
    """Return the unit of Unix times that lie between two numbers; None if they cannot be such times.

    >>> unix_unit(1.7e9, 1.8e9), unix_unit(0, 1.8e9)
    ('s', None)
    """
    return next((unit for least, most, unit in UNITS if least <= low and high < most), None)
