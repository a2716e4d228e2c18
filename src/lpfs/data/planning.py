"""The options of prepare, checked once.

Public click logs whose layout is known.

Planning: what will happen to each column, from the first rows and what the user says.

The table of fields: what will happen to each column, for people and for programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lpfs.data.fields import FieldPlan, apply_corrections, check_columns, is_number, read_fields, suggestion
from lpfs.data.infer import SAMPLE, TIME, infer
from lpfs.data.sources import open_source
from lpfs.data.sources.base import Source
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    pass


INTEGERS = tuple(f"I{index}" for index in range(1, 14))
CATEGORIES = tuple(f"C{index}" for index in range(1, 27))
CRITEO: dict[str, Any] = {
    "label": "label",
    "separator": "\t",
    "header": ("label", *INTEGERS, *CATEGORIES),
    "min_count": 10,
    "fields": {
        **{name: {"kind": "numeric"} for name in INTEGERS},
        **{name: {"kind": "categorical", "hexadecimal": True} for name in CATEGORIES},
    },
}
AVAZU_IDS = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{index}" for index in range(14, 22)),
)

PRESETS: dict[str, dict[str, Any]] = {
    # day_0 … day_23, one file a day
    "criteo-terabyte": {**CRITEO, "parts": "files"},
    # train.txt, seven days in order, without a time
    "criteo-kaggle": {**CRITEO, "parts": 7},
    # train.csv, ten days, hour is YYMMDDHH
    "avazu": {
        "label": "click",
        "time": "hour",
        "time_format": "%y%m%d%H",
        "min_count": 2,
        "fields": {
            "id": {"kind": "ignore"},
            **{name: {"kind": "categorical"} for name in AVAZU_IDS},
        },
    },
}


def preset_options(name: str) -> dict[str, Any]:
    """Return the options of a preset."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}{suggestion(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return dict(PRESETS[name])


@dataclass(frozen=True)
class PrepareOptions:
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

    def apply_defaults(self, plan: FieldPlan) -> FieldPlan:
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

    def negative_rate(self, day: str) -> float:
        """Return the share of the negatives to keep on a day."""
        if isinstance(self.negatives, Mapping):
            return float(self.negatives.get(day, 1.0))
        return float(self.negatives)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self)
        values["header"] = self.header if isinstance(self.header, bool) else list(self.header)
        return values


NO_LABEL = "say which column is the label: label='click', or --label click"
MOST_NAMES = 12  # columns that a message names


@dataclass(frozen=True)
class PreparePlan:
    """A source, the options, what will happen to each column, and whether the label and the tasks are there."""

    source: Source
    options: PrepareOptions
    plans: tuple[FieldPlan, ...]
    labelled: bool = True

    @property
    def title(self) -> str:
        """Heading of the table of fields."""
        return "Fields (correct them with --fields, or fields=…)"


def plan_log(
    source: Any,
    *,
    label: str | None = None,
    time: str | None = None,
    fields: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    preset: str | None = None,
    **options: Any,
) -> PreparePlan:
    """Look at the first rows and say what ``prepare`` would do; writes nothing."""
    given = {name: value for name, value in {"label": label, "time": time, **options}.items() if value is not None}
    known = preset_options(preset) if preset is not None else {}
    layout = known.pop("fields", {})
    corrections = read_fields(fields)
    if "label" not in {**known, **given}:
        settings = build_options({**known, **given, "label": "a label"})  # other mistakes come first
        raise InputError(f"{NO_LABEL}; {_describe_columns(source, settings)}")
    settings = build_options({**known, **given})
    opened = open_source(source, separator=settings.separator, header=settings.header)
    targets = (settings.label, *settings.tasks)
    absent = [name for name in layout if name not in opened.names]
    if absent:
        raise DataError(f"{opened.files[0]}: not the layout of {preset}: column {absent[0]!r} is missing")
    check_columns(targets, opened.names, "label")
    if settings.time is not None:
        check_columns([settings.time], opened.names, "time")
    if settings.split is not None:
        check_columns([settings.split], opened.names, "split")
        if corrections.get(settings.split, {"kind": "ignore"}) != {"kind": "ignore"}:
            raise InputError(f"fields: {settings.split!r} is the split column, and cannot be a field too")
    check_columns(corrections, opened.names, "fields" if isinstance(fields, Mapping) else str(fields))
    for name in corrections:
        if name in targets:
            raise InputError(f"fields: {name!r} is the label or a task, and cannot be a field too")

    from lpfs.data.parsing import replace_missing_marks

    sample = replace_missing_marks(opened.sample(SAMPLE), settings.missing)
    found = [
        FieldPlan(name, **layout[name], why="preset") if name in layout else infer(sample[name])
        for name in opened.names
        if name not in targets
    ]
    if settings.time is None and "parts" not in {**known, **given}:
        times = [
            each.name
            for each in found
            if each.why == TIME and each.name not in corrections and each.name != settings.split
        ]
        if len(times) == 1:
            settings = _use_time_column(times[0], settings)
    plans = []
    for each in apply_corrections(found, corrections):
        if each.name == settings.time and not corrections.get(each.name):
            each = FieldPlan(each.name, "ignore", why="orders the rows")
        if each.name == settings.split:
            each = FieldPlan(each.name, "ignore", why="splits the rows")
        plans.append(settings.apply_defaults(each))
    if all(each.kind == "ignore" for each in plans):
        raise DataError(f"{opened.files[0]}: no field is left besides the label; set the kinds with fields")
    return PreparePlan(opened, settings, tuple(plans))


