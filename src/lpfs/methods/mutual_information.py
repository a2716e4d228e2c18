r"""Mutual information of each field and the label, on the prepared ids: how much one says about the other.

.. math:: \text{score}_n = I(v_n; y) - \overline{I(v_n; \pi y)}, \qquad
          I = \sum_{v,y} p_{vy} \ln \frac{p_{vy}}{p_v p_y}

Cover and Thomas, Elements of Information Theory, 1991. What chance alone gives, the mean over some shuffles π
of the labels, is taken off: else a field of many ids that say nothing would come before one of few ids that say
a little. No model is trained: fields are looked at one by one, so that fields that say something only together
are not found, and a copy is worth as much as what it copies. Numbers are cut into bins, bags are shared out
over their ids (:mod:`lpfs.methods.contingency`), and a field of several numbers counts as the best of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lpfs.methods.checks import check_numbers
from lpfs.methods.contingency import information, tables
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import Rows, of_parts, ranked_model, sample
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Schema, Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rows looked at, bins that numbers are cut into, and shuffles that chance is judged by."""

    rows: int = 200_000
    bins: int = 32
    shuffles: int = 3

    def __post_init__(self) -> None:
        check_numbers(self, whole=("rows", "bins", "shuffles"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("mutual_information", wish)


def search(task: Task) -> Selection:
    """Return the fields that say the most about the label; the model is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = ranked_model(task, "mutual_information")
    with Effort() as effort:
        rows = sample(task, "mutual_information", options.rows)
        found = best(rows, model.reads, options.bins)
        draw = np.random.default_rng(task.seed)
        chance = [
            best(replace(rows, labels=draw.permutation(rows.labels)), model.reads, options.bins)
            for _ in range(options.shuffles)
        ]
        scores = {name: each - sum(by[name] for by in chance) / len(chance) for name, each in found.items()}
    scores = of_parts(model, scores)
    return ranked(task, "mutual_information", scores, steps=0, rows=len(rows), **effort.told())


def best(rows: Rows, schema: Schema, bins: int) -> dict[str, float]:
    """Return the information of each field and the label: of several numbers, that of the best."""
    return {each.name: max(information(counts) for counts in tables(rows, each, bins)) for each in schema}
