"""Periods: which rows pretrain, which search, which choose and which judge."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lpfs.data.dataset import Dataset
from lpfs.errors import InputError

SEARCH = 5 / 24  # part of the days that is searched on, as in the paper: days 18 to 22 of 24
FEW = (0.7, 0.2, 0.1)  # early, search and test rows where there are fewer than three days
HELD = 10  # one in so many of the rows of the search period, the last ones, is held out for choices
DEALT = 20  # parts that a table is dealt to at random where nothing orders its rows …
SEARCHED, CHOSEN, TESTED = 4, 2, 2  # … so many of them to search on, to choose on, to judge on


@dataclass(frozen=True)
class Periods:
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
    def dealt(self) -> bool:
        """Whether rows were dealt to the days at random; then they have no order worth keeping."""
        return dealt(self.train)

    def to_json(self) -> dict[str, object]:
        """Return rows and days of each part."""
        return {
            name: {"rows": part.rows, "days": [part.days()[0], part.days()[-1]]}
            for name, part in vars(self).items()
        }


def periods(dataset: Dataset) -> Periods:
    """Cut a Dataset: the last day judges, the days before it search, the rest pretrains.

    Of 24 days that is 18, 5 and 1, the paper's; of 9 it is 6, 2 and 1. A Dataset with a split of its own (train,
    valid, test) is cut as that says. With fewer than three days, rows count instead. Rows that were dealt to 20
    parts at random are cut at whole parts: 12, 4, 2 and 2.
    """
    split = dataset.settings.get("split")
    if split is not None:
        return of_split(dataset, split)
    days = len(dataset.days())
    if dealt(dataset) and days >= DEALT:
        need(dataset, 100)
        sizes = [day.rows for day in dataset.table]
        test = dataset.part(sum(sizes[:-TESTED]), dataset.rows)
        return of_parts(dataset, sizes[:-TESTED], test)
    if days >= 3:
        searched = min(days - 2, max(1, round(days * SEARCH)))
        early, search, test = dataset.split(days=(days - 1 - searched, days - 1))
    else:
        need(dataset, 100)
        early, search, test = dataset.split(*FEW)
    return held_out(dataset, early.rows, early.rows + search.rows, test)


def of_split(dataset: Dataset, split: dict[str, list[str]]) -> Periods:
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
    if not valid and dealt(dataset) and len(sizes) >= DEALT:
        return of_parts(dataset, sizes, judged)
    if not valid:
        return held_out(dataset, early, train, judged)
    chosen = dataset.part(train, train + valid)
    return Periods(dataset.part(0, early), dataset.part(early, train), chosen, judged, dataset.part(0, train))


def dealt(dataset: Dataset) -> bool:
    """Whether rows were dealt to the days at random."""
    return bool(dataset.settings.get("options", {}).get("shuffle"))


def of_parts(dataset: Dataset, sizes: list[int], test: Dataset) -> Periods:
    """Cut at whole parts, each of them drawn at random: the last ones choose, those before them search."""
    early, edge, stop = sum(sizes[: -SEARCHED - CHOSEN]), sum(sizes[:-CHOSEN]), sum(sizes)
    return Periods(
        dataset.part(0, early), dataset.part(early, edge), dataset.part(edge, stop), test, dataset.part(0, edge)
    )


def held_out(dataset: Dataset, early: int, stop: int, test: Dataset) -> Periods:
    """Hold the last tenth of the search period out; more of it, up to a half, where that holds one class only."""
    held = max(1, (stop - early) // HELD)
    while one_class(dataset.part(stop - held, stop)) and held * 4 <= stop - early:
        held *= 2
    edge = stop - held
    if edge <= early or early < 1:
        raise InputError(f"{dataset.rows} rows are too few to pretrain, search, choose and test on")
    return Periods(
        dataset.part(0, early), dataset.part(early, edge), dataset.part(edge, stop), test, dataset.part(0, edge)
    )


def clicks(part: Dataset) -> tuple[int, int]:
    """Return how many rows there are with and without a click."""
    positive = sum(int(batch.labels[:, 0].sum()) for batch in part.stream(1 << 16, fields=[]))
    return positive, part.rows - positive


def one_class(part: Dataset) -> bool:
    """Say whether all rows are alike."""
    return 0 in clicks(part)


def noise_of_auc(part: Dataset, auc: float = 0.75) -> float:
    """Return the standard error of an AUC on these rows, by Hanley and McNeil (1982); 0.5 with one class."""
    positive, negative = clicks(part)
    if not positive or not negative:
        return 0.5
    above, below = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    spread = auc * (1 - auc) + (positive - 1) * (above - auc * auc) + (negative - 1) * (below - auc * auc)
    return math.sqrt(spread / (positive * negative))


def need(dataset: Dataset, rows: int) -> None:
    """Refuse a table that is too small to be cut."""
    if dataset.rows < rows:
        raise InputError(f"{dataset.rows} rows are too few to select fields on; {rows} is the least")
