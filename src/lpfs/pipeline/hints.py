"""Hints: what to look at before trusting an answer. A field that may leak, two fields that are one column.

A field leaks when it says what is known only after the click. No data can prove that; but a field that predicts
nearly everything, or nearly as well as all fields together, or that the model of all fields hangs on, is worth a
question.

Column: the values of one field in some rows as whole numbers, whatever kind of field it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.methods.shuffled import shuffled
from lpfs.models.base import Model
from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.splits import DataSplits
from lpfs.schema import Schema
from lpfs.train.evaluate import evaluate
from lpfs.train.metrics import auc as area

BINS = 100  # that numbers are cut into, the missing ones apart
Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FieldValues:
    """The values of a field, or of one of its numbers, in some rows.

    Args:
        ids: of every value; of a number its bin, 0 where it is missing.
        rows: which row each value is in.
        raw: the numbers themselves, NaN where they are missing; None for ids.
        edges: between the bins; None for ids.

    """

    ids: Ids
    rows: Ids
    raw: Numbers | None = None
    edges: Numbers | None = None

    def binned_like(self, other: FieldValues) -> FieldValues:
        """Return the column cut at the edges of another one."""
        return (
            self
            if self.raw is None or other.edges is None
            else replace(self, ids=bin_numbers(self.raw, other.edges))
        )


def read_fields(part: Dataset, fields: Sequence[str]) -> tuple[dict[str, list[FieldValues]], Numbers]:
    """Return the columns of each field, one but for fields of several numbers, and the labels of the main task."""
    stream = part.stream(1 << 15, fields=fields)
    batches = list(stream)
    every = np.arange(part.rows)
    found: dict[str, list[FieldValues]] = {}
    at = seen = 0
    for each in stream.schema:
        if each.kind == "multi":
            values = [batch.bags[each.name][0].numpy() for batch in batches]
            sizes = [_sizes(*(part.numpy() for part in batch.bags[each.name])) for batch in batches]
            found[each.name] = [FieldValues(_joined(values).astype(np.int64), every.repeat(_joined(sizes)))]
        elif each.kind == "numeric":
            found[each.name] = [_numbers(batches, number) for number in range(at, at + each.dim)]
            at += each.dim
        else:
            ids = _joined([batch.ids[:, seen].numpy() for batch in batches])
            found[each.name] = [FieldValues(ids.astype(np.int64), every)]
            seen += 1
    return found, _joined([batch.labels[:, 0].numpy() for batch in batches]).astype(np.float64)


def bin_numbers(raw: Numbers, edges: Numbers) -> Ids:
    """Return the bin of each number, from 1 on; 0 where it is missing.

    >>> binned(np.array([0.5, np.nan, 2.0]), np.array([1.0])).tolist()
    [1, 0, 2]
    """
    return np.where(np.isnan(raw), 0, 1 + np.searchsorted(edges, np.nan_to_num(raw), side="right"))


def partition_digest(columns: Sequence[FieldValues]) -> bytes | None:
    """Return what two fields have in common if and only if they are one column but for the names of the values.

    None where nothing can be said: one value everywhere, or another one in nearly every row. Numbers with many
    values are compared by their ranks, from below or from above.
    """
    digest = hashlib.sha256()
    told = False
    for column in columns:
        values = column.ids if column.raw is None else column.raw
        known = np.nan_to_num(values, nan=np.inf) if column.raw is not None else values
        distinct, first, ranks = np.unique(known, return_index=True, return_inverse=True)
        if column.raw is not None and len(distinct) > len(known) // 2:
            most = len(distinct) - 1
            form = ranks if ranks[0] * 2 <= most else most - ranks
        else:
            names = np.empty(len(distinct), np.int64)
            names[np.argsort(first, kind="stable")] = np.arange(len(distinct))  # in the order they come
            form = names[ranks]
            told |= 1 < len(distinct) <= len(known) // 2
        told |= column.raw is not None and len(distinct) > 1
        digest.update(form.astype(np.int64).tobytes())
        digest.update(column.rows.tobytes())
    return digest.digest() if told else None


def _numbers(batches: Sequence[Any], number: int) -> FieldValues:
    raw = _joined([batch.dense[:, number].numpy() for batch in batches]).astype(np.float64)
    gone = [np.zeros(len(batch), bool) if batch.missing is None else batch.missing[:, number].numpy()
            for batch in batches]  # fmt: skip
    raw[_joined(gone)] = np.nan
    there = raw[~np.isnan(raw)]
    cuts = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(there, cuts)) if len(there) else np.empty(0)
    return FieldValues(bin_numbers(raw, edges), np.arange(len(raw)), raw, edges)


def _sizes(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.diff(offsets, append=len(values))


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(pieces)


LEARNED = 100_000  # rows that click rates are learned from, the last ones
JUDGED = 10_000  # rows that are judged on
PRIOR = 20  # rows at the mean rate that are added to those of every value
NEAR_CERTAIN_AUC = 0.95  # AUC of a field alone that is suspicious whatever the others do
ALONE_SHARE = 0.85  # part of AUC - 0.5 of all fields that one has alone …
DEPENDENCE_SHARE = 0.35  # … and part of it that is lost when that field is shuffled: more is suspicious …
OUTLIER_FACTOR = 2.0  # … if it is so many times what is lost by the next field
LEAST = 0.6  # AUC of all fields below which there is too little to compare with
MIN_POSITIVES = 30  # rows of each class to judge on, with fewer nothing is said of leaks
MAX_HINTS = 3  # fields that can stand out; where more do, it is the model of all fields that is poor


def find_hints(work: RunPlan, full: Model, kept: Sequence[str]) -> list[dict[str, Any]]:
    """Return hints, each with its ``kind``, its ``fields`` and a ``text`` to print; none where all is well.

    It takes seconds, and whatever goes wrong in it costs the hints alone, never the run.

    Args:
        work: the run; training rows give click rates, validation rows judge.
        full: the model of all fields.
        kept: the fields that stay.

    """
    try:
        return _find_hints(work.splits, full, kept, work.device)
    except Exception as error:
        work.console.message(f"no hints this time: {type(error).__name__}: {error}")
        return []


def _find_hints(parts: DataSplits, full: Model, kept: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """Look at every field alone, at the model without it, and for columns that are there twice."""
    fields = full.reads.names
    judged = parts.valid.part(0, min(JUDGED, parts.valid.rows))
    stream = judged.stream(4096, fields=fields, device=device)
    rows = parts.train.rows
    learned, clicks = read_fields(parts.train.part(max(0, rows - LEARNED), rows), fields)
    seen, labels = read_fields(judged, fields)
    together = evaluate(full, stream).auc
    found = same_columns({name: learned[name] for name in kept}, len(clicks))
    if together is None or len(fields) == 1 or min(labels.sum(), (1 - labels).sum()) < MIN_POSITIVES:
        return found
    alone = {name: single_field_auc(learned[name], clicks, seen[name], labels) for name in fields}
    without = {name: evaluate(full, ShuffledStream(stream, name)).auc or together for name in fields}
    return [*leaks(together, alone, without), *found]


def unread_fields_hint(kept: Sequence[str], read: Sequence[str], schema: Schema) -> list[dict[str, Any]]:
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


class ShuffledStream:
    """The batches of a stream with one field shuffled within each."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream, self.name = stream, name

    def __iter__(self) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(0)
        for batch in self.stream:
            order = torch.randperm(len(batch), generator=draw).to(batch.labels.device)
            yield shuffled(batch, self.stream.schema, [self.name], order)


