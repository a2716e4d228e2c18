"""FieldPlan: what prepare does with one column; and the user's corrections, from a dict or from fields.toml."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lpfs._fileio import check_regular_file
from lpfs._validation import check_name, did_you_mean, is_number
from lpfs.errors import DataError, FieldError, InputError
from lpfs.schema import GROUPS

KINDS = ("categorical", "numeric", "multi", "ignore")
DECIMALS = (".", ",")
INTEGERS = "integers"  # start of the reason for an amount of integers, which the label may overrule
BINNING = ("auto", "off")  # allowed instead of a number of bins
TRANSFORMS = ("log", "none")
CHOICES = {"kind": KINDS, "group": GROUPS, "transform": TRANSFORMS}
LISTED_NAMES = 8  # columns listed in an error message
LIMITS = {"hash": (1, 2**31 - 3), "min_count": (1, 2**62), "max_values": (1, 2**31 - 3), "bins": (2, 65_000)}
LIMITS |= {"width": (1, 1 << 20), "dim": (1, 1 << 20)}


@dataclass(frozen=True)
class FieldPlan:
    """What prepare does with one column."""

    name: str  # the column
    kind: str = "categorical"  # or numeric, multi, ignore
    group: str = "context"  # or user, item, combine
    cost: float = 1.0  # cost of serving the field, in any unit
    separator: str | None = None  # splits the text of a multi-valued (or of a wide numeric) column into values
    hash: int | None = None  # hash values modulo this range instead of keeping a vocabulary
    min_count: int | None = None  # rarer values share the id of unseen values; None: see ``automatic_min_count``
    max_values: int | None = None  # keep only this many of the most frequent values
    bins: int | str | None = None  # quantile bins, whose indices become ids; auto: by the number of training rows; off
    transform: str = "log"  # of numbers: log (signed log1p, then standardize), or none (standardize only)
    decimal: str | None = None  # decimal mark of numbers in text; None: a point
    width: int = 1  # how many numbers a numeric column holds (list columns, or with separator)
    hexadecimal: bool = False  # values are hexadecimal numbers of at most eight digits
    dim: int = 1  # embedding width written to the schema
    why: str = "given"  # reason for the kind

    def __post_init__(self) -> None:
        def require(condition: bool, option: str, expected: str, names: tuple[str, ...] = ()) -> None:
            if not condition:  # the text is made here only: wide tables have many fields
                value = getattr(self, option)
                if names:
                    expected = f"one of {', '.join(names)}{did_you_mean(value, names)}"
                raise FieldError(f"field {self.name!r}: {option} must be {expected}, found {value!r}")

        for option, names in CHOICES.items():
            require(getattr(self, option) in names, option, "", names)
        require(self.decimal in (None, *DECIMALS), "decimal", "'.' or ','")
        require(is_number(self.cost) and 0 <= self.cost < float("inf"), "cost", "a number >= 0")
        valid_separator = self.separator is None or (isinstance(self.separator, str) and self.separator != "")
        require(valid_separator, "separator", "the text between two values")
        require(isinstance(self.why, str), "why", "text")
        require(isinstance(self.hexadecimal, bool), "hexadecimal", "true or false")
        for option, (low, high) in LIMITS.items():
            value = getattr(self, option)
            if value is None or (type(value) is int and low <= value <= high):
                continue
            hint = "; a smaller limit keeps no value at all" if option == "max_values" else ""
            require(option == "bins" and value in BINNING, option, f"an integer from {low} to {high}{hint}")
        require(not self.binned or self.width == 1, "bins", "left out when a column holds several numbers")

    @property
    def binned(self) -> bool:
        """Whether numbers become ids of quantile bins."""
        return self.bins is not None and self.bins != "off"

    @property
    def decided_by_label(self) -> bool:
        """Whether ``decide_integers`` chooses the kind: an amount was inferred from integers with many values."""
        return self.kind == "numeric" and self.why.startswith(INTEGERS)


OPTIONS = tuple(option.name for option in fields(FieldPlan) if option.name not in ("name", "why"))


def apply_corrections(plans: Iterable[FieldPlan], corrections: Mapping[str, Mapping[str, Any]]) -> list[FieldPlan]:
    """Return the plans with inferred options replaced by the user's."""
    result = []
    for plan in plans:
        options = dict(corrections.get(plan.name, {}))
        if not options:
            result.append(plan)
            continue
        for option, kind in (("separator", "multi"), ("bins", "numeric")):
            if option in options and plan.kind == "categorical":
                options.setdefault("kind", kind)
        result.append(replace(plan, **options, why="given" if {"kind", "bins"} & set(options) else plan.why))
    return result


