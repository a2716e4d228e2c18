r"""The χ² test of each field against the label, on the prepared ids: how unlikely is it that they are independent?

.. math:: \chi^2 = \sum_{v,y} \frac{(n_{vy} - e_{vy})^2}{e_{vy}}, \qquad
          z = \frac{(\chi^2/k)^{1/3} - (1 - 2/9k)}{\sqrt{2/9k}}

Pearson, 1900; Liu and Setiono, Chi2: Feature Selection and Discretization, 1995. χ² grows with the number of
values, so fields are ranked by their significance and not by χ² itself: z, of k degrees of freedom, is normal
where a field says nothing (Wilson and Hilferty 1931), and unlike a p-value it never becomes zero. No model is
trained; fields are looked at one by one. Numbers are cut into bins, bags are shared out over their ids
(:mod:`lpfs.methods.contingency`), and a field of several numbers counts as the best of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpfs.methods.checks import check_numbers
from lpfs.methods.contingency import chi_squared, freedom, tables
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import Reals, of_parts, ranked_model, sample
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys

NEVER = -1e9  # of a field that always has one value: there is nothing to test


@dataclass(frozen=True)
class Options:
    """Settings: how many rows are looked at, and how many bins numbers are cut into."""

    rows: int = 200_000
    bins: int = 32

    def __post_init__(self) -> None:
        check_numbers(self, whole=("rows", "bins"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("chi2", wish)


def search(task: Task) -> Selection:
    """Return the fields that are the least likely to be independent of the label; the model is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = ranked_model(task, "chi2")
    with Effort() as effort:
        rows = sample(task, "chi2", options.rows)
        scores = {
            each.name: max(significance(counts) for counts in tables(rows, each, options.bins))
            for each in model.reads
        }
    scores = of_parts(model, scores)
    return ranked(task, "chi2", scores, steps=0, rows=len(rows), **effort.told())


def significance(counts: Reals) -> float:
    """Return z of a table of values and labels (V, 2)."""
    degrees = freedom(counts)
    if degrees < 1:
        return NEVER
    spread = 2 / (9 * degrees)
    return float(((chi_squared(counts) / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)
