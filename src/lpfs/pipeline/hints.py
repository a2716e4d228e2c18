"""Hints: possible problems of a result, such as a field that leaks the label or two fields that are one column.

A field leaks if its value is known only after the click. No data can prove that. But a field that predicts the
label almost alone, or that the model of all fields depends on far more than on any other, should be checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.methods.sampling import shuffle_fields
from lpfs.models.base import Model
from lpfs.pipeline.plan import EVAL_BATCH_SIZE, RunPlan
from lpfs.pipeline.splits import DataSplits
from lpfs.schema import Schema
from lpfs.train.evaluate import evaluate
from lpfs.train.metrics import auc as compute_auc

TRAIN_ROWS = 100_000  # last training rows, from which click rates are computed
VALID_ROWS = 10_000  # first validation rows, on which fields are evaluated
READ_ROWS = 1 << 15  # rows per batch while they are read
BINS = 100  # quantile bins of a numeric column
PRIOR_ROWS = 20  # rows at the mean rate that are added to those of every value
NEAR_CERTAIN_AUC = 0.95  # a single field above this AUC is always reported
ALONE_SHARE = 0.85  # share of (AUC of all fields - 0.5) that a single field reaches alone
DEPENDENCE_SHARE = 0.35  # share of it that is lost if the field is shuffled …
OUTLIER_FACTOR = 2.0  # … if it is this many times the loss of the next field
MIN_AUC = 0.6  # of all fields; below it a single field is not compared with them
MIN_POSITIVES = 30  # rows of each class; with fewer no leak is reported
MAX_HINTS = 3  # if more fields stand out, the model of all fields is weak and none of them is reported

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Hint = dict[str, Any]


def find_hints(plan: RunPlan, full: Model, kept: Sequence[str]) -> list[Hint]:
    """Return hints with ``kind``, ``fields`` and ``text`` about a run; an error never fails the run."""
    try:
        return _find_hints(plan.splits, full, kept, plan.device)
    except Exception as error:
        plan.console.warning(f"hints could not be computed: {type(error).__name__}: {error}")
        return []


def _find_hints(splits: DataSplits, full: Model, kept: Sequence[str], device: torch.device) -> list[Hint]:
    """Evaluate every field alone and the model without it; compare the kept columns with each other."""
    fields = full.reads.names
    valid = splits.valid.part(0, min(VALID_ROWS, splits.valid.rows))
    stream = valid.stream(EVAL_BATCH_SIZE, fields=fields, device=device)
    train = splits.train.part(max(0, splits.train.rows - TRAIN_ROWS), splits.train.rows)
    train_values, train_labels = read_fields(train, fields)
    valid_values, valid_labels = read_fields(valid, fields)
    full_auc = evaluate(full, stream).auc
    duplicates = duplicate_hints({name: train_values[name] for name in kept}, len(train_labels))
    positives = valid_labels.sum()
    if full_auc is None or len(fields) == 1 or min(positives, len(valid_labels) - positives) < MIN_POSITIVES:
        return duplicates
    alone = {
        name: single_field_auc(train_values[name], train_labels, valid_values[name], valid_labels) for name in fields
    }
    without = {name: evaluate(full, shuffled_batches(stream, name)).auc or full_auc for name in fields}
    return [*leak_hints(full_auc, alone, without), *duplicates]


def unread_fields_hint(kept: Sequence[str], inputs: Sequence[str], schema: Schema) -> list[Hint]:
    """Return a hint if the model does not use all kept fields: user fields without item fields, or vice versa."""
    unused = [name for name in kept if name not in set(inputs)]
    if not unused:
        return []
    group = schema[unused[0]].group
    other = "item" if group == "user" else "user"
    text = (
        f"{', '.join(unused)}: kept but not used, because the model uses products with {other} fields and all of "
        f"these are dropped; keep more fields, or name one of group {other} with --must-keep"
    )
    return [{"kind": "not read", "fields": unused, "text": text}]


def leak_hints(full_auc: float, alone: Mapping[str, float], without: Mapping[str, float]) -> list[Hint]:
    """Return a hint for each field that predicts suspiciously well.

    The AUC is that of the model of all fields, of each field alone, and of the model if the field is shuffled.

    >>> [hint["fields"] for hint in leak_hints(0.9, {"a": 0.86, "b": 0.7}, {"a": 0.8, "b": 0.9})]
    [['a']]
    """
    gain = full_auc - 0.5 if full_auc >= MIN_AUC else float("inf")
    certain = {name for name in alone if alone[name] > NEAR_CERTAIN_AUC}
    loss = {name: full_auc - without[name] for name in alone}
    max_loss = max(DEPENDENCE_SHARE * gain, OUTLIER_FACTOR * max(sorted(loss.values())[:-1], default=0.0))
    outliers = {name for name in alone if alone[name] - 0.5 > ALONE_SHARE * gain or loss[name] > max_loss}
    reported = certain | outliers if len(outliers) <= MAX_HINTS else certain
    hints = []
    for name in sorted(reported, key=lambda name: (-alone[name], name)):
        text = (
            f"{name!r} alone has a validation AUC of {alone[name]:.3f}; all {len(alone)} fields have "
            f"{full_auc:.3f}, and {without[name]:.3f} if it is shuffled. If its value is known only after the "
            f"click, leave it out: --must-drop {name}"
        )
        values = {"auc": alone[name], "all_fields": full_auc, "shuffled": without[name], "text": text}
        hints.append({"kind": "leak", "fields": [name], **values})
    return hints


def duplicate_hints(kept: Mapping[str, Sequence[FieldValues]], rows: int) -> list[Hint]:
    """Return a hint for each group of fields that are the same column except for the names of its values."""
    groups: dict[bytes | None, list[str]] = {}
    for name, columns in kept.items():
        groups.setdefault(partition_digest(columns), []).append(name)
    groups.pop(None, None)
    hints = []
    for names in (names for names in groups.values() if len(names) > 1):
        text = (
            f"{', '.join(map(repr, names))} are the same column with other values, in all {rows:,} rows that were "
            f"compared; one of them is enough: --must-drop {','.join(names[1:])}"
        )
        hints.append({"kind": "same column", "fields": names, "text": text})
    return hints


def shuffled_batches(stream: Stream, name: str) -> Iterator[Batch]:
    """Yield the batches of a stream with one field shuffled within each batch."""
    generator = torch.Generator().manual_seed(0)
    for batch in stream:
        order = torch.randperm(len(batch), generator=generator).to(batch.labels.device)
        yield shuffle_fields(batch, stream.schema, [name], order)


@dataclass(frozen=True)
class FieldValues:
    """The values of a field, or of one column of a numeric field, in some rows."""

    ids: Ids  # of each value; of a number its bin, 0 if it is missing
    rows: Ids  # row of each value
    raw: Numbers | None = None  # the numbers, NaN if missing; None for ids
    edges: Numbers | None = None  # between the bins; None for ids

    def ids_binned_like(self, other: FieldValues) -> Ids:
        """Return the ids with the bins of another column."""
        return self.ids if self.raw is None or other.edges is None else bin_numbers(self.raw, other.edges)


def read_fields(rows: Dataset, fields: Sequence[str]) -> tuple[dict[str, list[FieldValues]], Numbers]:
    """Return the columns of each field, several for a numeric field of several columns, and the main labels."""
    stream = rows.stream(READ_ROWS, fields=fields)
    batches = list(stream)
    row_numbers = np.arange(rows.rows)
    columns: dict[str, list[FieldValues]] = {}
    dense_column = id_column = 0
    for field in stream.schema:
        if field.kind == "multi":
            bags = [tuple(tensor.numpy() for tensor in batch.bags[field.name]) for batch in batches]
            sizes = np.concatenate([np.diff(offsets, append=len(values)) for values, offsets in bags])
            ids = np.concatenate([values for values, _ in bags]).astype(np.int64)
            columns[field.name] = [FieldValues(ids, row_numbers.repeat(sizes))]
        elif field.kind == "numeric":
            last = dense_column + field.dim
            columns[field.name] = [_numeric_values(batches, column) for column in range(dense_column, last)]
            dense_column = last
        else:
            ids = np.concatenate([batch.ids[:, id_column].numpy() for batch in batches])
            columns[field.name] = [FieldValues(ids.astype(np.int64), row_numbers)]
            id_column += 1
    labels = np.concatenate([batch.labels[:, 0].numpy() for batch in batches])
    return columns, labels.astype(np.float64)


def _numeric_values(batches: Sequence[Batch], column: int) -> FieldValues:
    raw = np.concatenate([batch.dense[:, column].numpy() for batch in batches]).astype(np.float64)
    missing = [
        np.zeros(len(batch), bool) if batch.missing is None else batch.missing[:, column].numpy() for batch in batches
    ]
    raw[np.concatenate(missing)] = np.nan
    present = raw[~np.isnan(raw)]
    edges = np.unique(np.quantile(present, np.linspace(0, 1, BINS + 1)[1:-1])) if len(present) else np.empty(0)
    return FieldValues(bin_numbers(raw, edges), np.arange(len(raw)), raw, edges)


def bin_numbers(raw: Numbers, edges: Numbers) -> Ids:
    """Return the bin of each number, starting at 1; 0 if it is missing.

    >>> bin_numbers(np.array([0.5, np.nan, 2.0]), np.array([1.0])).tolist()
    [1, 0, 2]
    """
    return np.where(np.isnan(raw), 0, 1 + np.searchsorted(edges, np.nan_to_num(raw), side="right"))


def partition_digest(columns: Sequence[FieldValues]) -> bytes | None:
    """Return a digest that two fields share if and only if they are one column except for the names of values.

    None if the column cannot be compared: a single value, or another one in nearly every row. Numbers with many
    values are compared by their ranks, ascending or descending.
    """
    digest, comparable = hashlib.sha256(), False
    for column in columns:
        values = column.ids if column.raw is None else np.nan_to_num(column.raw, nan=np.inf)
        distinct, first, ranks = np.unique(values, return_index=True, return_inverse=True)
        if column.raw is not None and len(distinct) > len(values) // 2:
            last = len(distinct) - 1
            codes = ranks if ranks[0] * 2 <= last else last - ranks
        else:
            order = np.empty(len(distinct), np.int64)
            order[np.argsort(first, kind="stable")] = np.arange(len(distinct))  # by first occurrence
            codes = order[ranks]
            comparable |= 1 < len(distinct) <= len(values) // 2
        comparable |= column.raw is not None and len(distinct) > 1
        digest.update(codes.astype(np.int64).tobytes() + column.rows.tobytes())
    return digest.digest() if comparable else None


def single_field_auc(
    train: Sequence[FieldValues], train_labels: Numbers, valid: Sequence[FieldValues], valid_labels: Numbers
) -> float:
    r"""Return the AUC of a field alone: of the click rate of its value, computed on training rows.

    .. math:: r_v = \frac{\text{clicks}_v + m\,\bar r}{\text{rows}_v + m}, \qquad m = 20

    A bag is scored by the mean over its values; of a field with several columns the best one counts.
    """
    best, mean = 0.5, train_labels.mean()
    for column, valid_column in zip(train, valid, strict=True):
        valid_ids = valid_column.ids_binned_like(column)
        size = int(max(column.ids.max(initial=0), valid_ids.max(initial=0))) + 1
        clicks = np.bincount(column.ids, train_labels[column.rows], minlength=size)
        rates = (clicks + PRIOR_ROWS * mean) / (np.bincount(column.ids, minlength=size) + PRIOR_ROWS)
        total = np.bincount(valid_column.rows, rates[valid_ids], minlength=len(valid_labels))
        count = np.bincount(valid_column.rows, minlength=len(valid_labels))
        scores = np.where(count > 0, total / np.maximum(count, 1), mean)
        best = max(best, compute_auc(scores, valid_labels) or 0.5)
    return best
