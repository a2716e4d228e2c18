"""Planning of prepare: options, presets of public logs, the plan of a source, and the table of its fields."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lpfs._validation import check_name, is_number
from lpfs.data.fields import FieldPlan, apply_corrections, check_columns, read_fields, read_kinds
from lpfs.data.sources import open_source
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    import polars as pl

    from lpfs.data.sources.base import Source

MAX_NAMES = 12  # columns listed in an error message
MAX_PARTS = 4000  # parts of a log without a time column
TIME_FORMATS = ("iso", "number", "name", "unix s", "unix ms", "unix us", "unix ns")  # besides strptime formats
TIME_CODE = re.compile(r"%(?:[-_0]?[YCymbBhdeaAwuUWGgVjDxFvHkIlPpMSfRTXrZzsnt+%]|\.?[369]?f|:{1,3}z|#z)")  # of chrono

TABLE = ("column", "kind", "group", "options", "why")  # header of the table of fields
TABLE_OPTIONS = ("separator", "hash", "min_count", "max_values", "bins", "decimal", "width", "hexadecimal", "cost")
NUMBER = re.compile(r"\d[\d,]*")
MIN_MERGED = 6  # adjacent columns of one name pattern and kind that are shown as one line
Row = tuple[str, ...]

# Layouts of public click logs
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
    # day_0 … day_23, one file per day
    "criteo-terabyte": {**CRITEO, "parts": "files"},
    # train.txt, seven days in order, without a time column
    "criteo-kaggle": {**CRITEO, "parts": 7},
    # train.csv, ten days, hour is YYMMDDHH
    "avazu": {
        "label": "click",
        "time": "hour",
        "time_format": "%y%m%d%H",
        "min_count": 2,
        "fields": {"id": {"kind": "ignore"}, **{name: {"kind": "categorical"} for name in AVAZU_IDS}},
    },
}


@dataclass(frozen=True)
class PrepareOptions:
    """How a log becomes a Dataset."""

    label: str  # label column, 0 or 1
    tasks: tuple[str, ...] = ()  # columns of further labels
    time: str | None = None  # column that orders the rows; None: row order
    time_format: str | None = None  # strptime format ('%y%m%d%H') or one of TIME_FORMATS; None: detected
    parts: int | str = 10  # parts into which the row order is split without a time column; 'files': one per file
    shuffle: bool = False  # assign rows to these parts at random; for a table sorted by something else than time
    split: str | None = None  # column with the role of each row (train, valid, test); days are those of training rows
    ordered: bool = False  # rows must be in time order; a step back in time is an error
    train: int | None = None  # first days on which encoders are fitted; None: all but the last, or all of the split
    negatives: float | Mapping[str, float] = 1.0  # share of the negatives to keep, on every day or {day: share}
    seed: int = 0  # seed of the sampling of negatives and of shuffle
    min_count: int | None = None  # rarer values share the id of unseen values; None: see ``automatic_min_count``
    max_values: int | None = None  # keep only this many of the most frequent values of a field
    hash: int | None = None  # hash all categorical values modulo this range instead of keeping vocabularies
    bins: int | str | None = None  # quantile bins of all numeric columns; auto: by the number of training rows
    decimal: str | None = None  # decimal mark of numbers in text, a point or a comma; None: detected by column
    separator: str | None = None  # separator of a text table; None: detected from its first line
    strip: bool = False  # remove blanks around the names and values of a text table
    header: bool | Sequence[str] = True  # whether text tables have a header; or the names, where they have none
    missing: tuple[str, ...] = ()  # further texts that mean a missing value
    positive: str | None = None  # label value that counts as 1, where the label is not 0 and 1
    keep_all: bool = False  # keep constant and duplicate columns

    def __post_init__(self) -> None:
        def require(condition: bool, option: str, expected: str) -> None:
            if not condition:
                raise InputError(f"{option} must be {expected}, found {getattr(self, option)!r}")

        for option in ("tasks", "missing"):
            value = getattr(self, option)
            object.__setattr__(self, option, (value,) if isinstance(value, str) else tuple(value))
        label, tasks, by_file = self.label, self.tasks, self.parts == "files"
        require(isinstance(label, str) and bool(label), "label", "the name of a column")
        require(len({label, *tasks}) == 1 + len(tasks), "tasks", f"different columns, none of them the label {label!r}")
        valid_parts = by_file or (type(self.parts) is int and 1 <= self.parts <= MAX_PARTS)
        require(valid_parts, "parts", f"an integer from 1 to {MAX_PARTS}, or 'files'")
        for option in ("shuffle", "strip", "ordered", "keep_all"):
            require(type(getattr(self, option)) is bool, option, "true or false")
        one_character = self.separator is None or (len(self.separator.encode()) == 1 and self.separator not in '"\n\r')
        require(one_character, "separator", "one ASCII character, not a quote or a line end")
        mixed = f"left out: column {self.time!r} orders the rows, a random split would mix past and future"
        require(not self.shuffle or self.time is None, "shuffle", mixed)
        require(not self.shuffle or not by_file, "shuffle", "left out when a day is a file (parts 'files')")
        if self.split is not None:
            separate = self.split not in (label, *tasks, self.time)
            require(separate, "split", "a separate column, not the label, a task or the time")
            require(not by_file, "split", "left out when a day is a file (parts 'files')")
        valid_train = self.train is None or (type(self.train) is int and self.train >= 1)
        require(valid_train, "train", "the number of training days, at least 1")
        require(type(self.seed) is int, "seed", "an integer")
        rates = self.negatives.values() if isinstance(self.negatives, Mapping) else [self.negatives]
        valid_rates = all(is_number(rate) and 0 < rate <= 1 for rate in rates)
        require(valid_rates, "negatives", "a share above 0 and at most 1")
        require(not self.ordered or self.time is not None, "ordered", "used together with a time column")
        valid_format = self.time_format in (None, *TIME_FORMATS) or "%" in (self.time_format or "")
        require(valid_format, "time_format", f"a strptime format with %, or one of {', '.join(TIME_FORMATS)}")
        unknown = TIME_CODE.sub("", self.time_format or "")
        require("%" not in unknown, "time_format", "a strptime format with known codes, for example %d/%m/%Y %H:%M")
        FieldPlan(  # checks the options that hold for every field
            "every field",
            min_count=self.min_count,
            max_values=self.max_values,
            hash=self.hash,
            bins=self.bins,
            decimal=self.decimal,
        )

    def apply_defaults(self, plan: FieldPlan) -> FieldPlan:
        """Return a field's plan with unset options replaced by those for all fields."""
        if plan.kind == "numeric":
            plan = replace(plan, decimal=self.decimal) if self.decimal and not plan.decimal else plan
            return replace(plan, bins=plan.bins or self.bins) if plan.width == 1 and self.bins else plan
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
        return float(self.negatives.get(day, 1.0) if isinstance(self.negatives, Mapping) else self.negatives)

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return asdict(self) | {"header": self.header if isinstance(self.header, bool) else list(self.header)}


