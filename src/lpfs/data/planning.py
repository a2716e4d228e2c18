"""The options of prepare, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lpfs.data.fields import FieldPlan, is_number
from lpfs.errors import InputError


@dataclass(frozen=True)
class Options:
    """How a log becomes a Dataset.

    Args:
        label: column of the clicks, 0 or 1.
        tasks: columns of further labels.
        time: column that orders the rows; None: the row order counts.
        time_format: how it is written: strptime ('%y%m%d%H'), or 'unix s', 'unix ms', 'number', 'name',
            'iso'; found from the first rows when None.
        parts: into how many parts the row order is cut when there is no time; 'files': one a file.
        shuffle: deal the rows to those parts at random, by ``seed``, for a table sorted by anything.
        split: column that names the role of each row, train, valid or test. The days are those of the
            training rows, then ``valid`` and ``test``.
        ordered: rows are promised to be in time order; a step back is an error.
        train: how many of the first days vocabularies and scales come from; None: all but the last, or with
            ``split`` all days of training rows.
        negatives: share of the negatives to keep, of every day or {day: share}.
        seed: of that choice, and of ``shuffle``.
        min_count: values seen less often in the training period share the id of unseen ones.
        max_values: keep only this many of the most frequent values of a field.
        hash: hash all categorical values modulo this range instead of keeping vocabularies.
        bins: cut all numeric columns into this many quantile bins; ``auto``: by the number of training rows.
        separator: of a text table; None: found from its first line.
        header: whether text tables name their columns; or the names, where they do not.
        missing: further texts that mean a missing value.
        positive: label value that counts as 1, where the label is not 0 and 1.
        keep_all: keep constant and duplicate columns.

    """

    label: str
    tasks: tuple[str, ...] = ()
    time: str | None = None
    time_format: str | None = None
    parts: int | str = 10
    shuffle: bool = False
    split: str | None = None
    ordered: bool = False
    train: int | None = None
    negatives: float | Mapping[str, float] = 1.0
    seed: int = 0
    min_count: int = 1
    max_values: int | None = None
    hash: int | None = None
    bins: int | str | None = None
    separator: str | None = None
    header: bool | Sequence[str] = True
    missing: tuple[str, ...] = ()
    positive: str | None = None
    keep_all: bool = False

    def __post_init__(self) -> None:
        def refuse(option: str, wanted: str) -> None:
            raise InputError(f"{option} must be {wanted}, found {getattr(self, option)!r}")

        for option in ("tasks", "missing"):
            value = getattr(self, option)
            object.__setattr__(self, option, (value,) if isinstance(value, str) else tuple(value))
        if not isinstance(self.label, str) or not self.label:
            refuse("label", "the name of a column")
        if len({self.label, *self.tasks}) != 1 + len(self.tasks):
            refuse("tasks", f"different columns, none of them the label {self.label!r}")
        if self.parts != "files" and (type(self.parts) is not int or not 1 <= self.parts <= 4000):
            refuse("parts", "a whole number from 1 to 4000, or 'files'")
        if type(self.shuffle) is not bool:
            refuse("shuffle", "true or false")
        if self.shuffle and self.time is not None:
            refuse(
                "shuffle",
                f"left out: column {self.time!r} orders the rows, dealing them would mix past and future",
            )
        if self.shuffle and self.parts == "files":
            refuse("shuffle", "left out when a day is a file (parts 'files')")
        if self.split is not None:
            if self.split in (self.label, *self.tasks, self.time):
                refuse("split", "a column of its own, not the label, a task or the time")
            if self.parts == "files":
                refuse("split", "left out when a day is a file (parts 'files')")
        if self.train is not None and (type(self.train) is not int or self.train < 1):
            refuse("train", "the number of training days, at least 1")
        if type(self.seed) is not int:
            refuse("seed", "a whole number")
        rates = self.negatives.values() if isinstance(self.negatives, Mapping) else [self.negatives]
        if not all(is_number(rate) and 0 < rate <= 1 for rate in rates):
            refuse("negatives", "a share above 0 and at most 1")
        if self.ordered and self.time is None:
            refuse("ordered", "used together with a time column")
        known = ("iso", "number", "name", "unix s", "unix ms", "unix us", "unix ns")
        if self.time_format is not None and "%" not in self.time_format and self.time_format not in known:
            refuse("time_format", f"a strptime format with %, or one of {', '.join(known)}")
        FieldPlan(
            "every field",
            min_count=self.min_count,
            max_values=self.max_values,
            hash=self.hash,
            bins=self.bins,
        )

    def complete(self, plan: FieldPlan) -> FieldPlan:
        """Fill what a plan leaves open with what holds for all fields."""
        if plan.kind == "numeric":
            return replace(plan, bins=plan.bins or self.bins) if plan.width == 1 else plan
        if plan.kind == "ignore":
            return plan
        return replace(
            plan,
            min_count=plan.min_count or self.min_count,
            max_values=plan.max_values or self.max_values,
            hash=plan.hash or self.hash,
        )

    def rate(self, day: str) -> float:
        """Return the share of the negatives to keep on a day."""
        if isinstance(self.negatives, Mapping):
            return float(self.negatives.get(day, 1.0))
        return float(self.negatives)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self)
        values["header"] = self.header if isinstance(self.header, bool) else list(self.header)
        return values
