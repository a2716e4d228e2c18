"""Fitting encoders on the training days: which columns are dropped, and what is reported to the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lpfs._console import Console
from lpfs.data.days import DayAssigner
from lpfs.data.encoders import make_encoder
from lpfs.data.encoders.base import Encoder
from lpfs.data.passes import DayRows, LabelCopies, observe
from lpfs.data.planning import PrepareOptions, PreparePlan
from lpfs.errors import DataError

QUOTED_ROWS = 1000  # first rows from which an error message quotes label values
MIN_COVERED = 0.5  # share of the training values below which a vocabulary is reported as too small


@dataclass(frozen=True)
class FitResult:
    """Result of a pass over the training days.

    Args:
        encoders: one fitted encoder per field.
        duplicates: {column: an earlier column with the same content}.
        label_copies: columns that determine the label in every row.
        rows: number of rows, after sampling of negatives.
        positives: number of positive rows.
    """

    encoders: Sequence[Encoder]
    duplicates: Mapping[str, str]
    label_copies: Sequence[str]
    rows: int
    positives: int


def training_days(assigner: DayAssigner, options: PrepareOptions) -> int:
    """Return the number of first days on which vocabularies and scales are fitted."""
    if assigner.roles:
        default = available = len(assigner.roles["train"])
        if not available:
            raise DataError(f"the split column {options.split!r}: no row is for training; the days are {assigner.days}")
    else:
        available = len(assigner.days)
        default = max(1, available - 1)
    if options.train is not None and options.train > available:
        raise DataError(
            f"train: {options.train} training days, but there are {available}; give more rows, or fewer such days"
        )
    return default if options.train is None else options.train


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
    encoders, label = new_encoders(plan), plan.options.label
    rows, positives, copies = 0, 0, LabelCopies(encoder.name for encoder in encoders)

    def counted() -> Iterator[DayRows]:
        nonlocal rows, positives
        for part in parts:
            rows += part.frame.height
            positives += int(part.labels[label].sum())
            copies.add(part.frame, part.labels[label])
            yield part

    duplicates = observe(counted(), encoders).result()
    return FitResult(encoders, duplicates, copies.result(), rows, positives)


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
    _report_dropped(dropped, console, kept=keep_all)
    _warn_small_vocabularies(kept, console)
    return kept, dropped


def _check_labels(plan: PreparePlan, fit: FitResult, console: Console) -> None:
    """Raise DataError if the positive value never occurs; report if all training labels are equal."""
    label, positive = plan.options.label, plan.options.positive
    if fit.positives in (0, fit.rows):
        if positive is not None and not fit.positives:
            values = plan.source.sample(QUOTED_ROWS)[label].unique(maintain_order=True).head(5).to_list()
            raise DataError(
                f"label {label!r}: no row of the training days holds {positive!r}; "
                f"the first rows hold {', '.join(map(repr, values))}"
            )
        console.message(f"label {label!r} is {int(fit.positives > 0)} in every training row: no model can be trained")


def _report_dropped(dropped: Mapping[str, str], console: Console, *, kept: bool) -> None:
    """Report columns without information, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in dropped.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        verb = "kept on request" if kept else "dropped"
        console.message(f"{verb}, {reason}: {', '.join(map(repr, names))}")


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
