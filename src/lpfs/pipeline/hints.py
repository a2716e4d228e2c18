"""Hints: what to look at before trusting an answer. A field that may leak, two fields that are one column.

A field leaks when it says what is known only after the click. No data can prove that; but a field that predicts
nearly everything, or nearly as well as all fields together, or that the model of all fields hangs on, is worth a
question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lpfs.data.batches.batch import Batch
from lpfs.data.stream import Stream
from lpfs.methods.shuffled import shuffled
from lpfs.models.base import Model
from lpfs.protocol.columns import Column, Numbers, columns_of, partition
from lpfs.pipeline.splits import Periods
from lpfs.pipeline.stages import Work
from lpfs.schema import Schema
from lpfs.train.evaluate import evaluate
from lpfs.train.metrics import auc as area

LEARNED = 100_000  # rows that click rates are learned from, the last ones
JUDGED = 10_000  # rows that are judged on
PRIOR = 20  # rows at the mean rate that are added to those of every value
CERTAIN = 0.95  # AUC of a field alone that is suspicious whatever the others do
ALONE = 0.85  # part of AUC - 0.5 of all fields that one has alone …
HANGS = 0.35  # … and part of it that is lost when that field is shuffled: more is suspicious …
BEYOND = 2.0  # … if it is so many times what is lost by the next field
LEAST = 0.6  # AUC of all fields below which there is too little to compare with
CLICKS = 30  # rows of each class to judge on, with fewer nothing is said of leaks
MOST = 3  # fields that can stand out; where more do, it is the model of all fields that is poor


def hints(work: Work, full: Model, kept: Sequence[str]) -> list[dict[str, Any]]:
    """Return hints, each with its ``kind``, its ``fields`` and a ``text`` to print; none where all is well.

    It takes seconds, and whatever goes wrong in it costs the hints alone, never the run.

    Args:
        work: the run; training rows give click rates, validation rows judge.
        full: the model of all fields.
        kept: the fields that stay.

    """
    try:
        return found_hints(work.parts, full, kept, work.device)
    except Exception as error:
        work.tell.say(f"no hints this time: {type(error).__name__}: {error}")
        return []


def found_hints(parts: Periods, full: Model, kept: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """Look at every field alone, at the model without it, and for columns that are there twice."""
    fields = full.reads.names
    judged = parts.valid.part(0, min(JUDGED, parts.valid.rows))
    stream = judged.stream(4096, fields=fields, device=device)
    rows = parts.train.rows
    learned, clicks = columns_of(parts.train.part(max(0, rows - LEARNED), rows), fields)
    seen, labels = columns_of(judged, fields)
    together = evaluate(full, stream).auc
    found = same_columns({name: learned[name] for name in kept}, len(clicks))
    if together is None or len(fields) == 1 or min(labels.sum(), (1 - labels).sum()) < CLICKS:
        return found
    alone = {name: alone_auc(learned[name], clicks, seen[name], labels) for name in fields}
    without = {name: evaluate(full, Shuffled(stream, name)).auc or together for name in fields}
    return [*leaks(together, alone, without), *found]


def unread(kept: Sequence[str], read: Sequence[str], schema: Schema) -> list[dict[str, Any]]:
    """Return a hint where the model reads not all that was kept: users whose items all went, or the other way."""
    names = [name for name in kept if name not in set(read)]
    if not names:
        return []
    group = schema[names[0]].group
    other = "item" if group == "user" else "user"
    text = (
        f"{', '.join(names)}: kept, but not read, since the model reads them as products with {other} fields, and "
        f"these are all dropped. Keep more, or name one of group {other} with --must-keep"
    )
    return [{"kind": "not read", "fields": names, "text": text}]


class Shuffled:
    """The batches of a stream with one field shuffled within each."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream, self.name = stream, name

    def __iter__(self) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(0)
        for batch in self.stream:
            order = torch.randperm(len(batch), generator=draw).to(batch.labels.device)
            yield shuffled(batch, self.stream.schema, [self.name], order)


def alone_auc(learned: Sequence[Column], clicks: Numbers, seen: Sequence[Column], labels: Numbers) -> float:
    r"""Return the AUC of a field alone: that of the click rate of its value, learned on other rows.

    .. math:: r_v = \frac{\text{clicks}_v + m\,\bar r}{\text{rows}_v + m}, \qquad m = 20

    A bag scores the mean of its values; of a field of several numbers the best one counts.
    """
    found = 0.5
    for before, now in zip(learned, seen, strict=True):
        ids, others = before.ids, now.like(before).ids
        size = int(max(ids.max(initial=0), others.max(initial=0))) + 1
        mean = clicks.mean()
        hits = np.bincount(ids, clicks[before.rows], minlength=size)
        rates = (hits + PRIOR * mean) / (np.bincount(ids, minlength=size) + PRIOR)
        total = np.bincount(now.rows, rates[others], minlength=len(labels))
        count = np.bincount(now.rows, minlength=len(labels))
        score = np.where(count > 0, total / np.maximum(count, 1), mean)
        found = max(found, area(score, labels) or 0.5)
    return found


def leaks(together: float, alone: Mapping[str, float], without: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a hint for each field that says too much.

    >>> [each["fields"] for each in leaks(0.9, {"a": 0.86, "b": 0.7}, {"a": 0.8, "b": 0.9})]
    [['a']]
    """
    room = together - 0.5 if together >= LEAST else float("inf")
    certain = {name for name in alone if alone[name] > CERTAIN}
    lost = {name: together - without[name] for name in alone}
    hangs = max(HANGS * room, BEYOND * max(sorted(lost.values())[:-1], default=0.0))
    large = {name for name in alone if alone[name] - 0.5 > ALONE * room or lost[name] > hangs}
    named = certain | large if len(large) <= MOST else certain
    found = []
    for name in sorted(named, key=lambda name: (-alone[name], name)):
        auc, rest = alone[name], without[name]
        text = (
            f"{name!r} alone has a validation AUC of {auc:.3f}; all {len(alone)} fields have {together:.3f}, and "
            f"{rest:.3f} when it is shuffled. If it is known only after the click, leave it out: "
            f"--must-drop {name}"
        )
        told = {"auc": auc, "all_fields": together, "shuffled": rest, "text": text}
        found.append({"kind": "leak", "fields": [name], **told})
    return found


def same_columns(kept: Mapping[str, Sequence[Column]], rows: int) -> list[dict[str, Any]]:
    """Return a hint for each group of fields that are one column, but for the names of their values."""
    groups: dict[bytes, list[str]] = {}
    for name, columns in kept.items():
        key = partition(columns)
        if key is not None:
            groups.setdefault(key, []).append(name)
    return [
        {
            "kind": "same column",
            "fields": names,
            "text": f"{', '.join(map(repr, names))} are the same column under other names, in all {rows:,} rows "
            f"looked at; one of them is enough: --must-drop {','.join(names[1:])}",
        }
        for names in groups.values()
        if len(names) > 1
    ]
