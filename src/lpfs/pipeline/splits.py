"""Periods: which rows pretrain, which search, which choose and which judge.

Recipe: how long to train and in which steps, from the size of the data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.errors import InputError

SEARCH = 5 / 24  # part of the days that is searched on, as in the paper: days 18 to 22 of 24
ROW_FRACTIONS = (0.7, 0.2, 0.1)  # early, search and test rows where there are fewer than three days
HOLDOUT_DIVISOR = 10  # one in so many of the rows of the search period, the last ones, is held out for choices
SHUFFLED_PARTS = 20  # parts that a table is dealt to at random where nothing orders its rows …
SEARCH_PARTS, VALID_PARTS, TEST_PARTS = 4, 2, 2  # … so many of them to search on, to choose on, to judge on


@dataclass(frozen=True)
class DataSplits:
    """Consecutive parts of a Dataset, in time order.

    Args:
        early: rows to pretrain on.
        search: rows to search on.
        valid: the last tenth of the search period, held out: every choice is made there.
        test: rows that are read once, at the end.
        train: early and search together, to retrain on.

    """

    early: Dataset
    search: Dataset
    valid: Dataset
    test: Dataset
    train: Dataset

    @property
    def shuffled(self) -> bool:
        """Whether rows were dealt to the days at random; then they have no order worth keeping."""
        return is_shuffled(self.train)

    def to_json(self) -> dict[str, object]:
        """Return rows and days of each part."""
        return {
            name: {"rows": part.rows, "days": [part.days()[0], part.days()[-1]]}
            for name, part in vars(self).items()
        }


def split_dataset(dataset: Dataset) -> DataSplits:
    """Cut a Dataset: the last day judges, the days before it search, the rest pretrains.

    Of 24 days that is 18, 5 and 1, the paper's; of 9 it is 6, 2 and 1. A Dataset with a split of its own (train,
    valid, test) is cut as that says. With fewer than three days, rows count instead. Rows that were dealt to 20
    parts at random are cut at whole parts: 12, 4, 2 and 2.
    """
    split = dataset.settings.get("split")
    if split is not None:
        return _split_by_column(dataset, split)
    days = len(dataset.days())
    if is_shuffled(dataset) and days >= SHUFFLED_PARTS:
        _check_min_rows(dataset, 100)
        sizes = [day.rows for day in dataset.table]
        test = dataset.part(sum(sizes[:-TEST_PARTS]), dataset.rows)
        return _split_shuffled(dataset, sizes[:-TEST_PARTS], test)
    if days >= 3:
        searched = min(days - 2, max(1, round(days * SEARCH)))
        early, search, test = dataset.split(days=(days - 1 - searched, days - 1))
    else:
        _check_min_rows(dataset, 100)
        early, search, test = dataset.split(*ROW_FRACTIONS)
    return _split_with_holdout(dataset, early.rows, early.rows + search.rows, test)


def _split_by_column(dataset: Dataset, split: dict[str, list[str]]) -> DataSplits:
    """Cut as a column said: train days first, then valid, then test."""
    rows = {role: sum(day.rows for day in dataset.table if day.name in split.get(role, ())) for role in split}
    train, valid, test = (rows.get(role, 0) for role in ("train", "valid", "test"))
    if not train or not (valid or test):
        raise InputError(f"a split needs rows to train on and rows to test on, found {rows}")
    if not test:
        valid, test = 0, valid
    early = round(train * (1 - SEARCH - 1 / 24))
    judged = dataset.part(train + valid, train + valid + test)
    sizes = [day.rows for day in dataset.table if day.name in split["train"]]
    if not valid and is_shuffled(dataset) and len(sizes) >= SHUFFLED_PARTS:
        return _split_shuffled(dataset, sizes, judged)
    if not valid:
        return _split_with_holdout(dataset, early, train, judged)
    chosen = dataset.part(train, train + valid)
    return DataSplits(dataset.part(0, early), dataset.part(early, train), chosen, judged, dataset.part(0, train))


def is_shuffled(dataset: Dataset) -> bool:
    """Whether rows were dealt to the days at random."""
    return bool(dataset.settings.get("options", {}).get("shuffle"))


def _split_shuffled(dataset: Dataset, sizes: list[int], test: Dataset) -> DataSplits:
    """Cut at whole parts, each of them drawn at random: the last ones choose, those before them search."""
    early, edge, stop = sum(sizes[: -SEARCH_PARTS - VALID_PARTS]), sum(sizes[:-VALID_PARTS]), sum(sizes)
    return DataSplits(
        dataset.part(0, early), dataset.part(early, edge), dataset.part(edge, stop), test, dataset.part(0, edge)
    )


def _split_with_holdout(dataset: Dataset, early: int, stop: int, test: Dataset) -> DataSplits:
    """Hold the last tenth of the search period out; more of it, up to a half, where that holds one class only."""
    held = max(1, (stop - early) // HOLDOUT_DIVISOR)
    while has_one_class(dataset.part(stop - held, stop)) and held * 4 <= stop - early:
        held *= 2
    edge = stop - held
    if edge <= early or early < 1:
        raise InputError(f"{dataset.rows} rows are too few to pretrain, search, choose and test on")
    return DataSplits(
        dataset.part(0, early), dataset.part(early, edge), dataset.part(edge, stop), test, dataset.part(0, edge)
    )


def clicks(part: Dataset) -> tuple[int, int]:
    """Return how many rows there are with and without a click."""
    positive = sum(int(batch.labels[:, 0].sum()) for batch in part.stream(1 << 16, fields=[]))
    return positive, part.rows - positive


def has_one_class(part: Dataset) -> bool:
    """Say whether all rows are alike."""
    return 0 in clicks(part)


def auc_standard_error(part: Dataset, auc: float = 0.75) -> float:
    """Return the standard error of an AUC on these rows, by Hanley and McNeil (1982); 0.5 with one class."""
    positive, negative = clicks(part)
    if not positive or not negative:
        return 0.5
    above, below = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    spread = auc * (1 - auc) + (positive - 1) * (above - auc * auc) + (negative - 1) * (below - auc * auc)
    return math.sqrt(spread / (positive * negative))


def _check_min_rows(dataset: Dataset, rows: int) -> None:
    """Refuse a table that is too small to be cut."""
    if dataset.rows < rows:
        raise InputError(f"{dataset.rows} rows are too few to select fields on; {rows} is the least")


BATCH = 512  # the paper's
LEAST_BATCH = 64
LEAST_PRETRAIN = 2000
LEAST_SEARCH = 2000
REPEAT_THRESHOLD = 1.2  # passes over the search period from which on its rows are said to come again
LEAST_HELD = 512  # rows in a step of gates that have rows of their own
MAX_LR_FACTOR = (
    3.0  # how much faster the weights learn in a search on rows that come again: it is short for them …
)
PASSES_AT_FULL_RATE = 2  # … but where they go through their rows more often than so, slower in proportion


@dataclass(frozen=True)
class StagePlan:
    """Steps and batch sizes of every stage.

    Args:
        batch_size: rows in a step.
        pretrain: steps on the early rows.
        search: steps of the search.
        train: steps of a training from scratch on both.
        hot: steps that the pruned model goes on for.
        shuffle: whether rows are gone through more than once, in another order each time.
        apart: whether the search period is gone through more than once: then the gates alone learn from its rows,
            and the weights go on with the early ones, so that no gate feels what the weights know by heart.
        held: rows in a step of the gates where they learn apart.
        pace: factor on the learning rate of the weights in the search.

    """

    batch_size: int
    pretrain: int
    search: int
    train: int
    hot_start: int
    shuffle: bool
    separate_gate_rows: bool
    gate_batch_size: int
    lr_factor: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def plan_stages(
    parts: DataSplits,
    *,
    batch_size: int | None = None,
    pretrain_steps: int | None = None,
    search_steps: int | None = None,
) -> StagePlan:
    """Return how to train on these rows.

    A large log is gone through once in time order, 512 rows a step, and the search takes a quarter of the steps of
    pretraining. A small table is gone through several times, shuffled, in smaller batches, so that there are
    2,000 steps to pretrain and as many to search in.
    """
    for name, value in {
        "batch_size": batch_size,
        "pretrain_steps": pretrain_steps,
        "search_steps": search_steps,
    }.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} must be a whole number >= 1, found {value!r}")
    rows = parts.early.rows
    if batch_size is None:
        batch_size = BATCH
        while batch_size > LEAST_BATCH and rows // batch_size < LEAST_PRETRAIN // 2:
            batch_size //= 2
    once = -(-rows // batch_size)
    pretrain = pretrain_steps or max(once, LEAST_PRETRAIN)
    search = search_steps or max(round(pretrain / 4), LEAST_SEARCH)
    train = max(1, round(pretrain * parts.train.rows / rows))
    apart = search * batch_size > REPEAT_THRESHOLD * parts.search.rows
    return StagePlan(
        batch_size,
        pretrain,
        search,
        train,
        hot_start=max(1, round(train / 4)),
        shuffle=parts.shuffled or pretrain > once,
        separate_gate_rows=apart,
        gate_batch_size=max(batch_size, LEAST_HELD),
        lr_factor=lr_factor(search * batch_size, rows) if apart else 1.0,
    )


def lr_factor(seen: int, rows: int) -> float:
    """Return how much faster weights learn that see so many rows, out of so many different ones.

    >>> pace(200, 100), pace(400, 100)
    (3.0, 1.5)
    """
    return MAX_LR_FACTOR * min(1.0, PASSES_AT_FULL_RATE * rows / seen)


def split_all_rows(dataset: Dataset) -> DataSplits:
    """Search on all rows, the last tenth held out for choices; nothing is left to judge on.

    Where they are gone through several times, gates learn from a quarter of them and weights from the rest.
    """
    edge = dataset.rows - max(1, dataset.rows // HOLDOUT_DIVISOR)
    if edge < 1:
        raise InputError(f"{dataset.rows} rows are too few to search and to choose on")
    most = edge * 3 // 4
    early, search = dataset.part(0, max(1, most)), dataset.part(most, edge)
    valid = dataset.part(edge, dataset.rows)
    return DataSplits(early, search, valid, valid, dataset.part(0, edge))