@dataclass(frozen=True)
class PreparePlan:
    """How a source is prepared."""

    source: Source
    options: PrepareOptions
    plans: tuple[FieldPlan, ...]  # one per column, label and tasks excluded
    labelled: bool = True  # whether the source has the label and the tasks

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
    kind: Sequence[str] = (),
    **options: Any,
) -> PreparePlan:
    """Plan from the first rows what ``prepare`` does with each column; writes nothing."""
    if preset is not None:
        check_name(preset, PRESETS, "preset")
    defaults = dict(PRESETS[preset]) if preset is not None else {}
    layout = defaults.pop("fields", {})
    options = {"label": label, "time": time, **options}
    values = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    corrections = read_fields(fields)
    for name, value in read_kinds(kind).items():
        corrections[name] = {**corrections.get(name, {}), "kind": value}
    settings = build_options({"label": "a label", **values})
    table = open_source(source, separator=settings.separator, header=settings.header, strip=settings.strip)
    if "label" not in values:  # after other mistakes were reported
        more = f" and {len(table.names) - MAX_NAMES} more" if len(table.names) > MAX_NAMES else ""
        listed = ", ".join(table.names[:MAX_NAMES]) + more
        raise InputError(f"say which column is the label: label='click', or --label click; the columns are {listed}")
    targets = (settings.label, *settings.tasks)
    absent = [name for name in layout if name not in table.names]
    if absent:
        raise DataError(f"{table.files[0]}: not the layout of {preset}: column {absent[0]!r} is missing")
    check_columns(targets, table.names, "label")
    check_row_columns(settings, table)
    if settings.split is not None and corrections.get(settings.split, {"kind": "ignore"}) != {"kind": "ignore"}:
        raise InputError(f"fields: {settings.split!r} is the split column, and cannot be a field too")
    check_columns(corrections, table.names, "fields" if isinstance(fields, Mapping) else str(fields))
    for name in corrections:
        if name in targets:
            raise InputError(f"fields: {name!r} is the label or a task, and cannot be a field too")

    from lpfs.data.infer import SAMPLE_ROWS, TIME_REASON, UNREADABLE_DATES, infer_columns  # imports polars
    from lpfs.data.parsing import replace_missing_marks

    sample = replace_missing_marks(table.sample(SAMPLE_ROWS), settings.missing)
    undecided = sample.drop({*targets, *layout})
    plans_by_name = infer_columns(undecided, typed=table.typed, decimal=settings.decimal)
    plans_by_name |= {name: FieldPlan(name, **options, why="preset") for name, options in layout.items()}
    inferred = [plans_by_name[name] for name in table.names if name not in targets]
    if settings.time is None and "parts" not in values:
        excluded = {*corrections, settings.split}
        times = [field.name for field in inferred if field.why == TIME_REASON and field.name not in excluded]
        if len(times) == 1 and find_date_format(table, sample, times[0]) == "":
            inferred = [replace(field, why=UNREADABLE_DATES) if field.name in times else field for field in inferred]
        elif len(times) == 1:
            if settings.shuffle:
                raise InputError(
                    f"shuffle: column {times[0]!r} holds times, a random split would mix past and future; "
                    "leave shuffle out to order the rows by it, or give parts to leave the time out"
                )
            settings = replace(settings, time=times[0])
    if settings.time is not None and settings.time_format is None:
        settings = replace(settings, time_format=find_date_format(table, sample, settings.time) or None)
    plans = []
    for field in apply_corrections(inferred, corrections):
        if field.name == settings.time and not corrections.get(field.name):
            field = FieldPlan(field.name, "ignore", why="orders the rows")
        if field.name == settings.split:
            field = FieldPlan(field.name, "ignore", why="splits the rows")
        plans.append(settings.apply_defaults(field))
    if all(field.kind == "ignore" for field in plans):
        raise DataError(f"{table.files[0]}: no field is left besides the label; set the kinds with fields")
    return PreparePlan(table, settings, tuple(plans))


