"""The table of fields: what will happen to each column, for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from lpfs.data.fields import FieldPlan
from lpfs.data.plan.job import Job

TABLE = ("column", "kind", "group", "options", "why")
NUMBER = re.compile(r"\d[\d,]*")
RUN = 6  # neighbours of one name and kind that become one line
Row = tuple[str, ...]


def table(job: Job) -> list[Row]:
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


def printed(job: Job) -> tuple[Sequence[str], list[Row]]:
    """Return header and rows for a person: like columns in one line, no column that says nothing.

    ``v1`` … ``v85`` of one kind are one line; a group or options are shown where anyone has them.
    """
    rows = [line for _, run in groupby(table(job), key=likeness) for line in folded(list(run))]
    says = [
        at
        for at, name in enumerate(TABLE)
        if name not in ("group", "options") or {row[at] for row in rows} - {"", FieldPlan("default").group}
    ]
    return [TABLE[at] for at in says], [tuple(row[at] for at in says) for row in rows]


def likeness(row: Row) -> Row:
    """Return what columns of one line have in common: all but the numbers in the name and in the reason."""
    name, *rest, why = row
    return (NUMBER.sub("#", name), *rest, NUMBER.sub("#", why).replace("value ", "values "))


def folded(rows: Sequence[Row]) -> list[Row]:
    """Return one line for many like columns.

    >>> folded([(f"v{at}", "numeric", "", "", f"numbers, {at} values") for at in range(1, 9)])
    [('v1 … v8 (8 columns)', 'numeric', '', '', 'numbers, 1 to 8 values')]
    """
    if len(rows) < RUN:
        return list(rows)
    first, last = rows[0], rows[-1]
    found = zip(*(NUMBER.findall(row[-1]) for row in rows), strict=True)
    spans = iter([span(column) for column in found])
    why = NUMBER.sub(lambda _: next(spans), last[-1])
    return [(f"{first[0]} … {last[0]} ({len(rows)} columns)", *first[1:-1], why)]


def span(numbers: Iterable[str]) -> str:
    """Return the least and the largest of written numbers."""
    ordered = sorted(set(numbers), key=lambda number: int(number.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
