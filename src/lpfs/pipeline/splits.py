"""DataSplits: which rows pretrain, search, validate and test. StagePlan: how many steps each stage takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lpfs._validation import check_int
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError

# Splits of a Dataset
SEARCH_FRACTION = 5 / 24  # of the days, as in the paper: days 18 to 22 of 24
ROW_FRACTIONS = (0.7, 0.2, 0.1)  # early, search and test rows of a Dataset with fewer than three days
HOLDOUT_DIVISOR = 10  # at least the last tenth of the search period is held out for validation
SHUFFLED_PARTS = 20  # parts of a table that is split at random
SEARCH_PARTS, VALID_PARTS, TEST_PARTS = 4, 2, 2  # of these 20
MIN_ROWS = 100  # of a table that is split by rows

# Validation and test rows, on which models are compared
ENOUGH_FRACTION, ENOUGH_ROWS = 0.1, 5000  # they are a tenth of all rows or 5,000, whichever is less, …
ENOUGH_LABELS = 200  # … and have this many positives and negatives, …
MAX_FRACTION = 0.2  # … unless that needs more than a fifth of all rows
VERDICT_LABELS = 50  # positives and negatives below which nothing is decided
REFUSED_LABELS = 10  # below which a run is refused without --force
GROWTH_STEPS = 16  # sizes of the validation period that are tried between the smallest and the largest

# Steps of a stage
BATCH_SIZE = 512  # as in the paper
MIN_BATCH_SIZE = 64
MIN_PRETRAIN_STEPS = 2000
MIN_SEARCH_STEPS = 2000
MIN_GATE_BATCH_SIZE = 512  # if gates and weights are trained on different rows
REPEAT_THRESHOLD = 1.2  # passes over the search rows above which gates and weights are trained on different rows
MAX_LR_FACTOR = 3.0  # of the weights in such a search, which is short for them
PASSES_AT_FULL_RATE = 2  # with more passes over their rows the factor decreases in proportion
# steps of a search that reads the search rows once -> smallest batch size for that many steps
PASS_BATCH_SIZES = {600: 8, 100: 2}


@dataclass(frozen=True)
class DataSplits:
    """Consecutive rows of a Dataset, in time order."""

    early: Dataset  # to pretrain on
    search: Dataset  # to search on
    valid: Dataset  # the last tenth of the search period, held out: every choice is made on these rows
    test: Dataset  # read once, at the end
    train: Dataset  # early and search rows together, to retrain on

    @property
    def shuffled(self) -> bool:
        """Whether the rows were split at random, so that their order means nothing."""
        return is_shuffled(self.train)

    def to_json(self) -> dict[str, object]:
        """Return the number of rows and of positives and the first and last day of each split."""
        return {
            name: {"rows": rows.rows, "days": [rows.days()[0], rows.days()[-1]], "positives": rows.label_counts()[0]}
            for name, rows in vars(self).items()
        }

    def describe(self) -> list[str]:
        """Return one line for each split that is not part of another one."""
        lines = []
        for name, label in (("early", "pretraining"), ("search", "search"), ("valid", "validation"), ("test", "test")):
            rows: Dataset = getattr(self, name)
            first, last, noun = rows.days()[0], rows.days()[-1], "part" if self.shuffled else "day"
            days = f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
            lines.append(f"  {label}: {rows.rows:,} rows, {rows.label_counts()[0]:,} positives, {days}")
        return lines

    def fewest_labels(self) -> tuple[str, int, str]:
        """Return which of the validation and test rows have the fewest rows of one class, how many, and the class."""
        counts = [
            (count, name, label)
            for name, rows in (("test", self.test), ("validation", self.valid))
            for count, label in zip(rows.label_counts(), ("positive", "negative"), strict=True)
        ]
        count, name, label = min(counts, key=lambda item: item[0])
        return name, count, f"{label}{'s' * (count != 1)}"

    def few_labels(self) -> str | None:
        """Return why nothing can be decided on these rows; None if they have enough rows of both classes."""
        name, count, label = self.fewest_labels()
        if count >= VERDICT_LABELS:
            return None
        return f"the {name} rows have {count} {label}; at least {VERDICT_LABELS} are needed"

    def check_labels(self, force: bool = False) -> None:
        """Raise InputError if a split has one class only, or too few rows of one class to compare models."""
        for split in ("early", "search", "valid", "test"):
            rows: Dataset = getattr(self, split)
            positives, negatives = rows.label_counts()
            if not positives or not negatives:
                raise InputError(
                    f"the {split} rows ({rows.rows:,}) are all of one class ({positives:,} positive), so nothing can "
                    "be trained or evaluated there; give more rows, another time column, or a split column"
                )
        name, count, label = self.fewest_labels()
        if count < REFUSED_LABELS and not force:
            raise InputError(
                f"the {name} rows have {count} {label}, and with fewer than {REFUSED_LABELS} no result can be "
                "checked; give more rows, another time column or a split column, or run anyway with --force"
            )


def split_dataset(dataset: Dataset) -> DataSplits:
    """Split a Dataset in time order: the last days test, the days before them search, the others pretrain.

    24 days become 18, 5 and 1, as in the paper, and half of the 23rd validates, if these rows suffice to compare
    models: a tenth of all rows or 5,000, and 200 of each class. Otherwise the test and the validation period become
    longer, up to a fifth of all rows each. A Dataset with a split column (train, valid, test) is split by it. With
    fewer than three days the rows are split by number. Rows that were split into 20 parts at random keep whole parts:
    12 to pretrain, 4 to search, 2 or more to validate and to test.
    """
    roles = dataset.settings.get("split")
    if roles is not None:
        return _split_by_column(dataset, roles)
    days = len(dataset.days())
    has_parts = is_shuffled(dataset) and days >= SHUFFLED_PARTS
    if dataset.rows < MIN_ROWS and (has_parts or days < 3):
        raise InputError(f"{dataset.rows} rows are too few to select fields on; at least {MIN_ROWS} are needed")
    sizes = [day.rows for day in dataset.table]
    if has_parts:
        test = _count_parts(dataset, sizes, dataset.rows, TEST_PARTS)
        stop = sum(sizes[:-test])
        return _split_shuffled(dataset, sizes[:-test], dataset.part(stop, dataset.rows))
    if days >= 3:
        starts = [sum(sizes[:day]) for day in range(2, days)]
        stop = _judging_start(dataset, dataset.rows, starts[::-1])
        left = sum(start < stop for start in (0, *starts)) + (sizes[0] < stop)  # days before the test period
        search_days = min(left - 1, max(1, round(days * SEARCH_FRACTION)))
        early = sum(sizes[: left - search_days])
    else:
        early, stop = (round(share * dataset.rows) for share in (ROW_FRACTIONS[0], sum(ROW_FRACTIONS[:2])))
        stop = _judging_start(dataset, dataset.rows, [stop])
    return _split_with_holdout(dataset, early, stop, dataset.part(stop, dataset.rows))


def split_all_rows(dataset: Dataset) -> DataSplits:
    """Split a Dataset to search on all rows; the last tenth is held out for validation, and there is no test set.

    If the rows are read more than once, gates are trained on a quarter of them and weights on the others.
    """
    stop = dataset.rows - max(1, dataset.rows // HOLDOUT_DIVISOR)
    if stop < 1:
        raise InputError(f"{dataset.rows} rows are too few to search and to validate on")
    edge = stop * 3 // 4
    valid = dataset.part(stop, dataset.rows)
    return DataSplits(dataset.part(0, max(1, edge)), dataset.part(edge, stop), valid, valid, dataset.part(0, stop))


def is_shuffled(dataset: Dataset) -> bool:
    """Return whether the rows were split into days at random."""
    return bool(dataset.settings.get("options", {}).get("shuffle"))


def _can_judge(rows: Dataset, total: int) -> bool:
    """Return whether models can be compared on these rows of a Dataset with ``total`` rows."""
    is_long = rows.rows >= min(ENOUGH_ROWS, ENOUGH_FRACTION * total)
    return is_long and min(rows.label_counts()) >= ENOUGH_LABELS


def _judging_start(dataset: Dataset, stop: int, starts: Sequence[int]) -> int:
    """Return the first row of the shortest period before ``stop`` on which models can be compared.

    It starts at the first of ``starts``, which descend, or before it, but does not become longer than a fifth of all
    rows.
    """
    limit = min(starts[0], stop - int(MAX_FRACTION * dataset.rows))
    for start in starts:
        if start <= limit or _can_judge(dataset.part(start, stop), dataset.rows):
            return max(start, limit)
    return limit


def _count_parts(dataset: Dataset, sizes: Sequence[int], stop: int, least: int) -> int:
    """Return how many of the last random parts before ``stop`` are needed to compare models, at least ``least``."""
    most = max(least, int(MAX_FRACTION * SHUFFLED_PARTS))
    for count in range(least, most):
        if _can_judge(dataset.part(stop - sum(sizes[-count:]), stop), dataset.rows):
            return count
    return most


def _split_by_column(dataset: Dataset, roles: dict[str, list[str]]) -> DataSplits:
    """Split by the roles of a split column: days of training rows first, then valid, then test."""
    rows = {role: sum(day.rows for day in dataset.table if day.name in days) for role, days in roles.items()}
    train, valid, test = (rows.get(role, 0) for role in ("train", "valid", "test"))
    if not train or not (valid or test):
        raise InputError(f"the split column must have training rows and test rows, found {rows}")
    if not test:
        valid, test = 0, valid
    early = round(train * (1 - SEARCH_FRACTION - 1 / 24))
    test_rows = dataset.part(train + valid, train + valid + test)
    sizes = [day.rows for day in dataset.table if day.name in roles["train"]]
    if not valid and is_shuffled(dataset) and len(sizes) >= SHUFFLED_PARTS:
        return _split_shuffled(dataset, sizes, test_rows)
    if not valid:
        return _split_with_holdout(dataset, early, train, test_rows)
    return _split_at(dataset, early, train, train + valid, test_rows)


def _split_shuffled(dataset: Dataset, sizes: list[int], test: Dataset) -> DataSplits:
    """Split at whole parts of a random split: the last ones validate, those before them search."""
    valid = _count_parts(dataset, sizes, sum(sizes), VALID_PARTS)
    early, search = sum(sizes[: -SEARCH_PARTS - valid]), sum(sizes[:-valid])
    return _split_at(dataset, early, search, sum(sizes), test)


def _split_with_holdout(dataset: Dataset, early: int, stop: int, test: Dataset) -> DataSplits:
    """Hold out the last tenth of the search period, or more if that cannot judge.

    The search then starts earlier, so that it has as many rows, up to its fraction of all rows.
    """
    tenth = max(1, (stop - early) // HOLDOUT_DIVISOR)
    least = max(1, stop - max(tenth, int(min(ENOUGH_ROWS, ENOUGH_FRACTION * dataset.rows))))
    most = max(1, min(least, stop - int(MAX_FRACTION * dataset.rows)))
    step = max(1, (least - most) // GROWTH_STEPS)
    valid = _judging_start(dataset, stop, [*range(least, most, -step), most])
    wanted = max(1, min(stop - early - tenth, round(dataset.rows * SEARCH_FRACTION * (1 - 1 / HOLDOUT_DIVISOR))))
    if stop - valid > tenth:
        early = min(early, max(1, valid - wanted))
    if valid <= early or early < 1:
        raise InputError(f"{dataset.rows} rows are too few to pretrain, search, validate and test on")
    return _split_at(dataset, early, valid, stop, test)


def _split_at(dataset: Dataset, early: int, search: int, valid: int, test: Dataset) -> DataSplits:
    return DataSplits(
        dataset.part(0, early), dataset.part(early, search), dataset.part(search, valid), test, dataset.part(0, search)
    )


def auc_standard_error(rows: Dataset, auc: float = 0.75) -> float:
    """Return the standard error of an AUC on these rows (Hanley and McNeil, 1982); 0.5 with one class only."""
    positives, negatives = rows.label_counts()
    if not positives or not negatives:
        return 0.5
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    variance = auc * (1 - auc) + (positives - 1) * (q1 - auc * auc) + (negatives - 1) * (q2 - auc * auc)
    return math.sqrt(variance / (positives * negatives))


@dataclass(frozen=True)
class StagePlan:
    """Steps and batch sizes of every stage.

    If the search rows would be read more than once, gates are trained on the search rows and weights on the early rows,
    so that no gate depends on rows that the weights have memorized.
    """

    batch_size: int  # rows per step
    pretrain: int  # steps on the early rows
    search: int  # steps of the search
    train: int  # steps of a training from scratch on early and search rows
    hot_start: int  # steps that the pruned model is trained further
    shuffle: bool  # whether rows are read more than once, each time in another order
    separate_gate_rows: bool  # whether gates and weights are trained on different rows
    gate_batch_size: int  # rows per step of the gates if their rows are separate
    lr_factor: float  # on the learning rate of the weights during the search

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def single_pass(self, rows: int) -> StagePlan:
        """Return the steps of a search that reads its ``rows`` once at the learning rate of pretraining.

        Batches become smaller, rather than passes more, until the pass has 600 steps, or 100 if it has very few rows.
        """
        size = self.batch_size
        for steps, smallest in PASS_BATCH_SIZES.items():
            while size > smallest and rows // size < min(steps, self.search):
                size = max(smallest, size // 2)
        search = max(1, min(self.search, -(-rows // size)))
        return replace(self, batch_size=size, search=search, separate_gate_rows=False, lr_factor=1.0)


def plan_stages(
    splits: DataSplits,
    batch_size: int | None = None,
    pretrain_steps: int | None = None,
    search_steps: int | None = None,
) -> StagePlan:
    """Return how to train on these rows.

    A large log is read once in time order, 512 rows per step, and the search takes a quarter of the steps of
    pretraining. A small table is read several times, shuffled, in smaller batches, so that pretraining and search
    have 2,000 steps each.
    """
    for name, value in (("batch_size", batch_size), ("pretrain_steps", pretrain_steps), ("search_steps", search_steps)):
        if value is not None:
            check_int(name, value, 1)
    rows = splits.early.rows
    if batch_size is None:
        batch_size = BATCH_SIZE
        while batch_size > MIN_BATCH_SIZE and rows // batch_size < MIN_PRETRAIN_STEPS // 2:
            batch_size //= 2
    one_pass = -(-rows // batch_size)
    pretrain = pretrain_steps or max(one_pass, MIN_PRETRAIN_STEPS)
    search = search_steps or max(round(pretrain / 4), MIN_SEARCH_STEPS)
    train = max(1, round(pretrain * splits.train.rows / rows))
    separate = search * batch_size > REPEAT_THRESHOLD * splits.search.rows
    return StagePlan(
        batch_size,
        pretrain,
        search,
        train,
        hot_start=max(1, round(train / 4)),
        shuffle=splits.shuffled or pretrain > one_pass,
        separate_gate_rows=separate,
        gate_batch_size=max(batch_size, MIN_GATE_BATCH_SIZE),
        lr_factor=search_lr_factor(search * batch_size, rows) if separate else 1.0,
    )


def search_lr_factor(rows_seen: int, rows: int) -> float:
    """Return the factor on the learning rate of weights that see ``rows_seen`` rows out of ``rows``.

    >>> search_lr_factor(200, 100), search_lr_factor(400, 100)
    (3.0, 1.5)
    """
    return MAX_LR_FACTOR * min(1.0, PASSES_AT_FULL_RATE * rows / rows_seen)
