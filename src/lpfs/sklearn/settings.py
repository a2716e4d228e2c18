"""Settings: the selector's arguments, checked and resolved for the table at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from lpfs.errors import FieldError, InputError

METHODS = ("lpfs++", "lpfs")


@dataclass(frozen=True)
class Settings:
    """How a search is done."""

    keep: int
    method: str
    steps: int
    pretrain: int
    batch_size: int
    hidden: tuple[int, ...]
    lr: float
    weight_decay: float
    must_keep: tuple[str, ...]
    seed: int
    verbose: int


def resolve(given: Any, rows: int, names: Sequence[str], random: Any) -> Settings:
    """Return the settings for a table of this size; refuse arguments that make no sense."""
    columns = len(names)
    if given.method not in METHODS:
        raise InputError(f"method must be one of {', '.join(map(repr, METHODS))}, found {given.method!r}")
    batch_size = whole("batch_size", given.batch_size, 1)
    steps = default_steps(rows, columns, batch_size) if given.steps is None else whole("steps", given.steps, 1)
    return Settings(
        keep=count_to_keep(given.keep, columns),
        method=given.method,
        steps=steps,
        pretrain=steps // 2 if given.pretrain is None else whole("pretrain", given.pretrain, 0),
        batch_size=batch_size,
        hidden=_widths(given.hidden),
        lr=_number("lr", given.lr, above=True),
        weight_decay=_number("weight_decay", given.weight_decay, above=False),
        must_keep=_names(given.must_keep, names),
        seed=int(random.randint(2**31 - 1)),
        verbose=whole("verbose", given.verbose, 0),
    )


def default_steps(rows: int, columns: int, batch_size: int) -> int:
    """Return how long a search is by default: five times through the data, within limits.

    At least 1,000 steps from 250 rows on, fewer for toys, at most 10,000; at least 2 for every column.

    >>> [default_steps(rows, 20, 256) for rows in (20, 100, 500, 100_000, 10_000_000)]
    [100, 400, 1000, 1953, 10000]
    """
    least = min(1000, max(100, 4 * rows))
    return max(least, min(10_000, 5 * rows // batch_size), 2 * columns)


def count_to_keep(keep: Any, columns: int) -> int:
    """Return K for ``keep``, a number of columns or a share of them.

    >>> count_to_keep(3, 10), count_to_keep(0.25, 10), count_to_keep(0.01, 10)
    (3, 2, 1)
    """
    if isinstance(keep, Real) and not isinstance(keep, Integral):
        if not 0 < float(keep) <= 1:
            raise InputError(f"keep as a share must be in (0, 1], found {keep!r}; a whole number counts columns")
        return max(1, int(float(keep) * columns))
    count = whole("keep", keep, 1)
    if count > columns:
        raise InputError(f"keep={count}, but X has only {columns} column(s); keep at most {columns}")
    return count


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``, or say what was found."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, found {value!r}")
    return int(value)


def _number(name: str, value: Any, above: bool) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise InputError(f"{name} must be a number {'above 0' if above else '>= 0'}, found {value!r}")
    return number


def _widths(hidden: Any) -> tuple[int, ...]:
    if isinstance(hidden, str) or not hasattr(hidden, "__iter__"):
        raise InputError(f"hidden must be a sequence of widths such as (64, 32), found {hidden!r}")
    return tuple(whole("a width in hidden", each, 1) for each in hidden)


def _names(must_keep: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns to keep in any case, given by name or by number."""
    if isinstance(must_keep, str) or not hasattr(must_keep, "__iter__"):
        raise InputError(f"must_keep must be a list of columns, found {must_keep!r}")
    found = []
    for each in must_keep:
        if isinstance(each, Integral) and not isinstance(each, bool) and 0 <= int(each) < len(names):
            found.append(names[int(each)])
        elif each in names:
            found.append(each)
        else:
            raise FieldError(f"must_keep names {each!r}, but X has no such column; it has {', '.join(names[:20])}")
    return tuple(dict.fromkeys(found))
