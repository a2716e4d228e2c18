"""Random forest: how much impurity the splits on a field remove, over all trees.

Breiman, Random Forests, 2001; through scikit-learn. The importance is that of the forest, not of the CTR model,
which is not trained. Ids are turned into click rates of other rows (:mod:`lpfs.methods.click_rates`), bags into
the mean of those of their ids; a field of several numbers has the sum of theirs.
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
    """Settings: how many rows are looked at, how many trees there are, and how many rows a leaf has at least."""

    rows: int = 50_000
    trees: int = 100
    leaf: int = 20

    def __post_init__(self) -> None:
        check_numbers(self, whole=("rows", "trees", "leaf"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("random_forest", wish)
    of_sklearn("random_forest", "ensemble")


def search(task: Task) -> Selection:
    """Return the fields that a forest splits on to the greatest effect; the model is not trained."""
    options = Options(**known_keys(Options, task.options))

    def forest(ensemble: Any) -> Any:
        return ensemble.RandomForestClassifier(
            n_estimators=options.trees, min_samples_leaf=options.leaf, random_state=task.seed
        )

    return by_trees(task, "random_forest", options.rows, forest)
