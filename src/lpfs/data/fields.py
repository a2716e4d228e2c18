"""FieldPlan: what prepare does with one column; and the user's corrections, from a dict or from fields.toml."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lpfs._validation import did_you_mean, is_number
from lpfs.errors import DataError, FieldError, InputError, MissingPackageError
from lpfs.schema import GROUPS

KINDS = ("categorical", "numeric", "multi", "ignore")
BINNING = ("auto", "off")  # allowed instead of a number of bins
TRANSFORMS = ("log", "none")
LISTED_NAMES = 8  # columns listed in an error message


@dataclass(frozen=True)
class FieldPlan:
    """What prepare does with one column.

    Args:
        name: the column.
        kind: ``categorical``, ``numeric``, ``multi`` or ``ignore``.
        group: ``user``, ``item``, ``combine`` or ``context``.
        cost: cost of serving the field, in any unit.
        separator: splits the text of a multi-valued (or of a wide numeric) column into values.
        hash: hash values modulo this range instead of keeping a vocabulary.
        min_count: values that occur less often in the training days share the id of unseen values.
        max_values: keep only this many of the most frequent values.
        bins: split numbers into this many quantile bins, whose indices become ids; ``auto``: by the number of
            training rows; ``off``: keep numbers even if bins are set for all fields.
        transform: of numbers: ``log`` (signed log1p, then standardize), or ``none`` (standardize only).
        width: how many numbers a numeric column holds (list columns, or with ``separator``).
        hexadecimal: values are hexadecimal numbers of at most eight digits.
        dim: embedding width written to the schema.
        why: reason for the kind.
    """

    name: str
    kind: str = "categorical"
    group: str = "context"
    cost: float = 1.0
    separator: str | None = None
    hash: int | None = None
    min_count: int | None = None
    max_values: int | None = None
    bins: int | str | None = None
    transform: str = "log"
    width: int = 1
    hexadecimal: bool = False
    dim: int = 1
    why: str = "given"

    def __post_init__(self) -> None:
        def require(condition: bool, option: str, expected: str) -> None:
            if not condition:
                value = getattr(self, option)
                raise FieldError(f"field {self.name!r}: {option} must be {expected}, found {value!r}")

        require(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")
        require(self.group in GROUPS, "group", f"one of {', '.join(GROUPS)}{did_you_mean(self.group, GROUPS)}")
        require(self.transform in TRANSFORMS, "transform", f"one of {', '.join(TRANSFORMS)}")
        require(is_number(self.cost) and 0 <= self.cost < float("inf"), "cost", "a number >= 0")
        valid_separator = self.separator is None or (isinstance(self.separator, str) and self.separator != "")
        require(valid_separator, "separator", "the text between two values")
        require(isinstance(self.hexadecimal, bool), "hexadecimal", "true or false")
        limits = {"hash": (1, 2**31 - 3), "min_count": (1, 2**62), "max_values": (1, 2**31 - 3)}
        if self.bins not in BINNING:
            limits |= {"bins": (2, 65_000)}
        limits |= {"width": (1, 1 << 20), "dim": (1, 1 << 20)}
        for option, (low, high) in limits.items():
            value = getattr(self, option)
            hint = "; a smaller limit keeps no value at all" if option == "max_values" else ""
            in_range = value is None or (type(value) is int and low <= value <= high)
            require(in_range, option, f"an integer from {low} to {high}{hint}")
        require(not self.binned or self.width == 1, "bins", "left out when a column holds several numbers")

    @property
    def binned(self) -> bool:
        """Whether numbers become ids of quantile bins."""
        return self.bins is not None and self.bins != "off"


OPTIONS = tuple(option.name for option in fields(FieldPlan) if option.name not in ("name", "why"))


def apply_corrections(plans: Iterable[FieldPlan], corrections: Mapping[str, Mapping[str, Any]]) -> list[FieldPlan]:
    """Return the plans with inferred options replaced by the user's."""
    result = []
    for plan in plans:
        options = dict(corrections.get(plan.name, {}))
        if "separator" in options and "kind" not in options and plan.kind == "categorical":
            options["kind"] = "multi"
        if "bins" in options and "kind" not in options and plan.kind == "categorical":
            options["kind"] = "numeric"
        result.append(replace(plan, **options, why="given" if "kind" in options else plan.why))
    return result


def check_columns(required: Iterable[str], names: Iterable[str], origin: str) -> None:
    """Raise FieldError if a required column is not among ``names``; ``origin`` says which option requires it."""
    names = list(names)
    for name in required:
        if name not in names:
            listed = ", ".join(map(repr, names[:LISTED_NAMES])) + (" …" if len(names) > LISTED_NAMES else "")
            looks_like_data = any(column.replace(".", "", 1).isdecimal() for column in names)
            hint = "; is its first line a header? if not: --no-header, or header=False" if looks_like_data else ""
            raise FieldError(f"{origin}: no column {name!r}{did_you_mean(name, names)}; the source has {listed}{hint}")


def read_fields(fields: Any) -> dict[str, dict[str, Any]]:
    """Return {column: {option: value}} from a dict or a TOML file; ``age = "numeric"`` is short for its kind.

    >>> read_fields({"age": "numeric", "ad": {"group": "item"}})
    {'age': {'kind': 'numeric'}, 'ad': {'group': 'item'}}
    """
    origin = "fields"
    if fields is None:
        return {}
    if isinstance(fields, (str, os.PathLike)):
        origin = os.fspath(fields)
        fields = load_toml(Path(fields))
    if not isinstance(fields, Mapping):
        raise InputError(f"fields must be a dict or the path of a TOML file, found {type(fields).__name__}")
    result: dict[str, dict[str, Any]] = {}
    for name, options in fields.items():
        if isinstance(options, str):
            options = {"kind": options}
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise FieldError(
                f"{origin}: {name!r} must be a table of options or a kind, found {options!r:.80}; "
                'write for example: [age] kind = "numeric"'
            )
        for option in options:
            if option not in OPTIONS and isinstance(options[option], Mapping):
                raise FieldError(
                    f"{origin}: column {name!r}: {option!r} is a table; a column name with a dot needs quotes, "
                    f'as ["{name}.{option}"]'
                )
            if option not in OPTIONS:
                raise FieldError(
                    f"{origin}: column {name!r}: unknown option {option!r}"
                    f"{did_you_mean(str(option), OPTIONS)}; there are {', '.join(OPTIONS)}"
                )
        try:
            FieldPlan(name, **{str(option): value for option, value in options.items()})
        except FieldError as error:
            raise FieldError(f"{origin}: {error}") from None
        result[name] = dict(options)
    return result


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise DataError if it cannot be read or is not valid."""
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
    """Return plans as TOML, for the user to correct."""
    default = FieldPlan("default")
    parts = ["# Inferred fields. Correct them and pass this file with --fields.\n"]
    for plan in plans:
        lines = [f"[{_toml_string(plan.name)}]  # {plan.why}".replace("\n", " "), f'kind = "{plan.kind}"']
        for option in OPTIONS[1:]:
            value = getattr(plan, option)
            if value != getattr(default, option):
                text = _toml_string(value) if isinstance(value, str) else str(value).lower()
                lines.append(f"{option} = {text}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _toml_string(text: str) -> str:
    """Return text as a TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    escaped = (escapes.get(c, f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
    return f'"{"".join(escaped)}"'
