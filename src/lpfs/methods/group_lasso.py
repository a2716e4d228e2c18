"""Group LASSO on the first layer, by proximal steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpfs.methods.base import Method, SearchCost, SearchTask
from lpfs.methods.group_sparsity import FirstLayer, GroupShrinkage, first_layer, learning_rate_of
from lpfs.schema import Selection
from lpfs.train.callbacks import State


class GroupLasso(Method):
    r"""Group LASSO on the columns of the first layer: fields whose columns shrink to zero are dropped.

    .. math:: W_n \leftarrow \Big(1 - \frac{\eta\lambda\sqrt{d_n}}{\|\tilde W_n\|}\Big)_+ \tilde W_n

    Yuan and Lin, Model Selection and Estimation in Regression with Grouped Variables, 2006; as in the comparison
    of the LPFS paper. W_n are the columns of field n in the first layer, d_n its width, W̃ the weights after the
    optimizer's step, η the optimizer's learning rate; with Adagrad or Adam, whose steps differ between weights, η
    is still that one number. The score of a field is ‖W_n‖, so the method is defined only if fields enter through
    that layer alone. With ``keep=K`` λ is moved until K fields are alive; ``penalty=`` is a fixed λ, and the
    fields alive at the end are kept.
    """

    targets = ("keep", "penalty")
    search_per_k = True
    uses_all_rows = True

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError if fields do not enter the model through one Linear alone."""
        first_layer(model, self.name)

    def search(self, task: SearchTask) -> Selection:
        """Train the model under the penalty, in place; return the fields whose columns are left."""
        layer = first_layer(task.model, self.name)
        self.check(task.target, layer.names, task.steps)
        shrinkage, cost = ColumnShrinkage(task, layer), SearchCost()
        task.fit(shrinkage, cost)
        return shrinkage.selection(task, self.name, cost)


class ColumnShrinkage(GroupShrinkage):
    """Shrinks the columns of each field in the first layer."""

    def __init__(self, task: SearchTask, layer: FirstLayer) -> None:
        super().__init__(task, layer.names)
        self.layer = layer

    def norms(self) -> Tensor:
        """Return ‖W_n‖ (N,)."""
        return self.layer.energies().sqrt()

    def shrink(self, state: State) -> None:
        """Take the proximal step."""
        threshold = self.penalty * self.unit_threshold(state) * self.free
        self.layer.multiply(shrink_factors(self.norms(), threshold))

    def unit_threshold(self, state: State) -> Tensor:
        """Return by how much λ = 1 reduces the norm of each block in a step: η√d_n (N,)."""
        return learning_rate_of(state, self.layer.weight) * self.layer.widths.sqrt()

    def max_reachable(self, state: State) -> Tensor:
        """Return the λ that brings each block to zero in one step (N,)."""
        return self.norms() / self.unit_threshold(state)


def shrink_factors(norms: Tensor, threshold: Tensor) -> Tensor:
    """Return the factor of each group (N,) that reduces its norm by ``threshold``, at most to zero.

    >>> shrink_factors(torch.tensor([4.0, 1.0, 0.0]), torch.tensor(2.0))
    tensor([0.5000, 0.0000, 0.0000])
    """
    return torch.where(norms > threshold, 1 - threshold / norms, torch.zeros_like(norms))
