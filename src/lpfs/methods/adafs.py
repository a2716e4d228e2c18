"""AdaFS: a controller that weighs the fields of every row against each other.

Lin et al., AdaFS: Adaptive Feature Selection in Deep Recommender System, 2022. Defined as public code has it, but
for one thing: weights have a mean of 1, so that the pretrained model is not shrunk N times over at the start.

A model that was trained long before has put the importance of a field into the size of its embedding, and the
weights then say little. With ``hard`` hardly any true field was found on a simulated log: probably because the
choice of fields, made from the whole row, can itself tell what the row predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.methods.checks import check_numbers
from lpfs.methods.learn import learn
from lpfs.methods.ranking import need_number
from lpfs.methods.task import Task
from lpfs.methods.weighing import Weighing
from lpfs.methods.wish import Wish
from lpfs.models.layers import dense_layers
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """Settings: rate of the controller, width of its hidden layer, and whether only the K best of a row pass."""

    lr: float = 0.001
    hidden: int = 64
    hard: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, positive=("lr",), whole=("hidden",))
        if not isinstance(self.hard, bool):
            raise InputError(f"hard must be true or false, found {self.hard!r}")

    @property
    def each_keep(self) -> bool:
        """Whether another K is another search: with ``hard`` it is part of the network."""
        return self.hard


class AdaFS(Weighing):
    r"""Weights of the fields of a row,

    .. math:: w(x) = N\,\mathrm{softmax}(\mathrm{MLP}(\mathrm{BN}(e)))

    or, with ``hard``, its K largest alone, scaled to a mean of 1 again. Importance is the mean of w.
    """

    def __init__(
        self, names: Sequence[str], steps: int, seed: int, width: int, hidden: int = 64, best: int | None = None
    ) -> None:
        super().__init__(names, steps, seed)
        self.best = best
        self.norm = nn.BatchNorm1d(width)
        with torch.random.fork_rng([]):
            self.controller = dense_layers(len(names) * width, (hidden,), len(names))
        with torch.no_grad():
            for each in self.controller.parameters():  # as torch draws them, but by the seed of the search
                each.uniform_(-(each.shape[-1] ** -0.5), each.shape[-1] ** -0.5, generator=self.draw)

    def weights(self, tokens: Tensor) -> Tensor:
        """Return w (B, N)."""
        normed = self.norm(tokens.flatten(0, 1)).view_as(tokens)
        chances = self.controller(normed.flatten(1)).softmax(1)
        if self.best is not None:
            largest, places = chances.topk(self.best, 1)
            chances = torch.zeros_like(chances).scatter(1, places, largest / largest.sum(1, keepdim=True))
        out: Tensor = chances * (chances.shape[1] if self.best is None else self.best)
        return out


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("adafs", wish)


def search(task: Task) -> Selection:
    """Train the controller with the weights, and keep the K fields that weigh most on average."""
    options = Options(**known_keys(Options, task.options))
    check(options, task.wish, (), task.steps)
    best = task.wish.keep if options.hard else None
    return learn(
        task,
        "adafs",
        lambda model: AdaFS(tuple(model.sites()), task.steps, task.seed, model.inputs.width, options.hidden, best),
        lr=options.lr,
    )
