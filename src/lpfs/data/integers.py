"""Integers with many values: ids or an amount, by what predicts the label better on held-out training rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs._console import Console
from lpfs._text import quote_command
from lpfs.data.bins import Numbers
from lpfs.data.days import DayAssigner
from lpfs.data.encoders.numeric import MAX_BINS, MIN_BINS, ROWS_PER_BIN
from lpfs.data.fields import FieldPlan
from lpfs.data.parsing import cast_column, parse_numbers
from lpfs.data.passes import DayRows, day_rows, make_pool
from lpfs.data.planning import PreparePlan

SAMPLE_ROWS = 50_000  # first training rows that decide
MIN_ROWS = 1000  # training rows below which integers stay an amount
BLOCKS = 64  # consecutive parts of the sample; every second one is held out
PRIOR_ROWS = 20.0  # rows of the mean rate that are added to those of each value
MIN_Z = 3.0  # standard errors by which ids must be better than an amount
MAX_LISTED = 12  # columns listed in a message


@dataclass(frozen=True)
class EncodingLosses:
    """Logloss on held-out rows of the click rates by value, and by quantile bin."""

    ids: float
    amount: float
    z: float  # difference in standard errors, positive if ids are better
    rows: int  # held out

    def describe(self) -> str:
        """Return the reason for the choice."""
        return f"logloss on {self.rows:,} held-out rows: {self.ids:.4f} as ids, {self.amount:.4f} as an amount"


def decide_integers(plan: PreparePlan, assigner: DayAssigner, days: set[int], console: Console) -> PreparePlan:
    """Return the plan with integers as ids where that predicts the label better; prints the reasons.

    ``days`` are the training days. Only their first ``SAMPLE_ROWS`` rows are read.
    """
    fields = {field.name: field for field in plan.plans if field.decided_by_label}
    if not fields:
        return plan
    options = plan.options
    roles = [name for name in (options.label, *options.tasks, options.time, options.split) if name is not None]
    chunks = plan.source.chunks(list(dict.fromkeys([*roles, *fields])), assigner.files(days))
    frame, labels = _first_rows(day_rows(chunks, assigner, options, days), options.label)
    if len(labels) < MIN_ROWS or labels.all() or not labels.any():
        return plan

    def compare(field: FieldPlan) -> EncodingLosses:
        column = frame[field.name]
        is_text = column.dtype == pl.String
        numbers = (
            parse_numbers(column, field.decimal or ".") if is_text else cast_column(column, pl.Float64, strict=False)
        )
        return compare_encodings(numbers.to_numpy(), labels)

    with make_pool() as pool:
        losses = dict(zip(fields, pool.map(compare, fields.values()), strict=True))
    ids = [name for name, loss in losses.items() if loss.z > MIN_Z]
    for name in ids[:MAX_LISTED]:
        console.message(
            f"column {name!r}: ids, not an amount: {losses[name].describe()}; to overrule: "
            f"{quote_command('--kind', f'{name}=numeric')}"
        )
    if len(ids) > MAX_LISTED:
        console.message(f"ids, not amounts: {len(ids) - MAX_LISTED} more columns; --dry-run lists them")
    amounts = [name for name in fields if name not in ids]
    if amounts:
        listed = ", ".join(map(repr, amounts[:MAX_LISTED])) + " …" * (len(amounts) > MAX_LISTED)
        console.message(f"integers kept as amounts, ids do not predict the label better: {listed}")

    def decided(field: FieldPlan) -> FieldPlan:
        if field.name not in fields:
            return field
        why = f"{field.why}; {losses[field.name].describe()}"
        if field.name not in ids:
            return replace(field, why=why)
        return options.apply_defaults(replace(field, kind="categorical", bins=None, decimal=None, why=why))

    return replace(plan, plans=tuple(decided(field) for field in plan.plans))


def _first_rows(parts: Iterable[DayRows], label: str) -> tuple[pl.DataFrame, npt.NDArray[np.uint8]]:
    """Return the first ``SAMPLE_ROWS`` rows and their labels."""
    frames: list[pl.DataFrame] = []
    labels: list[npt.NDArray[np.uint8]] = []
    for part in parts:
        frames.append(part.frame)
        labels.append(part.labels[label])
        if sum(map(len, labels)) >= SAMPLE_ROWS:
            break
    if not frames:
        return pl.DataFrame(), np.empty(0, np.uint8)
    return pl.concat(frames, how="vertical_relaxed").head(SAMPLE_ROWS), np.concatenate(labels)[:SAMPLE_ROWS]


def compare_encodings(numbers: Numbers, labels: npt.NDArray[np.uint8]) -> EncodingLosses:
    """Compare click rates by value with those by quantile bin, fitted on every second block of rows."""
    fitted = np.arange(len(labels)) * BLOCKS // len(labels) % 2 == 0
    present = numbers[fitted & ~np.isnan(numbers)]
    bins = min(MAX_BINS, max(MIN_BINS, len(labels) // ROWS_PER_BIN))
    edges = np.unique(np.quantile(present, np.arange(1, bins) / bins)) if len(present) else present
    _, values = np.unique(numbers, return_inverse=True)  # NaN, a missing number, is one value
    ids = _held_out_loss(values, labels, fitted)
    amount = _held_out_loss(np.searchsorted(edges, numbers, side="right"), labels, fitted)
    difference = amount - ids
    error = float(difference.std()) / max(1.0, len(difference)) ** 0.5
    z = float(difference.mean()) / error if error > 0 else 0.0
    return EncodingLosses(float(ids.mean()), float(amount.mean()), z, len(difference))


def _held_out_loss(
    codes: npt.NDArray[np.int64], labels: npt.NDArray[np.uint8], fitted: npt.NDArray[np.bool_]
) -> Numbers:
    """Return the logloss of each row that is not fitted, with the smoothed click rate of its code."""
    size, mean = int(codes.max()) + 1, labels[fitted].mean()
    counts = np.bincount(codes[fitted], minlength=size)
    clicks = np.bincount(codes[fitted], labels[fitted], minlength=size)
    rates = np.clip((clicks + PRIOR_ROWS * mean) / (counts + PRIOR_ROWS), 1e-6, 1 - 1e-6)[codes[~fitted]]
    losses: Numbers = -np.log(np.where(labels[~fitted] == 1, rates, 1 - rates))
    return losses
