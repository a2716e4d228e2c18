r"""SFS: how steeply the loss rises with a mask on each field, at a mask of ones, in a single shot.

.. math:: \text{score}_n = \frac{s_n}{\sum_m s_m}, \qquad
          s_n = \frac1T \sum_{t=1}^T \Big| \frac{\partial L_t}{\partial c_n} \Big|_{c=1}, \qquad
          \frac{\partial L_t}{\partial c_n} = \Big\langle \frac{\partial L_t}{\partial e_n}, e_n \Big\rangle

Wang et al., Single-shot Feature Selection for Multi-task Recommendations, 2023; c_n multiplies the embedding of
field n where its gate would sit, with its wide weights, and L_t is the mean loss of batch t. About a hundred
batches are looked at; the model is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from lpfs.data.stream import Stream
from lpfs.methods.captured import Captured, Stacks
from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import batches_of, ranked_model, unlearnt
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys

UNKNOWN = 1 << 62  # rows of batches that do not say: their number alone tells where to stop


@dataclass(frozen=True)
class Options:
    """Settings: how many batches are looked at, once through the search period at most."""

    batches: int = 100

    def __post_init__(self) -> None:
        check_numbers(self, whole=("batches",))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("sfs", wish)


def search(task: Task) -> Selection:
    """Return the fields whose masks the loss is most sensitive to."""
    options = Options(**known_keys(Options, task.options))
    captured = Captured(ranked_model(task, "sfs"))
    with Effort() as effort:
        total: Stacks = {}
        count = 0
        with captured.watching():
            for batch in islice(batches_of(task, rows_of(task, options.batches)), options.batches):
                values, slopes = captured.gradients(task, batch)
                for path, slope in slopes.items():
                    steep = (slope * values[path]).sum((0, 2)).abs().double() / len(batch)  # (slots,)
                    total[path] = total[path] + steep if path in total else steep
                count += 1
                effort.add(forwards=len(batch), backwards=len(batch))
            scores = captured.by_name({path: each / count for path, each in total.items()})
    whole_sum = sum(scores.values()) or 1.0
    scores = {name: each / whole_sum for name, each in scores.items()}
    return ranked(task, "sfs", scores, steps=0, batches=count, **effort.told())


def rows_of(task: Task, batches: int) -> int:
    """Return how many rows so many batches have."""
    stream = unlearnt(task)
    return batches * stream.batch_size if isinstance(stream, Stream) else UNKNOWN
