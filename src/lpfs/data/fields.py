"""FieldPlan: what happens to one column, and how the user corrects it.

The user's corrections, from a dict or from fields.toml, and what was found written as one.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lpfs.errors import DataError, FieldError, InputError, MissingPackageError
from lpfs.schema import GROUPS

KINDS = ("categorical", "numeric", "multi", "ignore")
BINNING = ("auto", "off")  # words that may stand for a number of bins
TRANSFORMS = ("log", "none")


@dataclass(frozen=True)
class FieldPlan:
    """What happens to one column.

    Args:
        name: the column.
        kind: ``categorical``, ``numeric``, ``multi`` or ``ignore``.
        group: ``user``, ``item``, ``combine`` or ``context``.
        cost: what serving the field costs, in any unit.
        separator: cuts the text of a multi-valued (or of a wide numeric) column into values.
        hash: hash values modulo this range instead of keeping a vocabulary.
        min_count: values seen less often in the training period share the id of unseen ones.
        max_values: keep only this many of the most frequent values.
        bins: cut numbers into this many quantile bins, which become ids; ``auto``: by the number of training rows;
            ``off``: leave them numbers, whatever holds for all fields.
        transform: of numbers: ``log`` (log1p, signed) and standardise, or ``none``: only standardise.
        width: how many numbers a numeric column holds (list columns, or with ``separator``).
        hexadecimal: values are hexadecimal numbers of at most eight digits.
        dim: embedding width written to the schema.
        why: how the kind was found.

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
        def refuse(option: str, wanted: str) -> None:
            raise FieldError(f"field {self.name!r}: {option} must be {wanted}, found {getattr(self, option)!r}")

        if self.kind not in KINDS:
            refuse("kind", f"one of {', '.join(KINDS)}{suggestion(self.kind, KINDS)}")
        if self.group not in GROUPS:
            refuse("group", f"one of {', '.join(GROUPS)}{suggestion(self.group, GROUPS)}")
        if self.transform not in TRANSFORMS:
            refuse("transform", f"one of {', '.join(TRANSFORMS)}")
        if not is_number(self.cost) or not 0 <= self.cost < float("inf"):
            refuse("cost", "a number >= 0")
        if self.separator is not None and (not isinstance(self.separator, str) or not self.separator):
            refuse("separator", "text that stands between two values")
        if not isinstance(self.hexadecimal, bool):
            refuse("hexadecimal", "true or false")
        limits = {"hash": (1, 2**31 - 3), "min_count": (1, 2**62), "max_values": (1, 2**31 - 3)}
        if self.bins not in BINNING:
            limits |= {"bins": (2, 65_000)}
        limits |= {"width": (1, 1 << 20), "dim": (1, 1 << 20)}
        for option, (low, high) in limits.items():
            value = getattr(self, option)
            if value is not None and (type(value) is not int or not low <= value <= high):
                hint = "; a smaller cap keeps no value at all" if option == "max_values" else ""
                refuse(option, f"a whole number from {low} to {high}{hint}")
        if self.binned and self.width > 1:
            refuse("bins", "left out when a column holds several numbers")

    @property
    def binned(self) -> bool:
        """Whether numbers become ids of bins."""
        return self.bins is not None and self.bins != "off"


OPTIONS = tuple(each.name for each in fields(FieldPlan) if each.name not in ("name", "why"))


def apply_corrections(plans: Iterable[FieldPlan], given: Mapping[str, Mapping[str, Any]]) -> list[FieldPlan]:
    """Return the plans with the user's options in place of what was found."""
    result = []
    for plan in plans:
        options = dict(given.get(plan.name, {}))
        if "separator" in options and "kind" not in options and plan.kind == "categorical":
            options["kind"] = "multi"
        if "bins" in options and "kind" not in options and plan.kind == "categorical":
            options["kind"] = "numeric"
        result.append(replace(plan, **options, why="given" if "kind" in options else plan.why))
    return result


def check_columns(wanted: Iterable[str], names: Iterable[str], where: str) -> None:
    """Refuse a column that is not there, with the nearest name that is."""
    names = list(names)
    for name in wanted:
        if name not in names:
            listed = ", ".join(map(repr, names[:8])) + (" …" if len(names) > 8 else "")
            data = any(each.replace(".", "", 1).isdecimal() for each in names)
            hint = "; is its first line a header? if not: --no-header, or header=False" if data else ""
            raise FieldError(
                f"{where}: no column {name!r}{suggestion(name, names)}; the source has {listed}{hint}"
            )


def suggestion(name: Any, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" when something is near."""
    lowered = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lowered, 1) if isinstance(name, str) else []
    return f" (did you mean {lowered[near[0]]!r}?)" if near else ""


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    return (
        '"'
        + "".join(escapes.get(c, f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
        + '"'
    )
