r"""Gates without a vector of their own: x is the norm of a field's block of the first layer.

.. math:: x_n = \|W_n\| / \|W_n^0\|, \qquad e_n \mapsto g_\epsilon(x_n) / g_\epsilon(1) \cdot e_n

The paper names it as a choice of x. The proximal step of λ‖x‖₁ is then group LASSO's on W, with λ moved until K
blocks are left (:mod:`lpfs.methods.thinning`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.schedule import scaled
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import FirstLayer, first_layer
from lpfs.methods.group_lasso import Columns
from lpfs.methods.masks import FieldMask, worn
from lpfs.methods.task import Task
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.stages import Trained
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.fit import fit

TINY = 1e-12  # under the root, so that a block at zero has a gradient


class Tied(FieldMask):
    """Factors of the fields (N,) made of the first layer's own weights."""

    def __init__(self, layer: FirstLayer, function: GateFunction, steps: int, seed: int) -> None:
        super().__init__(layer.names, steps, seed)
        self.layer, self.function, self.schedule = layer, function, scaled(function, steps)
        self.start = self.lengths().detach().clamp_min(TINY)

    def lengths(self) -> Tensor:
        """Return ‖W_n‖ (N,), with its gradient."""
        weight = self.layer.weight
        total = weight.new_zeros(len(self.names) + 1).index_add(0, self.layer.owner, weight.square().sum(0))
        return (total[:-1] + TINY**2).sqrt()

    def forward(self) -> Tensor:
        """Return g(x) / g(1) (N,)."""
        x = self.lengths() / self.start
        epsilon = x.new_tensor(self.schedule.epsilon(self.step))
        factors: Tensor = self.function.value(x, epsilon) / self.function.value(x.new_ones(()), epsilon)
        return factors


class Clock(Callback):
    """Tells the mask when it is."""

    def __init__(self, mask: Tied) -> None:
        self.mask = mask

    def after_step(self, state: State) -> None:
        """Tell it."""
        self.mask.at(state.step)


def find_tied(work: RunPlan, pretrained: Trained, seed: int) -> tuple[Model, Any, Selection]:
    """Search as ``stages.find`` does, with gates on the norms of the first layer."""
    model, optimizer = pretrained
    stream, _ = stages.search_streams(work, model.reads.names, seed)
    config = replace(work.training(work.steps.search, seed, choose=False), lr=None)
    task = Task(
        model, optimizer, stream, None, work.target, work.steps.search, seed, work.run_dir, False, config, {}, None
    )
    layer = first_layer(model, "tied gates")
    mask = Tied(layer, gate_function("lpfs++"), task.steps, seed)
    driver, effort = Columns(task, layer), Effort()
    with worn(model, mask, "tied gates"), stages.scaled_learning_rate(optimizer, work.steps.lr_factor):
        fit(model, stream, optimizer, folder=task.folder, callbacks=[Clock(mask), driver, effort], config=config)
    return model, optimizer, driver.answer(task, "tied", effort)
