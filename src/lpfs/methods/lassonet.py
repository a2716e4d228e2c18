r"""LassoNet: a field may enter the network only as far as its skip weights let it.

.. math:: f(x) = \theta^\top x + \mathrm{net}(x), \qquad
          \min L + \lambda \sum_n \|\theta_n\|_2 \quad\text{with}\quad \|W_n\|_\infty \le M \|\theta_n\|_2

Lemhadri et al., LassoNet: A Neural Network with Feature Sparsity, 2021, in its form for groups. x are the
embeddings side by side, W_n the columns of field n in the first layer, θ_n its weights in a linear layer past
the network. After every step of the optimizer both are put where the hierarchical proximal operator says
(:func:`hierarchical_prox`). The paper's λ grows by 2 % at a time, and the network is trained to the end at
each; here it is controlled within one search (:mod:`lpfs.methods.thinning`), so that K fields are left at the
end: that path is ours. Before it the skip layer is trained for a fifth of the search without any penalty. A
field's score is ‖θ_n‖. ``penalty=`` is a fixed λ, and those alive at the end are kept.

The network of LassoNet is a copy of the model with the skip layer beside it; the model itself is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import FirstLayer, first_layer
from lpfs.methods.group_lasso import rate_of
from lpfs.methods.ranking import need_number_or_penalty
from lpfs.methods.task import Task
from lpfs.methods.thinning import Thinning
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys
from lpfs.train.callbacks import State

DENSE = 0.2  # part of the search that trains the skip layer without a penalty


@dataclass(frozen=True)
class Options:
    """Settings: M, how far the first layer may go beyond the skip weights (the paper's 10)."""

    M: float = 10.0

    def __post_init__(self) -> None:
        check_numbers(self, positive=("M",))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number_or_penalty("lassonet", wish)


def check_model(model: nn.Module) -> None:
    """Refuse a backbone on which this is not defined; the model may be one without numbers."""
    first_layer(model, "lassonet")


def search(task: Task) -> Selection:
    """Train a copy of the model with a skip layer; return the fields whose skip weights are left."""
    options = Options(**known_keys(Options, task.options))
    need_number_or_penalty("lassonet", task.wish)
    task.wish.check(first_layer(task.model, "lassonet").names)
    model, optimizer = copy.deepcopy((task.model, task.optimizer))
    net = Skipping(model, first_layer(model, "lassonet"))
    optimizer.add_param_group({"params": [net.skip.weight], "lr": optimizer.param_groups[0]["lr"]})
    driver, effort = Hierarchy(replace(task, model=net), net, options.M), Effort()
    task.fit(driver, effort, model=net, optimizer=optimizer)
    return driver.answer(task, "lassonet", effort)


class Skipping(nn.Module):
    """A model with a linear layer past it, from what its first layer reads to the logits; it starts at zero."""

    def __init__(self, model: nn.Module, layer: FirstLayer) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        outputs = int(getattr(model, "outputs_count", 1))
        self.skip = nn.Linear(layer.weight.shape[1], outputs, bias=False).to(layer.weight)
        nn.init.zeros_(self.skip.weight)
        self.read: Tensor | None = None
        model.get_submodule(layer.path).register_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.read = args[0]

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the model plus those of the skip layer."""
        logits: Tensor = self.model(batch)
        assert self.read is not None
        past: Tensor = self.skip(self.read)
        self.read = None
        return logits + (past if logits.ndim == 2 else past[:, 0])


class Hierarchy(Thinning):
    """Takes the hierarchical proximal step."""

    def __init__(self, task: Task, net: Skipping, bound: float) -> None:
        super().__init__(task, net.layer.names, begin=DENSE if task.wish.penalty is None else 0.0)
        self.skip, self.weight, self.bound = net.skip.weight, net.layer.weight, bound
        self.columns = net.layer.columns()  # (N, d)

    def groups(self, weight: Tensor) -> Tensor:
        """Return the columns of every field in a row of its own (N, rows·d)."""
        return weight.detach()[:, self.columns].transpose(0, 1).flatten(1)

    def norms(self) -> Tensor:
        """Return ‖θ_n‖ (N,)."""
        found: Tensor = self.groups(self.skip).norm(dim=1)
        return found

    @torch.no_grad()
    def shrink(self, state: State) -> None:
        """Put the skip weights and the first layer where the proximal operator says."""
        penalty = rate_of(state, self.skip) * self.penalty * self.free
        found = hierarchical_prox(self.groups(self.skip), self.groups(self.weight), penalty, self.bound)
        for weight, groups in zip((self.skip, self.weight), found, strict=True):
            blocks = groups.unflatten(1, (len(weight), -1)).transpose(0, 1)  # (rows, N, d)
            weight[:, self.columns] = blocks

    def farthest(self, state: State) -> Tensor:
        """Return the λ that would bring each group to zero in one step (N,): (‖θ_n‖ + M‖W_n‖₁)/η."""
        pull = self.bound * self.groups(self.weight).abs().sum(1)
        return (self.norms() + pull) / rate_of(state, self.skip)


def hierarchical_prox(skip: Tensor, weight: Tensor, penalty: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    r"""Return the θ (N, a) and W (N, b) that are nearest to those given, under a penalty (N,) and a bound M.

    .. math:: \min_{\theta, W} \tfrac12\|v - \theta\|^2 + \tfrac12\|u - W\|^2 + \lambda\|\theta\|_2
              \quad\text{with}\quad \|W\|_\infty \le M\|\theta\|_2

    θ keeps the direction of v. With r = ‖θ‖, W is u cut off at Mr, and r solves

    .. math:: r = \frac{\big(\|v\| - \lambda + M \sum_{i \le s} |u|_{(i)}\big)_+}{1 + s M^2},

    where s counts the |u| above Mr: the first s, of the |u| in falling order, for which that is true.
    """
    length = skip.norm(dim=1, keepdim=True)  # (N, 1)
    sizes = weight.abs().sort(1, descending=True).values  # (N, b)
    zero = torch.zeros_like(length)
    count = torch.arange(sizes.shape[1] + 1, device=sizes.device, dtype=sizes.dtype)
    pull = length - penalty[:, None] + bound * torch.cat([zero, sizes.cumsum(1)], 1)  # (N, b + 1)
    radius = pull.clamp(min=0) / (1 + count * bound**2)
    above = torch.cat([sizes, zero], 1) > bound * radius
    chosen = radius.gather(1, above.sum(1, keepdim=True))  # (N, 1)
    direction = torch.where(length > 0, skip / length, torch.full_like(skip, skip.shape[1] ** -0.5))
    cut = bound * chosen
    return direction * chosen, weight.clamp(-cut, cut)