def check_columns(required: Iterable[str], names: Iterable[str], origin: str) -> None:
    """Raise FieldError if a required column is not among ``names``; ``origin`` says which option requires it."""
    names = list(names)
    for name in required:
        if name not in names:
            listed = ", ".join(map(repr, names[:LISTED_NAMES])) + (" …" if len(names) > LISTED_NAMES else "")
            looks_like_data = any(column.replace(".", "", 1).isdecimal() for column in names)
            hint = "; is its first line a header? if not: --no-header, or header=False" if looks_like_data else ""
            if any(column.strip() == name for column in names):
                hint = "; its name has blanks around it: --strip, or strip=True"
            raise FieldError(f"{origin}: no column {name!r}{did_you_mean(name, names)}; the source has {listed}{hint}")


def read_fields(fields: Any) -> dict[str, dict[str, Any]]:
    """Return {column: {option: value}} from a dict or a TOML file; ``age = "numeric"`` is short for its kind.

    >>> read_fields({"age": "numeric", "ad": {"group": "item"}})
    {'age': {'kind': 'numeric'}, 'ad': {'group': 'item'}}
    """
    origin = "fields"
    if isinstance(fields, (str, os.PathLike)):
        origin, fields = os.fspath(fields), load_toml(Path(fields))
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise InputError(f"fields must be a dict or the path of a TOML file, found {type(fields).__name__}")
    result: dict[str, dict[str, Any]] = {}
    for name, options in fields.items():
        if isinstance(options, str):
            options = {"kind": options}
        if not isinstance(name, str) or not isinstance(options, Mapping):
            example = 'write for example: [age] kind = "numeric"'
            raise FieldError(
                f"{origin}: {name!r} must be a table of options or a kind, found {options!r:.80}; {example}"
            )
        for option in options:
            if option not in OPTIONS and isinstance(options[option], Mapping):
                raise FieldError(
                    f"{origin}: column {name!r}: {option!r} is a table; a column name with a dot needs quotes, "
                    f'as ["{name}.{option}"]'
                )
            check_name(option, OPTIONS, "option", context=f"{origin}: column {name!r}", error=FieldError)
        try:
            FieldPlan(name, **{str(option): value for option, value in options.items()})
        except FieldError as error:
            raise FieldError(f"{origin}: {error}") from None
        result[name] = dict(options)
    return result


def read_kinds(texts: Iterable[str]) -> dict[str, str]:
    """Return {column: kind} from texts of the form column=kind.

    >>> read_kinds(["age=numeric", "a=b=ignore"])
    {'age': 'numeric', 'a=b': 'ignore'}
    """
    kinds = {}
    for text in (texts,) if isinstance(texts, str) else texts:
        name, sign, kind = text.rpartition("=")
        if not sign or not name or kind not in KINDS:
            raise InputError(
                f"kind must be of the form COLUMN=KIND, with one of {', '.join(KINDS)}; found {text!r:.80}"
                f"{did_you_mean(kind, KINDS)}"
            )
        kinds[name] = kind
    return kinds


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise DataError if it cannot be read or is not valid."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        check_regular_file(path)
        return dict(toml.loads(path.read_bytes().decode("utf-8")))
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
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    escaped = (escapes.get(c, f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
    return f'"{"".join(escaped)}"'
