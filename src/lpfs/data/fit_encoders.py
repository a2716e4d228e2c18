"""Learning from the training days: ids and scales, which columns stay, and what the user should know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lpfs.data.days import DayAssigner
from lpfs.data.encoders import make_encoder
from lpfs.data.encoders.base import Encoder
from lpfs.data.passes import DayRows, LabelCopies, observe
from lpfs.data.planning import PrepareOptions, PreparePlan
from lpfs.data.progress import Reporter
from lpfs.errors import DataError

LOOKED_AT = 1000  # rows from which an error message quotes
UNCOVERED = 0.5  # share of the training values below which a vocabulary is called too small


@dataclass(frozen=True)
class FitResult:
    """What the training days showed.

    Args:
        encoders: one a field, finished.
        twins: {column: an earlier column that holds the same}.
        leaks: columns that tell the label in every row.
        rows: how many there were, after negatives were drawn.
        positives: how many of them are positive.

    """

    encoders: Sequence[Encoder]
    twins: Mapping[str, str]
    leaks: Sequence[str]
    rows: int
    positives: int


def new_encoders(job: PreparePlan, first: int = 0) -> list[Encoder]:
    """Return an encoder a field that has learned nothing; ``first`` is the number of the first training row."""
    return [make_encoder(each, job.options.seed, first) for each in job.plans if each.kind != "ignore"]


def observe_training_rows(parts: Iterable[DayRows], job: PreparePlan) -> FitResult:
    """Show the training period to an encoder a field."""
    encoders, label = new_encoders(job), job.options.label
    rows, positives, leaks = 0, 0, LabelCopies(each.name for each in encoders)

    def counted() -> Iterator[DayRows]:
        nonlocal rows, positives
        for part in parts:
            rows += part.frame.height
            positives += int(part.labels[label].sum())
            leaks.add(part.frame, part.labels[label])
            yield part

    twins = observe(counted(), encoders).result()
    return FitResult(encoders, twins, leaks.result(), rows, positives)


def select_encoders(job: PreparePlan, seen: FitResult, reporter: Reporter) -> tuple[list[Encoder], dict[str, str]]:
    """Return the encoders of the columns that stay, and why others do not; tell what the user should know."""
    options = job.options
    check_classes(job, seen.rows, seen.positives, reporter)
    for name in seen.leaks:
        reporter.say(f"column {name!r} tells the label in every training row: it knows the answer; ignore it?")
    dropped = {}
    for each in seen.encoders if seen.rows > 1 else ():  # one row says nothing about others
        if each.constant:
            dropped[each.name] = "constant in the training days"
        elif each.name in seen.twins:
            dropped[each.name] = f"the same as {seen.twins[each.name]!r} in the training days"
    kept = [each for each in seen.encoders if options.keep_all or each.name not in dropped]
    if not kept:
        raise DataError(
            f"{job.source.files[0]}: every column is constant in the training days; "
            "give more rows or other training days, or keep all columns (--keep-all, keep_all=True)"
        )
    _report_dropped(dropped, reporter, kept=options.keep_all)
    _warn_small_vocabularies(kept, reporter)
    return kept, dropped


def training_days(clock: DayAssigner, options: PrepareOptions) -> int:
    """Return how many of the first days vocabularies and scales come from."""
    if clock.roles:
        there = len(clock.roles["train"])
        if not there:
            raise DataError(f"the split column {options.split!r}: no row is for training; there are {clock.days}")
        default = there
    else:
        there = len(clock.days)
        default = max(1, there - 1)
    if options.train is not None and options.train > there:
        raise DataError(
            f"train: {options.train} training days, but there are {there}; give more rows, or fewer such days"
        )
    return default if options.train is None else options.train


def columns_to_read(job: PreparePlan, encoders: Sequence[Encoder]) -> list[str]:
    """Return the columns to read, each once."""
    options = job.options
    targets = [options.label, *options.tasks] if job.labelled else []
    roles = [name for name in (options.time, options.split) if name is not None]
    return list(dict.fromkeys([*targets, *roles, *(each.name for each in encoders)]))


def check_classes(job: PreparePlan, rows: int, positives: int, reporter: Reporter) -> None:
    """Refuse a positive value that never occurs; say when all training labels are the same."""
    label, positive = job.options.label, job.options.positive
    if positives in (0, rows):
        if positive is not None and not positives:
            found = job.source.sample(LOOKED_AT)[label].unique(maintain_order=True).head(5).to_list()
            raise DataError(
                f"label {label!r}: no row of the training days holds {positive!r}; "
                f"the first rows hold {', '.join(map(repr, found))}"
            )
        reporter.say(f"label {label!r} is {int(positives > 0)} in every training row: nothing to learn from")


def _report_dropped(dropped: Mapping[str, str], reporter: Reporter, *, kept: bool) -> None:
    """Say which columns hold nothing new, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in dropped.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        verb = "kept on request" if kept else "dropped"
        reporter.say(f"{verb}, {why}: {', '.join(map(repr, names))}")


def _warn_small_vocabularies(encoders: list[Encoder], reporter: Reporter) -> None:
    """Say where a cap or a threshold leaves most values without an id of their own."""
    small = [
        f"{each.name!r} ({each.cardinality - 2:,} of {about['values_seen']:,} values, "
        f"{about['covered']:.0%} of rows)"
        for each in encoders
        if (about := each.metadata()).get("covered", 1.0) < UNCOVERED
    ]
    if small:
        reporter.say(
            f"most rows of {len(small)} column{'s' * (len(small) > 1)} share the id of unseen values: "
            f"{', '.join(small)}; raise max_values, lower min_count, or hash"
        )
