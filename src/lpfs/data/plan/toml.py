"""The user's corrections, from a dict or from fields.toml, and what was found written as one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lpfs.data.fields import OPTIONS, FieldPlan, suggestion
from lpfs.errors import DataError, FieldError, InputError, MissingPackageError


def read_fields(given: Any) -> dict[str, dict[str, Any]]:
    """Return {column: {option: value}} of a dict or a TOML file; ``age = "numeric"`` is short for its kind.

    >>> read_fields({"age": "numeric", "ad": {"group": "item"}})
    {'age': {'kind': 'numeric'}, 'ad': {'group': 'item'}}
    """
    where = "fields"
    if given is None:
        return {}
    if isinstance(given, (str, os.PathLike)):
        where = os.fspath(given)
        given = load_toml(Path(given))
    if not isinstance(given, Mapping):
        raise InputError(f"fields are a dict or the path of a TOML file, found {type(given).__name__}")
    result: dict[str, dict[str, Any]] = {}
    for name, options in given.items():
        if isinstance(options, str):
            options = {"kind": options}
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise FieldError(
                f"{where}: {name!r} must be a table of options or a kind, found {options!r:.80}; "
                'write for example: [age] kind = "numeric"'
            )
        for option in options:
            if option not in OPTIONS and isinstance(options[option], Mapping):
                raise FieldError(
                    f"{where}: column {name!r}: {option!r} is a table; a column name with a dot needs quotes, "
                    f'as ["{name}.{option}"]'
                )
            if option not in OPTIONS:
                raise FieldError(
                    f"{where}: column {name!r}: unknown option {option!r}"
                    f"{suggestion(str(option), OPTIONS)}; there are {', '.join(OPTIONS)}"
                )
        try:
            FieldPlan(name, **{str(option): value for option, value in options.items()})
        except FieldError as error:
            raise FieldError(f"{where}: {error}") from None
        result[name] = dict(options)
    return result


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        toml: Any = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        try:
            toml = importlib.import_module("tomli")
        except ImportError:
            raise MissingPackageError(f"{path}: reading TOML needs: pip install tomli") from None
    try:
        values: dict[str, Any] = toml.loads(path.read_bytes().decode("utf-8"))
        return values
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid TOML: {error or 'nested too deeply'}") from error


def to_toml(plans: Iterable[FieldPlan]) -> str:
    """Write plans as TOML for the user to correct."""
    default = FieldPlan("default")
    parts = ["# What lpfs found. Correct it and give it back with --fields.\n"]
    for plan in plans:
        lines = [f"[{quoted(plan.name)}]  # {plan.why}".replace("\n", " "), f'kind = "{plan.kind}"']
        for option in OPTIONS[1:]:
            value = getattr(plan, option)
            if value != getattr(default, option):
                text = quoted(value) if isinstance(value, str) else str(value).lower()
                lines.append(f"{option} = {text}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def quoted(text: str) -> str:
    """Return text as a TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return (
        '"'
        + "".join(escapes.get(c, f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
        + '"'
    )
