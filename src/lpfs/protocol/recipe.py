"""Recipe: how long to train and in which steps, from the size of the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lpfs.errors import InputError
from lpfs.protocol.periods import Periods

BATCH = 512  # the paper's
LEAST_BATCH = 64
LEAST_PRETRAIN = 2000
LEAST_SEARCH = 1000


@dataclass(frozen=True)
class Recipe:
    """Steps and batch sizes of every stage.

    Args:
        batch_size: rows in a step.
        pretrain: steps on the early rows.
        search: steps on the search rows.
        train: steps of a training from scratch on both.
        hot: steps that the pruned model goes on for.
        shuffle: whether rows are gone through more than once, in another order each time.

    """

    batch_size: int
    pretrain: int
    search: int
    train: int
    hot: int
    shuffle: bool

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
    2,000 steps to pretrain and 1,000 to search in.
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
    return Recipe(
        batch_size, pretrain, search, train, max(1, round(train / 4)), shuffle=parts.dealt or pretrain > once
    )