def _use_time_column(time: str, settings: PrepareOptions) -> PrepareOptions:
    """Take a column of times that was found; refuse to deal the rows at random past it."""
    if settings.shuffle:
        raise InputError(
            f"shuffle: column {time!r} holds times, dealing the rows at random would mix past and future; "
            "leave shuffle out to order the rows by it, or give parts to leave the time out"
        )
    return replace(settings, time=time)


def _describe_columns(source: Any, settings: PrepareOptions) -> str:
    """Say which columns a log has; one that is not there is an error."""
    names = open_source(source, separator=settings.separator, header=settings.header).names
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"the columns are {', '.join(names[:MOST_NAMES])}{more}"


def build_options(given: dict[str, Any]) -> PrepareOptions:
    """Build the options; an unknown one is an error with the nearest name."""
    names = list(PrepareOptions.__dataclass_fields__)
    for name in given:
        if name not in names:
            raise InputError(f"unknown option {name!r}{suggestion(name, names)}; there are {', '.join(names)}")
    if "label" not in given:
        raise InputError(NO_LABEL)
    try:
        return PrepareOptions(**given)
    except TypeError as error:
        raise InputError(f"an option is of the wrong type: {error}") from error


TABLE = ("column", "kind", "group", "options", "why")
NUMBER = re.compile(r"\d[\d,]*")
RUN = 6  # neighbours of one name and kind that become one line
Row = tuple[str, ...]


def field_table(job: PreparePlan) -> list[Row]:
    """Return the rows of the table of fields."""
    why = "given" if job.labelled else "not in the source: 0 in every row"
    rows: list[Row] = [(job.options.label, "label", "", "", why)]
    rows += [(name, "task", "", "", why) for name in job.options.tasks]
    default = FieldPlan("default")
    shown = ("separator", "hash", "min_count", "max_values", "bins", "width", "hexadecimal", "cost")
    for each in job.plans:
        roles = {job.options.time: "time", job.options.split: "split"}
        kind = roles.get(each.name, each.kind) if each.kind == "ignore" else each.kind
        options = [
            f"{name}={getattr(each, name)}"
            for name in shown
            if getattr(each, name) != getattr(default, name)
            and not (name == "min_count" and (each.hash or each.min_count == 1))
        ]
        group = "" if each.kind == "ignore" else each.group
        rows.append((each.name, kind, group, " ".join(options), each.why))
    return rows


def field_table_compact(job: PreparePlan) -> tuple[Sequence[str], list[Row]]:
    """Return header and rows for a person: like columns in one line, no column that says nothing.

    ``v1`` … ``v85`` of one kind are one line; a group or options are shown where anyone has them.
    """
    rows = [line for _, run in groupby(field_table(job), key=_group_key) for line in _merge_rows(list(run))]
    says = [
        at
        for at, name in enumerate(TABLE)
        if name not in ("group", "options") or {row[at] for row in rows} - {"", FieldPlan("default").group}
    ]
    return [TABLE[at] for at in says], [tuple(row[at] for at in says) for row in rows]


def _group_key(row: Row) -> Row:
    """Return what columns of one line have in common: all but the numbers in the name and in the reason."""
    name, *rest, why = row
    return (NUMBER.sub("#", name), *rest, NUMBER.sub("#", why).replace("value ", "values "))


def _merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one line for many like columns.

    >>> folded([(f"v{at}", "numeric", "", "", f"numbers, {at} values") for at in range(1, 9)])
    [('v1 … v8 (8 columns)', 'numeric', '', '', 'numbers, 1 to 8 values')]
    """
    if len(rows) < RUN:
        return list(rows)
    first, last = rows[0], rows[-1]
    found = zip(*(NUMBER.findall(row[-1]) for row in rows), strict=True)
    spans = iter([_number_range(column) for column in found])
    why = NUMBER.sub(lambda _: next(spans), last[-1])
    return [(f"{first[0]} … {last[0]} ({len(rows)} columns)", *first[1:-1], why)]


def _number_range(numbers: Iterable[str]) -> str:
    """Return the least and the largest of written numbers."""
    ordered = sorted(set(numbers), key=lambda number: int(number.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
