"""Fitting encoders on the training days: which columns are dropped, and what is reported to the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lpfs._console import Console
from lpfs._text import quote_command
from lpfs.data.days import DayAssigner
from lpfs.data.encoders import make_encoder
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import finish_together, group_encoders
from lpfs.data.passes import DayRows, DuplicateColumns, LabelCopies, hash_arrays, make_pool, map_fields
from lpfs.data.planning import PrepareOptions, PreparePlan
from lpfs.data.store.format import FIRST_ID
from lpfs.errors import DataError

QUOTED_ROWS = 1000  # first rows from which an error message quotes label values
MAX_LISTED = 12  # near-unique columns that are named
MIN_COVERED = 0.5  # share of the training values below which a vocabulary is reported as too small


@dataclass(frozen=True)
class FitResult:
    """Result of a pass over the training days."""

    encoders: Sequence[Encoder]  # one fitted encoder per field
    duplicates: Mapping[str, str]  # {column: an earlier column with the same content}
    label_copies: Sequence[str]  # columns that determine the label in every row
    rows: int  # after sampling of negatives
    positives: int


def training_days(assigner: DayAssigner, options: PrepareOptions) -> int:
    """Return the number of first days on which vocabularies and scales are fitted."""
    available = len(assigner.roles["train"] if assigner.roles else assigner.days)
    if not available:
        raise DataError(f"the split column {options.split!r}: no row is for training; the days are {assigner.days}")
    if options.train is None:
        return available if assigner.roles else max(1, available - 1)
    if options.train > available:
        raise DataError(f"train: {options.train} training days, but there are {available}; give fewer, or more rows")
    return options.train


def new_encoders(plan: PreparePlan, first: int = 0) -> list[Encoder]:
    """Return one unfitted encoder per field; ``first`` is the number of the first training row it observes."""
    return [make_encoder(field, plan.options.seed, first) for field in plan.plans if field.kind != "ignore"]


def columns_to_read(plan: PreparePlan, encoders: Sequence[Encoder]) -> list[str]:
    """Return the columns to read, each once."""
    options = plan.options
    targets = [options.label, *options.tasks] if plan.labelled else []
    roles = [name for name in (options.time, options.split) if name is not None]
    return list(dict.fromkeys([*targets, *roles, *(encoder.name for encoder in encoders)]))


def observe_training_rows(parts: Iterable[DayRows], plan: PreparePlan) -> FitResult:
    """Fit one encoder per field on the training rows."""
    encoders, rows, positives = new_encoders(plan), 0, 0
    duplicates, copies = DuplicateColumns(encoders), LabelCopies(encoder.name for encoder in encoders)
    with make_pool() as pool:
        for part in parts:
            labels = part.labels[plan.options.label]
            rows, positives = rows + part.frame.height, positives + int(labels.sum())
            copies.add(part.frame, labels)

            def observe_field(encoder: Encoder, part: DayRows = part) -> bytes | None:
                signature = encoder.observe(part.frame[encoder.name], part.locate)
                return hash_arrays(signature()) if duplicates.needs(encoder.name) else None

            digests = map_fields(pool, encoders, observe_field, part.frame.height)
            duplicates.add({name: digest for name, digest in digests.items() if digest is not None})
        list(pool.map(finish_together, group_encoders(encoders)))
    return FitResult(encoders, duplicates.result(), copies.result(), rows, positives)


def select_encoders(plan: PreparePlan, fit: FitResult, console: Console) -> tuple[list[Encoder], dict[str, str]]:
    """Return the encoders of the columns that are kept, and the reason for each dropped one; report problems."""
    keep_all = plan.options.keep_all
    _check_labels(plan, fit, console)
    for name in fit.label_copies:
        console.message(f"column {name!r} determines the label in every training row: a leak? ignore it if so")
    dropped = {}
    for encoder in fit.encoders if fit.rows > 1 else ():  # with a single row every column is constant
        if encoder.constant:
            dropped[encoder.name] = "constant in the training days"
        elif encoder.name in fit.duplicates:
            dropped[encoder.name] = f"the same as {fit.duplicates[encoder.name]!r} in the training days"
    kept = [encoder for encoder in fit.encoders if keep_all or encoder.name not in dropped]
    if not kept:
        raise DataError(
            f"{plan.source.files[0]}: every column is constant in the training days; "
            "give more rows or other training days, or keep all columns (--keep-all, keep_all=True)"
        )
    for reason in dict.fromkeys(dropped.values()):
        names = ", ".join(repr(name) for name in dropped if dropped[name] == reason)
        console.message(f"{'kept on request' if keep_all else 'dropped'}, {reason}: {names}")
    _report_near_unique(kept, console)
    _warn_small_vocabularies([encoder for encoder in kept if not encoder.near_unique], console)
    return kept, dropped


def _check_labels(plan: PreparePlan, fit: FitResult, console: Console) -> None:
    """Raise DataError if the positive value never occurs; report if all training labels are equal."""
    label, positive = plan.options.label, plan.options.positive
    if positive is not None and not fit.positives:
        values = plan.source.sample(QUOTED_ROWS)[label].unique(maintain_order=True).head(5).to_list()
        raise DataError(
            f"label {label!r}: no row of the training days holds {positive!r}; "
            f"the first rows hold {', '.join(map(repr, values))}"
        )
    if fit.positives in (0, fit.rows):
        console.message(f"label {label!r} is {int(fit.positives > 0)} in every training row: no model can be trained")


def _report_near_unique(encoders: list[Encoder], console: Console) -> None:
    """Name the fields with another value in most rows."""
    fields = [encoder for encoder in encoders if encoder.near_unique]
    for encoder in fields[:MAX_LISTED]:
        kept = f"{encoder.cardinality - FIRST_ID:,} of {encoder.metadata()['values_seen']:,} values have an id"
        if encoder.plan.min_count is None:
            kept += ", those seen once share that of unseen values (--min-count 1 keeps them)"
        ignore = quote_command("--kind", f"{encoder.name}=ignore")
        console.message(f"near-unique: {encoder.name!r}: {kept}; leave it out with {ignore}")
    if len(fields) > MAX_LISTED:
        console.message(f"near-unique: {len(fields) - MAX_LISTED} more columns; --dry-run --json lists them")


def _warn_small_vocabularies(encoders: list[Encoder], console: Console) -> None:
    """Report fields where ``max_values`` or ``min_count`` leaves most rows without an id of their value."""
    small = [
        f"{encoder.name!r} ({encoder.cardinality - 2:,} of {metadata['values_seen']:,} values, "
        f"{metadata['covered']:.0%} of rows)"
        for encoder in encoders
        if (metadata := encoder.metadata()).get("covered", 1.0) < MIN_COVERED
    ]
    if small:
        console.message(
            f"most rows of {len(small)} column{'s' * (len(small) > 1)} share the id of unseen values: "
            f"{', '.join(small)}; raise max_values, lower min_count, or hash"
        )