def find_date_format(source: Source, sample: pl.DataFrame, column: str) -> str | None:
    """Return the strptime format of a column of dates; None if they are ISO dates or no dates, "" if none fits.

    01/02/2026 may be in January or in February: rows are read until one of them decides.
    """
    import polars as pl

    from lpfs.data.parsing import date_formats

    formats = date_formats(sample[column]) if sample[column].dtype == pl.String else []
    if formats in ([], ["iso"]):
        return None
    for chunk in source.chunks([column]) if len(formats) > 1 else ():
        fitting = date_formats(chunk.frame[column])
        formats = [time_format for time_format in formats if time_format in fitting]
        if len(formats) < 2:
            break
    return formats[0] if len(formats) == 1 else ""


def check_row_columns(options: PrepareOptions, source: Source) -> None:
    """Raise FieldError if the source does not have the time or the split column."""
    for option, column in (("time", options.time), ("split", options.split)):
        if column is not None:
            check_columns([column], source.names, option)


def build_options(values: Mapping[str, Any]) -> PrepareOptions:
    """Build the options; raise InputError for an unknown one."""
    for name in values:
        check_name(name, PrepareOptions.__dataclass_fields__, "option")
    try:
        return PrepareOptions(**values)
    except TypeError as error:
        raise InputError(f"an option is of the wrong type: {error}") from error


def field_table(plan: PreparePlan) -> list[Row]:
    """Return the table of fields, one row per column."""
    reason = "given" if plan.labelled else "not in the source: 0 in every row"
    rows: list[Row] = [(plan.options.label, "label", "", "", reason)]
    rows += [(name, "task", "", "", reason) for name in plan.options.tasks]
    default = FieldPlan("default")
    roles = {plan.options.time: "time", plan.options.split: "split"}
    for field in plan.plans:
        ignored = field.kind == "ignore"
        options = [
            f"{name}={getattr(field, name)}"
            for name in TABLE_OPTIONS
            if getattr(field, name) != getattr(default, name)
            and not (name == "min_count" and (field.hash or field.min_count == 1))
        ]
        kind = roles.get(field.name, field.kind) if ignored else field.kind
        rows.append((field.name, kind, "" if ignored else field.group, " ".join(options), field.why))
    return rows


def field_table_compact(plan: PreparePlan) -> tuple[Sequence[str], list[Row]]:
    """Return header and rows of the table of fields for display: similar columns merged, empty columns left out.

    ``v1`` … ``v85`` of one kind become one line; group and options are shown only if a field has them.
    """
    rows = [line for _, run in groupby(field_table(plan), key=_group_key) for line in _merge_rows(list(run))]
    shown = [
        index
        for index, name in enumerate(TABLE)
        if name not in ("group", "options") or {row[index] for row in rows} - {"", FieldPlan("default").group}
    ]
    return [TABLE[index] for index in shown], [tuple(row[index] for index in shown) for row in rows]


def _group_key(row: Row) -> Row:
    """Return what the columns of one line have in common: everything but the numbers in name and reason."""
    name, *rest, reason = row
    return (NUMBER.sub("#", name), *rest, NUMBER.sub("#", reason).replace("value ", "values "))


def _merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row for ``MIN_MERGED`` or more similar columns.

    >>> _merge_rows([(f"v{i}", "numeric", "", "", f"numbers, {i} values") for i in range(1, 9)])
    [('v1 … v8 (8 columns)', 'numeric', '', '', 'numbers, 1 to 8 values')]
    """
    if len(rows) < MIN_MERGED:
        return list(rows)
    first, last = rows[0], rows[-1]
    numbers = zip(*(NUMBER.findall(row[-1]) for row in rows), strict=True)
    ordered = [sorted(set(column), key=lambda number: int(number.replace(",", ""))) for column in numbers]
    ranges = iter([" to ".join(dict.fromkeys((column[0], column[-1]))) for column in ordered])
    reason = NUMBER.sub(lambda _: next(ranges), last[-1])
    return [(f"{first[0]} … {last[0]} ({len(rows)} columns)", *first[1:-1], reason)]
