"""FieldPlan: what happens to one column, and how the user corrects it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lpfs.errors import FieldError
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


def correct(plans: Iterable[FieldPlan], given: Mapping[str, Mapping[str, Any]]) -> list[FieldPlan]:
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
