"""Recipe: how long to train and in which steps, from the size of the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lpfs.errors import InputError
from lpfs.pipeline.splits import Periods

BATCH = 512  # the paper's
LEAST_BATCH = 64
LEAST_PRETRAIN = 2000
LEAST_SEARCH = 2000
AGAIN = 1.2  # passes over the search period from which on its rows are said to come again
LEAST_HELD = 512  # rows in a step of gates that have rows of their own
PACE = 3.0  # how much faster the weights learn in a search on rows that come again: it is short for them …
PASSES = 2  # … but where they go through their rows more often than so, slower in proportion


@dataclass(frozen=True)
class Recipe:
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
    hot: int
    shuffle: bool
    apart: bool
    held: int
    pace: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def recipe(
    parts: Periods,
    *,
    batch_size: int | None = None,
    pretrain_steps: int | None = None,
    search_steps: int | None = None,
) -> Recipe:
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
    apart = search * batch_size > AGAIN * parts.search.rows
    return Recipe(
        batch_size,
        pretrain,
        search,
        train,
        hot=max(1, round(train / 4)),
        shuffle=parts.dealt or pretrain > once,
        apart=apart,
        held=max(batch_size, LEAST_HELD),
        pace=pace(search * batch_size, rows) if apart else 1.0,
    )


def pace(seen: int, rows: int) -> float:
    """Return how much faster weights learn that see so many rows, out of so many different ones.

    >>> pace(200, 100), pace(400, 100)
    (3.0, 1.5)
    """
    return PACE * min(1.0, PASSES * rows / seen)
