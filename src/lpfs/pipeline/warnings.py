"""Warnings: possible problems of a result, such as a field that leaks the label or too few positive rows.

A field leaks if its value is known only after the click. No data can prove that. But a field that predicts the
label almost alone, or that the model of all fields depends on far more than on any other, should be checked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs._text import quote_command
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.methods.sampling import shuffled_batches
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.field_counts import PRIOR_ROWS, bin_numbers, count_fields, counted_auc, quantile_edges
from lpfs.pipeline.plan import EVAL_BATCH_SIZE, RunPlan
from lpfs.schema import Schema
from lpfs.train.distributed.group import current_group
from lpfs.train.evaluate import evaluate
from lpfs.train.metrics import auc as compute_auc

# most serious first
KINDS = ("few positives", "allowance", "leak", "memorized", "near unique", "drift", "seeds", "same column", "not read")

TRAIN_ROWS = 100_000  # last training rows, from which click rates of the values of a bag or a pair are computed
VALID_ROWS = 10_000  # first validation rows, on which fields are evaluated
PAIR_ROWS = 30_000  # last training rows, on which pairs of fields are evaluated
PAIR_FIELDS = 30  # fields of these pairs
READ_ROWS = 1 << 15  # rows per batch while they are read
NEAR_CERTAIN_AUC = 0.95  # a single field above this AUC is always reported
PAIR_AUC = 0.99  # two fields together above this AUC are reported
ALONE_SHARE = 0.85  # share of (AUC of all fields - 0.5) that a single field reaches alone
DEPENDENCE_LOSS = 0.15  # AUC that is lost if the field is shuffled …
OUTLIER_FACTOR = 4.0  # … if it is this many times the loss of the next field
MIN_AUC = 0.8  # of all fields; below it, as for most logs of clicks, one strong field is no leak
MIN_POSITIVES = 30  # rows of each class; with fewer no leak is reported
MAX_LEAKS = 3  # if more fields stand out, the model of all fields is weak and none of them is reported
PURE_RATE = 0.99  # share of positives among the rows that have a value …
MAX_RATE = 0.5  # … and among all rows, at most, for a field that has a value in positive rows only
UNIQUE_SHARE = 0.5  # distinct values per row above which a field is near-unique
MEMORIZED_LOSS_RATIO = 0.5  # training logloss divided by validation logloss below which rows are memorized
MAX_DRIFT = 0.25  # population stability index; larger values are usually called a major change
MAX_UNSEEN = 0.5  # share of test rows with a value that no training row has
UNSURE_SHARE = 0.2  # fields that only some searches kept, divided by the kept fields
MAX_LISTED = 6  # fields that a warning describes; all are in its ``fields``

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Record = dict[str, Any]


def find_warnings(
    plan: RunPlan,
    full: Model,
    full_valid: Mapping[str, Any],
    final: Model,
    valid: Mapping[str, Any],
    kept: Sequence[str],
) -> tuple[list[Record], dict[str, Record]]:
    """Return warnings with ``kind``, ``fields`` and ``text`` about data and models, and facts about every field.

    ``full_valid`` and ``valid`` are the scores of both models on the validation rows. The facts are the share of
    missing values, the number of distinct values and the drift. An error never fails the run.
    """
    unread = unread_fields_warning(kept, final.names, plan.schema)
    try:
        counted = current_group().run_on_leader(lambda: _count(plan, full.reads), "counting values")
        leaks, same = _find_leaks(plan, full, final.reads.names, counted)
        return [
            *leaks,
            *memorized_warning(plan, final, valid),
            *weak_reference_warning(full_valid),
            *near_unique_warning(counted, final.reads.names),
            *drift_warnings(counted),
            *same,
            *unread,
        ], {name: {key: facts[key] for key in ("missing", "distinct", "drift")} for name, facts in counted.items()}
    except Exception as error:
        plan.console.warning(f"warnings could not be computed: {type(error).__name__}: {error}")
        return unread, {}


def ordered(warnings: Sequence[Record]) -> list[Record]:
    """Return the warnings, the most serious first."""
    return sorted(warnings, key=lambda warning: KINDS.index(warning["kind"]))


def verdict_warnings(verdict: Mapping[str, Any], few_labels: str | None, *, enforced: bool) -> list[Record]:
    """Return warnings about the rows of the verdict and about its allowance, if the run had to meet one."""
    warnings = []
    if few_labels is not None:
        text = f"{few_labels}, so nothing is decided; give more rows"
        warnings.append({"kind": "few positives", "fields": [], "text": text})
    checks, allowed = verdict["checks"], verdict["allowed"]
    if enforced and checks and not checks[-1]["holds"] and allowed is not None and checks[-1]["upper"] is not None:
        last = checks[-1]
        text = (
            f"no set of fields was shown to lose at most {allowed:.4f} of AUC; the last one, {last['fields']} fields, "
            f"may lose up to {last['upper']:.4f} on the validation rows"
        )
        warnings.append({"kind": "allowance", "fields": [], "text": text})
    return warnings


def seeds_warning(
    chosen_in: Mapping[str, int], kept: Sequence[str], searches: int, aucs: Sequence[float]
) -> list[Record]:
    """Return a warning if searches with other seeds kept other fields."""
    unsure = [name for name, count in chosen_in.items() if 0 < count < searches]
    if searches < 2 or len(unsure) <= UNSURE_SHARE * max(1, len(kept)):
        return []
    counts = ", ".join(f"{name} {chosen_in[name]}/{searches}" for name in unsure[:MAX_LISTED])
    text = f"{len(unsure)} fields are not kept in all {searches} searches: {counts}{_more(unsure)}"
    if len(aucs) > 1:
        text += f"; the validation AUC after the searches is from {min(aucs):.3f} to {max(aucs):.3f}"
    return [{"kind": "seeds", "fields": unsure, "aucs": list(aucs), "text": text}]


def _count(plan: RunPlan, schema: Schema) -> dict[str, Record]:
    """Return what the warnings need to know about the values of each field, as plain numbers."""
    splits, facts = plan.splits, {}
    for name, counts in count_fields(splits, schema).items():
        rows = splits.train.rows + (splits.valid.rows if counts.seen is not None else 0)  # the encoder has seen both
        present = rows * (1 - counts.missing_share)
        facts[name] = {
            "missing": round(counts.missing_share, 6),
            "distinct": counts.distinct,
            "drift": round(counts.drift(), 6),
            "unseen": counts.unseen_share(),
            "unique": (counts.distinct or 0) / max(1.0, present),
            "counted": round(present),
            "alone": counts.alone_auc(),
            "present": counts.present,
            "total": counts.total,
        }
    return facts


def _find_leaks(
    plan: RunPlan, full: Model, kept: Sequence[str], counted: Mapping[str, Record]
) -> tuple[list[Record], list[Record]]:
    """Evaluate every field alone and the model without it; compare the kept columns with each other.

    The training rows are enough to find a field that separates the classes; what a field adds to all others is
    evaluated on validation rows, if they have enough positives.
    """
    splits, fields = plan.splits, full.reads.names
    train = splits.train.part(max(0, splits.train.rows - TRAIN_ROWS), splits.train.rows)
    train_values, train_labels = read_fields(train, fields)
    same = same_column_warnings({name: train_values[name] for name in kept}, len(train_labels))
    rows, positives = next(iter(counted.values()))["total"]
    if len(fields) == 1 or min(positives, rows - positives) < MIN_POSITIVES:
        return [], same
    leaks = training_leaks(counted)
    valid = splits.valid.part(0, min(VALID_ROWS, splits.valid.rows))
    stream = valid.stream(EVAL_BATCH_SIZE, fields=fields, device=plan.device)
    full_auc, loss = evaluate(full, stream).auc, dict.fromkeys(fields, 0.0)
    if full_auc is not None and min(valid.label_counts()) >= MIN_POSITIVES:
        valid_values, valid_labels = read_fields(valid, fields)
        alone = {
            name: single_field_auc(train_values[name], train_labels, valid_values[name], valid_labels)
            for name in fields
        }
        without = {}
        for name in fields:
            shuffled = shuffled_batches(stream, stream.schema, [name], torch.Generator().manual_seed(0))
            without[name] = evaluate(full, shuffled).auc or full_auc
        loss = {name: full_auc - without[name] for name in fields}
        leaks = [*leak_warnings(full_auc, alone, without), *leaks]
    named = {name for leak in leaks for name in leak["fields"]}
    names = sorted(set(fields) - named, key=lambda name: -loss[name] - counted[name]["alone"])[:PAIR_FIELDS]
    first = max(0, len(train_labels) - PAIR_ROWS)
    leaks = list({tuple(leak["fields"]): leak for leak in reversed(leaks)}.values())[::-1]  # one for each field
    return [*leaks, *pair_leaks({name: train_values[name] for name in names}, train_labels, first)], same


def training_leaks(counted: Mapping[str, Record]) -> list[Record]:
    """Return a warning for each field that separates the training rows, or has a value in positive rows only."""
    leaks = []
    for name, facts in counted.items():
        (rows, positives), (present, clicks) = facts["total"], facts["present"]
        advice = f"If its value is known only after the click, leave it out: {_must_drop(name)}"
        if facts["alone"] > NEAR_CERTAIN_AUC:
            text = f"{name!r} alone has an AUC of {facts['alone']:.3f} on {rows:,} training rows. {advice}"
        elif (
            min(clicks, rows - present) >= MIN_POSITIVES
            and clicks >= PURE_RATE * present
            and positives <= MAX_RATE * rows
        ):
            text = f"{name!r} has a value in {present:,} training rows, and {clicks:,} of them are positive. {advice}"
        else:
            continue
        leaks.append({"kind": "leak", "fields": [name], "auc": facts["alone"], "text": text})
    return leaks


def pair_leaks(values: Mapping[str, Sequence[FieldValues]], labels: Numbers, first: int) -> list[Record]:
    """Return a warning for each two fields that together determine the label from training row ``first`` on."""
    columns = {
        name: np.unique(columns[0].ids[first:], return_inverse=True)[1]
        for name, columns in values.items()
        if len(columns) == 1 and len(columns[0].ids) == len(labels)
    }
    labels = labels[first:]
    half = np.arange(len(labels)) % 2 == 0
    if min(labels.sum(), len(labels) - labels.sum()) < 2 * MIN_POSITIVES:
        return []
    leaks = []
    for one, two in combinations(columns, 2):
        joint = columns[one] * (int(columns[two].max()) + 1) + columns[two]
        _, joint = np.unique(joint, return_inverse=True)
        size = int(joint.max()) + 1
        if size > len(labels) // 4:
            continue
        rows, clicks = (
            [np.bincount(joint[part], weight[part], minlength=size) for part in (half, ~half)]
            for weight in (np.ones_like(labels), labels)
        )
        rates = (clicks[0] + PRIOR_ROWS * labels.mean()) / (rows[0] + PRIOR_ROWS)
        auc = counted_auc(rates, clicks[1], rows[1] - clicks[1])
        if auc > PAIR_AUC:
            text = (
                f"{one!r} and {two!r} together have an AUC of {auc:.3f} on {len(labels):,} training rows. If one of "
                f"them is known only after the click, leave it out: {_must_drop(one)} or {_must_drop(two)}"
            )
            leaks.append({"kind": "leak", "fields": [one, two], "auc": auc, "text": text})
    return leaks if len(leaks) <= MAX_LEAKS else []


def near_unique_warning(counted: Mapping[str, Record], kept: Sequence[str]) -> list[Record]:
    """Return a warning that names the fields with another value in nearly every row, kept ones first."""
    found = [name for name, facts in counted.items() if facts["unique"] > UNIQUE_SHARE]
    if not found:
        return []
    found.sort(key=lambda name: name not in kept)
    described = [
        f"{name!r} ({counted[name]['distinct']:,} values in {counted[name]['counted']:,} rows, "
        f"{'kept' if name in kept else 'dropped'})"
        for name in found[:MAX_LISTED]
    ]
    text = (
        f"near-unique: {', '.join(described)}{_more(found)}. A model can only memorize such values; merge "
        f"rare ones (--min-count) or leave the field out: {_must_drop(*found[:MAX_LISTED])}"
    )
    return [{"kind": "near unique", "fields": found, "text": text}]


def memorized_warning(plan: RunPlan, final: Model, valid: Mapping[str, Any]) -> list[Record]:
    """Return a warning if the final model is much better on its training rows than on the validation rows."""
    train = plan.splits.train
    before = stages.evaluate_split(plan, final, train.part(max(0, train.rows - stages.CHECK_ROWS), train.rows))
    if before.auc is None or valid["auc"] is None or min(plan.splits.valid.label_counts()) < MIN_POSITIVES:
        return []
    if (
        before.auc - valid["auc"] <= stages.MEMORIZED_AUC_GAP
        and before.logloss >= MEMORIZED_LOSS_RATIO * valid["logloss"]
    ):
        return []
    text = (
        f"the final model has memorized its training rows: logloss {before.logloss:.3f} and AUC {before.auc:.3f} "
        f"there, {valid['logloss']:.3f} and {valid['auc']:.3f} on validation rows; merge rare values (--min-count) or "
        "give more rows"
    )
    losses = {"train_logloss": before.logloss, "validation_logloss": valid["logloss"]}
    return [{"kind": "memorized", "fields": [], **losses, "text": text}]


def weak_reference_warning(valid: Mapping[str, Any]) -> list[Record]:
    """Return a warning if the model of all fields, which losses are measured against, is worse than a constant.

    ``valid`` are its scores on the validation rows.
    """
    positives, negatives = valid["positives"], valid["rows"] - valid["positives"]
    if min(positives, negatives) < MIN_POSITIVES:
        return []
    rate = positives / valid["rows"]
    constant = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    if valid["logloss"] <= constant:
        return []
    text = (
        "the model of all fields is worse than a constant prediction, probably because it has memorized its training "
        f"rows: on the validation rows its logloss is {valid['logloss']:.3f}, above {constant:.3f}. Losses are "
        "measured against that model, so a set that loses nothing may still be too small; give more rows, merge rare "
        "values (--min-count), or set the number of fields (--keep)"
    )
    facts = {"validation_logloss": valid["logloss"], "constant_logloss": constant}
    return [{"kind": "memorized", "fields": [], **facts, "text": text}]


def drift_warnings(counted: Mapping[str, Record]) -> list[Record]:
    """Return warnings that name the fields whose values change from the training to the test period."""
    ordinary = {name: facts for name, facts in counted.items() if facts["unique"] <= UNIQUE_SHARE}
    unseen = sorted(
        (n for n, facts in ordinary.items() if facts["unseen"] > MAX_UNSEEN), key=lambda n: -counted[n]["unseen"]
    )
    changed = sorted(
        (n for n, facts in ordinary.items() if facts["drift"] > MAX_DRIFT and n not in unseen),
        key=lambda n: -counted[n]["drift"],
    )
    warnings = []
    if unseen:
        shares = ", ".join(f"{name!r} in {counted[name]['unseen']:.0%}" for name in unseen[:MAX_LISTED])
        text = f"test rows have values that no training row has: {shares}{_more(unseen)} of them"
        warnings.append({"kind": "drift", "fields": unseen, "text": text})
    if changed:
        indices = ", ".join(f"{name!r} {counted[name]['drift']:.2f}" for name in changed[:MAX_LISTED])
        text = (
            f"the values of these fields change from the training to the test period (population stability index): "
            f"{indices}{_more(changed)}"
        )
        warnings.append({"kind": "drift", "fields": changed, "text": text})
    return warnings


def unread_fields_warning(kept: Sequence[str], inputs: Sequence[str], schema: Schema) -> list[Record]:
    """Return a warning if the model does not use all kept fields: user fields without item fields, or vice versa."""
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


def _must_drop(*names: str) -> str:
    return quote_command("--must-drop", ",".join(names))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""


def leak_warnings(full_auc: float, alone: Mapping[str, float], without: Mapping[str, float]) -> list[Record]:
    """Return a warning for each field that predicts suspiciously well.

    The AUC is that of the model of all fields, of each field alone, and of the model if the field is shuffled.

    >>> [leak["fields"] for leak in leak_warnings(0.9, {"a": 0.86, "b": 0.7}, {"a": 0.8, "b": 0.9})]
    [['a']]
    """
    certain = {name for name in alone if alone[name] > NEAR_CERTAIN_AUC}
    loss = {name: full_auc - without[name] for name in alone}
    max_alone = 0.5 + ALONE_SHARE * (full_auc - 0.5)
    max_loss = max(DEPENDENCE_LOSS, OUTLIER_FACTOR * max(sorted(loss.values())[:-1], default=0.0))
    outliers = {name for name in alone if full_auc >= MIN_AUC and (alone[name] > max_alone or loss[name] > max_loss)}
    reported = certain | outliers if len(outliers) <= MAX_LEAKS else certain
    warnings = []
    for name in sorted(reported, key=lambda name: (-alone[name], name)):
        text = (
            f"{name!r} alone has a validation AUC of {alone[name]:.3f}; all {len(alone)} fields have "
            f"{full_auc:.3f}, and {without[name]:.3f} if it is shuffled. If its value is known only after the "
            f"click, leave it out: {_must_drop(name)}"
        )
        values = {"auc": alone[name], "all_fields": full_auc, "shuffled": without[name], "text": text}
        warnings.append({"kind": "leak", "fields": [name], **values})
    return warnings


def same_column_warnings(kept: Mapping[str, Sequence[FieldValues]], rows: int) -> list[Record]:
    """Return a warning for each group of fields that are the same column except for the names of its values."""
    groups: dict[bytes | None, list[str]] = {}
    for name, columns in kept.items():
        groups.setdefault(partition_digest(columns), []).append(name)
    groups.pop(None, None)
    warnings = []
    for names in (names for names in groups.values() if len(names) > 1):
        text = (
            f"{', '.join(map(repr, names))} are the same column with other values, in all {rows:,} rows that were "
            f"compared; one of them is enough: {_must_drop(*names[1:])}"
        )
        warnings.append({"kind": "same column", "fields": names, "text": text})
    return warnings


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
    edges = quantile_edges(raw)
    return FieldValues(bin_numbers(raw, edges), np.arange(len(raw)), raw, edges)


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
