"""Gradient boosted trees: how much the splits on a field gain, over all trees.

Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001; through scikit-learn's
GradientBoostingClassifier (its faster histogram boosting keeps no gains). The gain is that of the trees, not of
the CTR model, which is not trained. Ids are turned into click rates of other rows
(:mod:`lpfs.methods.click_rates`), bags into the mean of those of their ids; a field of several numbers has the
sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lpfs.methods.checks import check_numbers
from lpfs.methods.need import of_sklearn
from lpfs.methods.ranking import need_number
from lpfs.methods.task import Task
from lpfs.methods.trees import by_trees
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rows looked at, trees, their depth, their learning rate, and the share of rows each tree sees."""

    rows: int = 50_000
    trees: int = 100
    depth: int = 3
    lr: float = 0.1
    subsample: float = 0.5

    def __post_init__(self) -> None:
        every = self.subsample == 1  # a share of all of them
        check_numbers(
            self,
            positive=("lr",),
            share=() if every else ("subsample",),
            whole=("rows", "trees", "depth"),
        )


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("gbdt", wish)
    of_sklearn("gbdt", "ensemble")


def search(task: Task) -> Selection:
    """Return the fields that boosted trees gain the most from; the model is not trained."""
    options = Options(**known_keys(Options, task.options))

    def boosted(ensemble: Any) -> Any:
        return ensemble.GradientBoostingClassifier(
            n_estimators=options.trees,
            max_depth=options.depth,
            learning_rate=options.lr,
            subsample=float(options.subsample),
            random_state=task.seed,
        )

    return by_trees(task, "gbdt", options.rows, boosted)
