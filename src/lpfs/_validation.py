"""Checks of names, numbers, keys and JSON values, shared by all packages; every failed check raises InputError."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lpfs.errors import InputError

MAX_LISTED = 30  # names that a message lists
MAX_INTEGER = 2**63  # larger integers of a JSON file fit no tensor
SHORT = reprlib.Repr()  # values in messages
SHORT.maxstring = SHORT.maxother = 80
SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # type -> name in a message, whether a value has it
    Any: ("any value", lambda value: True),
    NoneType: ("null", lambda value: value is None),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: is_number(value) and isinstance(value, int) and abs(value) < MAX_INTEGER),
    float: ("a number", lambda value: is_number(value)),
    str: ("text", lambda value: isinstance(value, str)),
}


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


def check_keys(cls: type, values: Mapping[str, Any], context: str = "") -> dict[str, Any]:
    """Return ``values`` as keyword arguments of a dataclass; raise InputError for an unknown or missing key.

    ``context`` is where the values are, the start of the message.
    """
    (names, required), prefix = _keys(cls), f"{context}: " if context else ""
    if unknown := sorted(values.keys() - names):
        hint, keys = did_you_mean(unknown[0], sorted(names)), ", ".join(sorted(names)) or "none"
        raise InputError(f"{prefix}unknown key {unknown[0]!r} for {cls.__name__}{hint}; its keys are {keys}")
    if missing := sorted(required - values.keys()):
        raise InputError(f"{prefix}{cls.__name__} needs the key {missing[0]!r}; found {sorted(values)}")
    return dict(values)


def check_json(value: Any, expected: Any, key: str = "") -> None:
    """Raise InputError with the key, its value and the expected type if a JSON value has another type.

    ``expected`` is Any, a scalar type, a Literal, a union, a list, tuple, Sequence, dict or Mapping with the types of
    its items, or a dataclass, whose keys are checked too. A dictionary of types describes an object: a key that ends
    with ``?`` may be missing or null, ``*`` stands for every key, other keys are ignored. ``[X]`` is a list of X.

    >>> check_json({"gates": {"user": "1"}}, {"gates": dict[str, float], "made?": dict})
    Traceback (most recent call last):
    lpfs.errors.InputError: the key 'gates.user' must be a number, found '1'
    """
    if isinstance(expected, type) and expected in SCALARS and SCALARS[expected][1](value):
        return
    choices = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    kinds = [choice for choice in choices if _has_kind(value, choice)]
    if not kinds:
        what = f"the key {SHORT.repr(key)}" if key else "the content"
        raise InputError(f"{what} must be {' or '.join(map(_type_text, choices))}, found {SHORT.repr(value)}")
    for name, item, kind in _items(value, kinds[0], key):
        check_json(item, kind, name)


def _has_kind(value: Any, expected: Any) -> bool:
    """Return whether a value has a type, whatever its items are."""
    if get_origin(expected) is Literal:
        return isinstance(value, str) and value in get_args(expected)
    if _is_list(expected):
        size = len(get_args(expected)) if _is_fixed_tuple(expected) else None
        return isinstance(value, list | tuple) and size in (None, len(value))
    if not isinstance(expected, dict) and expected in SCALARS:
        return SCALARS[expected][1](value)
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _items(value: Any, expected: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and type of each item; raise InputError for a missing key."""
    types, prefix = get_args(expected), f"{key}." if key else ""
    if _is_list(expected):
        kinds = expected if isinstance(expected, list) else types or [Any]
        kinds = kinds if _is_fixed_tuple(expected) else [kinds[0]] * len(value)
        yield from ((f"{key}[{number}]", item, kinds[number]) for number, item in enumerate(value))
    elif isinstance(expected, dict):
        for pattern, kind in expected.items():
            for name in value if pattern in ("*", "*?") else [pattern.removesuffix("?")]:
                if name not in value and not pattern.endswith("?"):
                    raise InputError(f"the key {SHORT.repr(prefix + name)} is missing; it must be {_type_text(kind)}")
                if not pattern.endswith("?") or value.get(name) is not None:
                    yield f"{prefix}{name}", value[name], kind
    elif isinstance(expected, type) and is_dataclass(expected):
        hints = _hints(expected)
        yield from ((f"{prefix}{name}", item, hints[name]) for name, item in check_keys(expected, value, key).items())
    elif isinstance(value, Mapping) and types:
        yield from ((f"{prefix}{name}", item, types[1]) for name, item in value.items())


@cache
def _keys(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all fields of a dataclass, and of those without a default."""
    required = (field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING)
    return frozenset(field.name for field in fields(cls)), frozenset(required)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_list(expected: Any) -> bool:
    return isinstance(expected, list) or (get_origin(expected) or expected) in (list, tuple, Sequence)


def _is_fixed_tuple(expected: Any) -> bool:
    return get_origin(expected) is tuple and get_args(expected)[-1] is not ...


def _type_text(expected: Any) -> str:
    """Return a type in the words of a message."""
    if get_origin(expected) is Literal:
        return f"one of {', '.join(get_args(expected))}"
    if get_origin(expected) in (Union, UnionType):
        return " or ".join(map(_type_text, get_args(expected)))
    if _is_list(expected):
        return f"a list of {len(get_args(expected))}" if _is_fixed_tuple(expected) else "a list"
    return "an object" if isinstance(expected, dict) or expected not in SCALARS else SCALARS[expected][0]


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
