"""DataSplits: which rows pretrain, search, validate and test. StagePlan: how many steps each stage takes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lpfs._validation import check_int
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError

# Splits of a Dataset
SEARCH_FRACTION = 5 / 24  # of the days, as in the paper: days 18 to 22 of 24
ROW_FRACTIONS = (0.7, 0.2, 0.1)  # early, search and test rows of a Dataset with fewer than three days
HOLDOUT_DIVISOR = 10  # the last tenth of the search period is held out for validation
SHUFFLED_PARTS = 20  # parts of a table that is split at random
SEARCH_PARTS, VALID_PARTS, TEST_PARTS = 4, 2, 2  # of these 20
MIN_ROWS = 100  # of a table that is split by rows

# Steps of a stage
BATCH_SIZE = 512  # as in the paper
MIN_BATCH_SIZE = 64
MIN_PRETRAIN_STEPS = 2000
MIN_SEARCH_STEPS = 2000
MIN_GATE_BATCH_SIZE = 512  # if gates and weights are trained on different rows
REPEAT_THRESHOLD = 1.2  # passes over the search rows above which gates and weights are trained on different rows
MAX_LR_FACTOR = 3.0  # of the weights in such a search, which is short for them
PASSES_AT_FULL_RATE = 2  # with more passes over their rows the factor decreases in proportion


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
        """Return the number of rows and the first and last day of each split."""
        return {
            name: {"rows": rows.rows, "days": [rows.days()[0], rows.days()[-1]]} for name, rows in vars(self).items()
        }


def split_dataset(dataset: Dataset) -> DataSplits:
    """Split a Dataset: the last day is the test set, the days before it search, the others pretrain.

    24 days become 18, 5 and 1, as in the paper; 9 days become 6, 2 and 1. A Dataset with a split column (train,
    valid, test) is split by it. With fewer than three days the rows are split by number. Rows that were split into
    20 parts at random keep whole parts: 12 to pretrain, 4 to search, 2 to validate, 2 to test.
    """
    roles = dataset.settings.get("split")
    if roles is not None:
        return _split_by_column(dataset, roles)
    days = len(dataset.days())
    has_parts = is_shuffled(dataset) and days >= SHUFFLED_PARTS
    if dataset.rows < MIN_ROWS and (has_parts or days < 3):
        raise InputError(f"{dataset.rows} rows are too few to select fields on; at least {MIN_ROWS} are needed")
    if has_parts:
        sizes = [day.rows for day in dataset.table][:-TEST_PARTS]
        return _split_shuffled(dataset, sizes, dataset.part(sum(sizes), dataset.rows))
    if days >= 3:
        search_days = min(days - 2, max(1, round(days * SEARCH_FRACTION)))
        early, search, test = dataset.split(days=(days - 1 - search_days, days - 1))
    else:
        early, search, test = dataset.split(*ROW_FRACTIONS)
    return _split_with_holdout(dataset, early.rows, early.rows + search.rows, test)


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
    early, search = sum(sizes[: -SEARCH_PARTS - VALID_PARTS]), sum(sizes[:-VALID_PARTS])
    return _split_at(dataset, early, search, sum(sizes), test)


def _split_with_holdout(dataset: Dataset, early: int, stop: int, test: Dataset) -> DataSplits:
    """Hold out the last tenth of the search period; more, up to a half, while that has one class only."""
    holdout = max(1, (stop - early) // HOLDOUT_DIVISOR)
    while 0 in dataset.part(stop - holdout, stop).label_counts() and holdout * 4 <= stop - early:
        holdout *= 2
    if stop - holdout <= early or early < 1:
        raise InputError(f"{dataset.rows} rows are too few to pretrain, search, validate and test on")
    return _split_at(dataset, early, stop - holdout, stop, test)


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
