"""COLD's SE block: a squeeze-and-excitation weight a field, computed from the whole row.

Wang et al., COLD: Towards the Next Generation of Pre-Ranking System, 2020. The definition is recalled from memory,
not read in its paper.

A model that was trained long before has put the importance of a field into the size of its embedding, and the
weights then say little. Seen on simulated logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.ranking import need_number
from lpfs.methods.task import Task
from lpfs.methods.weighing import Weighing
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of the weights of the block."""

    lr: float = 0.001

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr",))


class ColdSE(Weighing):
    r"""One Linear from the row to a weight a field,

    .. math:: s = \sigma(W [e_1, \dots, e_N] + b), \qquad v_n = s_n e_n

    with W = 0 and b = 0 at the start, so that every field begins at ½. Importance is the mean of s.
    """

    def __init__(self, names: Sequence[str], steps: int, seed: int, width: int) -> None:
        super().__init__(names, steps, seed)
        self.linear = nn.Linear(len(names) * width, len(names))
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()

    def weights(self, tokens: Tensor) -> Tensor:
        """Return s (B, N)."""
        out: Tensor = self.linear(tokens.flatten(1))
        return out.sigmoid()


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("cold_se", wish)


def search(task: Task) -> Selection:
    """Train the block with the weights, and keep the K fields with the highest mean weight."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    return learn(
        task,
        "cold_se",
        lambda model: ColdSE(tuple(model.sites()), task.steps, task.seed, model.inputs.width),
        lr=options.lr,
    )
