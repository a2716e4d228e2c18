r"""SHARK: what the loss would gain, to first order, if a field's embedding were its mean.

.. math:: \text{score}_n = \mathbb{E}\,\Big|\Big\langle \frac{\partial L}{\partial e_n},\;
          \bar e_n - e_n \Big\rangle\Big|

Zhang et al., SHARK: A Lightweight Model Compression Approach for Large-scale Recommender Systems, 2023. The
first term of the Taylor series stands for a permutation of the field: one pass forward and backward for all
fields, where permutation needs a pass for each. ē is the mean over the rows looked at; gradients are those of
each row's own loss, from one backward of the sum. Embeddings are taken where gates would sit, with the wide
weights of a field. The model is not trained.
"""  # fmt: skip

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpfs.methods.captured import Captured, Stacks
from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import batches_of, ranked_model
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: how many rows of the search period are looked at."""

    rows: int = 200_000

    def __post_init__(self) -> None:
        check_numbers(self, whole=("rows",))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("shark", wish)


def search(task: Task) -> Selection:
    """Return the fields whose replacement by their mean would change the loss the most."""
    options = Options(**known_keys(Options, task.options))
    captured = Captured(ranked_model(task, "shark"))
    with Effort() as effort:
        total: Stacks = {}
        rows = 0
        with captured.watching():
            means = mean_values(task, captured, options.rows, effort)
            for batch in batches_of(task, options.rows):
                values, slopes = captured.gradients(task, batch)
                for path, slope in slopes.items():
                    change = (slope * (means[path] - values[path])).sum(-1).abs().double().sum(0)  # (slots,)
                    total[path] = total[path] + change if path in total else change
                rows += len(batch)
                effort.add(forwards=len(batch), backwards=len(batch))
            scores = captured.by_name({path: each / rows for path, each in total.items()})
    return ranked(task, "shark", scores, steps=0, rows=rows, **effort.told())


def mean_values(task: Task, captured: Captured, most: int, effort: Effort) -> Stacks:
    """Return the mean of each embedding (slots, D) over the rows that will be looked at."""
    total: Stacks = {}
    rows = 0
    for batch in batches_of(task, most):
        for path, each in captured.values(batch).items():
            added = each.double().sum(0)
            total[path] = total[path] + added if path in total else added
        rows += len(batch)
        effort.add(forwards=len(batch))
    return {path: (each / rows).float() for path, each in total.items()}
