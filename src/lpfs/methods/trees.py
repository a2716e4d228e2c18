"""Trees of scikit-learn, and what they say of each field: the sum of what its columns matter to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lpfs.methods.click_rates import matrix
from lpfs.methods.effort import Effort
from lpfs.methods.need import of_sklearn
from lpfs.methods.ranking import ranked
from lpfs.methods.sample import of_parts, ranked_model, sample
from lpfs.methods.task import Task
from lpfs.schema import Selection


def by_trees(task: Task, method: str, count: int, make: Callable[[Any], Any]) -> Selection:
    """Fit trees to ``count`` rows of the search, and return the fields that matter the most to them.

    Args:
        task: the search; its model is not trained.
        method: whose trees they are.
        count: rows at the most.
        make: makes the trees, given ``sklearn.ensemble``.

    """
    model = ranked_model(task, method)
    with Effort() as effort:
        rows = sample(task, method, count)
        columns, owners = matrix(rows, model.reads)
        trees = make(of_sklearn(method, "ensemble")).fit(columns, rows.labels)
        scores = dict.fromkeys(model.reads.names, 0.0)
        for name, found in zip(owners, trees.feature_importances_.tolist(), strict=True):
            scores[name] += found
    return ranked(task, method, of_parts(model, scores), steps=0, rows=len(rows), **effort.told())
