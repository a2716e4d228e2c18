"""Checks of names, numbers and keys, shared by all packages; every failed check raises InputError."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral
from typing import Any

from lpfs.errors import InputError

MAX_LISTED = 30  # names that a message lists


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Return the nearest of some names as the end of a message, ignoring case; "" if no name is near.

    >>> did_you_mean("Permutatoin", ["random", "permutation"])
    " (did you mean 'permutation'?)"
    """
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, 1) if isinstance(name, str) else []
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""


def check_name(
    name: Any, names: Iterable[str], kind: str, context: str = "", error: type[InputError] = InputError
) -> None:
    """Raise ``error`` with the nearest name if a name is not one of ``names``.

    ``kind`` is what they name (``"field"``), ``context`` where the name was given, the start of the message.
    """
    known = list(names)
    if name not in known:
        listed = ", ".join(map(str, known[:MAX_LISTED])) + (", …" if len(known) > MAX_LISTED else "")
        prefix = f"{context}: " if context else ""
        raise error(f"{prefix}there is no {kind} {name!r}{did_you_mean(name, known)}; choose from {listed}")


def check_keys(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of a dataclass; raise InputError for an unknown or missing key."""
    names = sorted(field.name for field in fields(cls))
    if unknown := sorted(set(values) - set(names)):
        hint, keys = did_you_mean(unknown[0], names), ", ".join(names) or "none"
        raise InputError(f"unknown key {unknown[0]!r} for {cls.__name__}{hint}; its keys are {keys}")
    required = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - set(values)):
        raise InputError(f"{cls.__name__} needs the key {missing[0]!r}; found {sorted(values)}")
    return dict(values)


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Return an integer as an int; raise InputError if it is none, or below ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" >= {minimum}"
        raise InputError(f"{name} must be an integer{bound}, found {value!r}")
    return int(value)


def check_options(
    options: Any,
    *,
    positive: Sequence[str] = (),
    non_negative: Sequence[str] = (),
    fraction: Sequence[str] = (),
    count: Sequence[str] = (),
) -> None:
    """Raise InputError if an attribute is not a number in its range; ``fraction`` is > 0 and < 1, ``count`` >= 1."""
    ranges: tuple[tuple[str, Sequence[str], Callable[[float], bool]], ...] = (
        ("> 0", positive, lambda value: value > 0),
        (">= 0", non_negative, lambda value: value >= 0),
        ("between 0 and 1", fraction, lambda value: 0 < value < 1),
    )
    for text, names, is_inside in ranges:
        for name in names:
            value = getattr(options, name)
            if not is_number(value) or not math.isfinite(value) or not is_inside(value):
                raise InputError(f"{name} must be a number {text}, found {value!r}")
    for name in count:
        check_int(name, getattr(options, name), 1)