def single_field_auc(
    learned: Sequence[FieldValues], clicks: Numbers, seen: Sequence[FieldValues], labels: Numbers
) -> float:
    r"""Return the AUC of a field alone: that of the click rate of its value, learned on other rows.

    .. math:: r_v = \frac{\text{clicks}_v + m\,\bar r}{\text{rows}_v + m}, \qquad m = 20

    A bag scores the mean of its values; of a field of several numbers the best one counts.
    """
    found = 0.5
    for before, now in zip(learned, seen, strict=True):
        ids, others = before.ids, now.binned_like(before).ids
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
    certain = {name for name in alone if alone[name] > NEAR_CERTAIN_AUC}
    lost = {name: together - without[name] for name in alone}
    hangs = max(DEPENDENCE_SHARE * room, OUTLIER_FACTOR * max(sorted(lost.values())[:-1], default=0.0))
    large = {name for name in alone if alone[name] - 0.5 > ALONE_SHARE * room or lost[name] > hangs}
    named = certain | large if len(large) <= MAX_HINTS else certain
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


def same_columns(kept: Mapping[str, Sequence[FieldValues]], rows: int) -> list[dict[str, Any]]:
    """Return a hint for each group of fields that are one column, but for the names of their values."""
    groups: dict[bytes, list[str]] = {}
    for name, columns in kept.items():
        key = partition_digest(columns)
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
