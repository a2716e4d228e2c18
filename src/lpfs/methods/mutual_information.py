r"""Mutual information of each field and the label, on the prepared ids: how much one says about the other.

.. math:: I = \sum_{v,y} p_{vy} \ln \frac{p_{vy}}{p_v p_y}

Cover and Thomas, Elements of Information Theory, 1991. No model is trained: fields are looked at one by one, so
that fields that say something only together are not found, and a copy is worth as much as what it copies.
Numbers are cut into bins, bags are shared out over their ids (:mod:`lpfs.methods.contingency`), and a field of
several numbers counts as the best of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpfs.methods.checks import check_numbers
from lpfs.methods.contingency import information, tables
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import of_parts, ranked_model, sample
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: how many rows are looked at, and how many bins numbers are cut into."""

    rows: int = 200_000
    bins: int = 32

    def __post_init__(self) -> None:
        check_numbers(self, whole=("rows", "bins"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("mutual_information", wish)


def search(task: Task) -> Selection:
    """Return the fields that say the most about the label; the model is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = ranked_model(task, "mutual_information")
    with Effort() as effort:
        rows = sample(task, "mutual_information", options.rows)
        scores = {
            each.name: max(information(counts) for counts in tables(rows, each, options.bins))
            for each in model.reads
        }
    scores = of_parts(model, scores)
    return ranked(task, "mutual_information", scores, steps=0, rows=len(rows), **effort.told())
