"""Planning: what will happen to each column, from the first rows and what the user says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lpfs.data.fields import FieldPlan, check_columns, correct, suggestion
from lpfs.data.infer import SAMPLE, TIME, infer
from lpfs.data.planning import Options
from lpfs.data.plan.presets import preset_options
from lpfs.data.plan.toml import read_fields
from lpfs.data.raw.files import open_source
from lpfs.data.sources.base import Source
from lpfs.errors import DataError, InputError

NO_LABEL = "say which column is the label: label='click', or --label click"
MOST_NAMES = 12  # columns that a message names


@dataclass(frozen=True)
class Job:
    """A source, the options, what will happen to each column, and whether the label and the tasks are there."""

    source: Source
    options: Options
    plans: tuple[FieldPlan, ...]
    labelled: bool = True

    @property
    def title(self) -> str:
        """Heading of the table of fields."""
        return "Fields (correct them with --fields, or fields=…)"


def plan(
    source: Any,
    *,
    label: str | None = None,
    time: str | None = None,
    fields: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    preset: str | None = None,
    **options: Any,
) -> Job:
    """Look at the first rows and say what ``prepare`` would do; writes nothing."""
    given = {name: value for name, value in {"label": label, "time": time, **options}.items() if value is not None}
    known = preset_options(preset) if preset is not None else {}
    layout = known.pop("fields", {})
    corrections = read_fields(fields)
    if "label" not in {**known, **given}:
        settings = make_options({**known, **given, "label": "a label"})  # other mistakes come first
        raise InputError(f"{NO_LABEL}; {columns_of(source, settings)}")
    settings = make_options({**known, **given})
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

    from lpfs.data.raw.cast import mark_missing

    sample = mark_missing(opened.sample(SAMPLE), settings.missing)
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
            settings = order_by(times[0], settings)
    plans = []
    for each in correct(found, corrections):
        if each.name == settings.time and not corrections.get(each.name):
            each = FieldPlan(each.name, "ignore", why="orders the rows")
        if each.name == settings.split:
            each = FieldPlan(each.name, "ignore", why="splits the rows")
        plans.append(settings.complete(each))
    if all(each.kind == "ignore" for each in plans):
        raise DataError(f"{opened.files[0]}: no field is left besides the label; set the kinds with fields")
    return Job(opened, settings, tuple(plans))


def order_by(time: str, settings: Options) -> Options:
    """Take a column of times that was found; refuse to deal the rows at random past it."""
    if settings.shuffle:
        raise InputError(
            f"shuffle: column {time!r} holds times, dealing the rows at random would mix past and future; "
            "leave shuffle out to order the rows by it, or give parts to leave the time out"
        )
    return replace(settings, time=time)


def columns_of(source: Any, settings: Options) -> str:
    """Say which columns a log has; one that is not there is an error."""
    names = open_source(source, separator=settings.separator, header=settings.header).names
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"the columns are {', '.join(names[:MOST_NAMES])}{more}"


def make_options(given: dict[str, Any]) -> Options:
    """Build the options; an unknown one is an error with the nearest name."""
    names = list(Options.__dataclass_fields__)
    for name in given:
        if name not in names:
            raise InputError(f"unknown option {name!r}{suggestion(name, names)}; there are {', '.join(names)}")
    if "label" not in given:
        raise InputError(NO_LABEL)
    try:
        return Options(**given)
    except TypeError as error:
        raise InputError(f"an option is of the wrong type: {error}") from error
