"""Checks that the settings of methods share; they are made when the settings are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lpfs.errors import InputError


def check_numbers(
    options: Any,
    *,
    positive: Sequence[str] = (),
    least_zero: Sequence[str] = (),
    share: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """Refuse settings that are no number > 0, >= 0, between 0 and 1, or no whole number >= 1."""
    for name in positive:
        _need(options, name, "a number > 0", lambda value: value > 0)
    for name in least_zero:
        _need(options, name, "a number >= 0", lambda value: value >= 0)
    for name in share:
        _need(options, name, "a number between 0 and 1", lambda value: 0 < value < 1)
    for name in whole:
        _need(options, name, "a whole number >= 1", lambda value: isinstance(value, int) and value >= 1)


def _need(options: Any, name: str, what: str, fine: Any) -> None:
    value = getattr(options, name)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not fine(value):
        raise InputError(f"{name} must be {what}, found {value!r}")
