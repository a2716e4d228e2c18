"""Checks that the options of several methods share: each says what is wrong and what was found."""

from __future__ import annotations

import math

from lpfs.errors import InputError


def whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number >= {least}, found {value!r}")


def positive(name: str, value: object, below: float = math.inf) -> None:
    """Refuse what is not a number above 0 and below ``below``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < below:  # type: ignore[operator]
        within = "> 0" if below == math.inf else f"between 0 and {below:g}"
        raise InputError(f"{name} must be a number {within}, found {value!r}")
