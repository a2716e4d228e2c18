r"""Group LASSO on the first layer, by proximal steps: fields whose columns shrink to zero are not needed.

.. math:: W_n \leftarrow \Big(1 - \frac{\eta\lambda\sqrt{d_n}}{\|\tilde W_n\|}\Big)_+ \tilde W_n

Yuan and Lin, Model Selection and Estimation in Regression with Grouped Variables, 2006; as the LPFS paper
compares it. W_n are the columns of field n in the first layer, d_n its width, W̃ the weights after the
optimizer's step, η the optimizer's learning rate; with Adagrad or Adam, whose own steps differ from weight to
weight, η is still that one number. A field's score is ‖W_n‖, so the method says something only where a field
enters through that layer alone. With ``keep=K`` λ is moved until K fields are alive
(:mod:`lpfs.methods.thinning`); ``penalty=`` is a fixed λ, and those alive at the end are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import FirstLayer, first_layer
from lpfs.methods.ranking import need_number_or_penalty
from lpfs.methods.task import Task
from lpfs.methods.thinning import Thinning
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys
from lpfs.train.callbacks import State


@dataclass(frozen=True)
class Options:
    """No settings: λ follows from what is asked for."""


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("group_lasso", wish)


def check_model(model: nn.Module) -> None:
    """Refuse a backbone on which this is not defined; the model may be one without numbers."""
    first_layer(model, "group_lasso")


def search(task: Task) -> Selection:
    """Train the model under the penalty, in place, and return the fields whose columns are left."""
    Options(**known_keys(Options, task.options))
    need_number_or_penalty("group_lasso", task.wish)
    layer = first_layer(task.model, "group_lasso")
    task.wish.check(layer.names)
    driver, effort = Columns(task, layer), Effort()
    task.fit(driver, effort)
    return driver.answer(task, "group_lasso", effort)


class Columns(Thinning):
    """Shrinks the columns of each field in the first layer."""

    def __init__(self, task: Task, layer: FirstLayer) -> None:
        super().__init__(task, layer.names)
        self.layer = layer

    def norms(self) -> Tensor:
        """Return ‖W_n‖ (N,)."""
        return self.layer.energies().sqrt()

    def shrink(self, state: State) -> None:
        """Take the proximal step."""
        cut = self.penalty * self.unit_cut(state) * self.free
        self.layer.multiply(shrunk(self.norms(), cut))

    def unit_cut(self, state: State) -> Tensor:
        """Return by how much a λ of 1 shortens each block in a step: η√d_n (N,)."""
        return rate_of(state, self.layer.weight) * self.layer.widths.sqrt()

    def farthest(self, state: State) -> Tensor:
        """Return the λ that would bring each block to zero in one step (N,)."""
        return self.norms() / self.unit_cut(state)


def shrunk(norms: Tensor, cut: Tensor) -> Tensor:
    """Return the factor of each group (N,) that makes its norm smaller by ``cut``, and no less than zero.

    >>> shrunk(torch.tensor([4.0, 1.0, 0.0]), torch.tensor(2.0))
    tensor([0.5000, 0.0000, 0.0000])
    """
    return torch.where(norms > cut, 1 - cut / norms, torch.zeros_like(norms))


def rate_of(state: State, weight: Tensor) -> float | Tensor:
    """Return the learning rate that a weight is trained with."""
    for group in state.optimizer.param_groups:
        if any(each is weight for each in group["params"]):
            rate: float | Tensor = group["lr"]
            return rate
    raise InputError("the optimizer does not train the first layer; make it of all of the model's parameters")
