"""Planning of prepare: options, presets of public logs, the plan of a source, and the table of its fields."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lpfs._validation import did_you_mean, is_number
from lpfs.data.fields import FieldPlan, apply_corrections, check_columns, read_fields
from lpfs.data.sources import open_source
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    from lpfs.data.sources.base import Source

NO_LABEL = "say which column is the label: label='click', or --label click"
MAX_NAMES = 12  # columns listed in an error message
MAX_PARTS = 4000  # parts of a log without a time column
TIME_FORMATS = ("iso", "number", "name", "unix s", "unix ms", "unix us", "unix ns")  # besides strptime formats

TABLE = ("column", "kind", "group", "options", "why")  # header of the table of fields
TABLE_OPTIONS = ("separator", "hash", "min_count", "max_values", "bins", "width", "hexadecimal", "cost")
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
    """How a log becomes a Dataset.

    Args:
        label: label column, 0 or 1.
        tasks: columns of further labels.
        time: column that orders the rows; None: row order.
        time_format: format of the time column: strptime ('%y%m%d%H'), or 'unix s', 'unix ms', 'number', 'name',
            'iso'; detected from the first rows if None.
        parts: number of parts into which the row order is split without a time column; 'files': one per file.
        shuffle: assign rows to those parts at random, by ``seed``; for a table sorted by something else than time.
        split: column with the role of each row, train, valid or test. The days are those of the training rows,
            followed by ``valid`` and ``test``.
        ordered: rows must be in time order; a step back in time is an error.
        train: number of first days on which vocabularies and scales are fitted; None: all but the last, or with
            ``split`` all days of training rows.
        negatives: share of the negatives to keep, on every day or {day: share}.
        seed: seed of the sampling of negatives and of ``shuffle``.
        min_count: values that occur less often in the training days share the id of unseen values.
        max_values: keep only this many of the most frequent values of a field.
        hash: hash all categorical values modulo this range instead of keeping vocabularies.
        bins: split all numeric columns into this many quantile bins; ``auto``: by the number of training rows.
        separator: separator of a text table; None: detected from its first line.
        header: whether text tables have a header; or the column names, where they have none.
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
        def require(condition: bool, option: str, expected: str) -> None:
            if not condition:
                raise InputError(f"{option} must be {expected}, found {getattr(self, option)!r}")

        for option in ("tasks", "missing"):
            value = getattr(self, option)
            object.__setattr__(self, option, (value,) if isinstance(value, str) else tuple(value))
        label, tasks, by_file = self.label, self.tasks, self.parts == "files"
        require(isinstance(label, str) and bool(label), "label", "the name of a column")
        different = len({label, *tasks}) == 1 + len(tasks)
        require(different, "tasks", f"different columns, none of them the label {label!r}")
        valid_parts = by_file or (type(self.parts) is int and 1 <= self.parts <= MAX_PARTS)
        require(valid_parts, "parts", f"an integer from 1 to {MAX_PARTS}, or 'files'")
        require(type(self.shuffle) is bool, "shuffle", "true or false")
        require(
            not self.shuffle or self.time is None,
            "shuffle",
            f"left out: column {self.time!r} orders the rows, a random split would mix past and future",
        )
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
        time_format = self.time_format
        valid_format = time_format is None or "%" in time_format or time_format in TIME_FORMATS
        require(valid_format, "time_format", f"a strptime format with %, or one of {', '.join(TIME_FORMATS)}")
        FieldPlan(  # checks the options that hold for every field
            "every field", min_count=self.min_count, max_values=self.max_values, hash=self.hash, bins=self.bins
        )

    def apply_defaults(self, plan: FieldPlan) -> FieldPlan:
        """Return a field's plan with unset options replaced by those for all fields."""
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
        """Return the options as JSON values."""
        values = asdict(self)
        values["header"] = self.header if isinstance(self.header, bool) else list(self.header)
        return values


@dataclass(frozen=True)
class PreparePlan:
    """How a source is prepared.

    Args:
        source: the opened log.
        options: options of prepare.
        plans: one plan per column, label and tasks excluded.
        labelled: whether the source has the label and the tasks.
    """

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
    """Plan from the first rows what ``prepare`` does with each column; writes nothing."""
    defaults = _preset_options(preset) if preset is not None else {}
    layout = defaults.pop("fields", {})
    options = {"label": label, "time": time, **options}
    values = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    corrections = read_fields(fields)
    if "label" not in values:
        settings = build_options({**values, "label": "a label"})  # report other mistakes first
        raise InputError(f"{NO_LABEL}; {_describe_columns(source, settings)}")
    settings = build_options(values)
    table = open_source(source, separator=settings.separator, header=settings.header)
    targets = (settings.label, *settings.tasks)
    absent = [name for name in layout if name not in table.names]
    if absent:
        raise DataError(f"{table.files[0]}: not the layout of {preset}: column {absent[0]!r} is missing")
    check_columns(targets, table.names, "label")
    for option in ("time", "split"):
        column = getattr(settings, option)
        if column is not None:
            check_columns([column], table.names, option)
    if settings.split is not None and corrections.get(settings.split, {"kind": "ignore"}) != {"kind": "ignore"}:
        raise InputError(f"fields: {settings.split!r} is the split column, and cannot be a field too")
    check_columns(corrections, table.names, "fields" if isinstance(fields, Mapping) else str(fields))
    for name in corrections:
        if name in targets:
            raise InputError(f"fields: {name!r} is the label or a task, and cannot be a field too")

    from lpfs.data.infer import SAMPLE_ROWS, TIME_REASON, infer  # imports polars
    from lpfs.data.parsing import replace_missing_marks

    sample = replace_missing_marks(table.sample(SAMPLE_ROWS), settings.missing)
    inferred = [
        FieldPlan(name, **layout[name], why="preset") if name in layout else infer(sample[name])
        for name in table.names
        if name not in targets
    ]
    if settings.time is None and "parts" not in values:
        times = [field.name for field in inferred if field.why == TIME_REASON]
        times = [name for name in times if name not in corrections and name != settings.split]
        if len(times) == 1:
            settings = _use_time_column(times[0], settings)
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


def _preset_options(name: str) -> dict[str, Any]:
    """Return the options of a preset."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def _use_time_column(time: str, settings: PrepareOptions) -> PrepareOptions:
    """Order the rows by an inferred timestamp column; raise InputError if a random split was requested."""
    if settings.shuffle:
        raise InputError(
            f"shuffle: column {time!r} holds times, a random split would mix past and future; "
            "leave shuffle out to order the rows by it, or give parts to leave the time out"
        )
    return replace(settings, time=time)


def _describe_columns(source: Any, settings: PrepareOptions) -> str:
    """Describe which columns a log has; raise DataError if the log cannot be opened."""
    names = open_source(source, separator=settings.separator, header=settings.header).names
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"the columns are {', '.join(names[:MAX_NAMES])}{more}"


def build_options(values: Mapping[str, Any]) -> PrepareOptions:
    """Build the options; raise InputError for an unknown one."""
    names = list(PrepareOptions.__dataclass_fields__)
    for name in values:
        if name not in names:
            raise InputError(f"unknown option {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    if "label" not in values:
        raise InputError(NO_LABEL)
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
    ranges = iter([_number_range(column) for column in numbers])
    reason = NUMBER.sub(lambda _: next(ranges), last[-1])
    return [(f"{first[0]} … {last[0]} ({len(rows)} columns)", *first[1:-1], reason)]


def _number_range(numbers: Iterable[str]) -> str:
    """Return the smallest and the largest of formatted numbers, as '1 to 8'."""
    ordered = sorted(set(numbers), key=lambda number: int(number.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
