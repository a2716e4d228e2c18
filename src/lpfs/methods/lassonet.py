"""LassoNet: skip weights of a field bound its weights in the first layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.methods.base import MethodOptions, Positive, SearchCost, SearchTask
from lpfs.methods.group_sparsity import FirstLayer, FirstLayerMethod, GroupShrinkage, first_layer, learning_rate_of
from lpfs.schema import Selection
from lpfs.train.callbacks import State

DENSE_FRACTION = 0.2  # fraction of the search that trains the skip layer without a penalty


@dataclass(frozen=True)
class LassoNetOptions(MethodOptions):
    """M, the bound of the first layer relative to the skip weights (10 in the paper)."""

    M: Positive = 10.0


class LassoNet(FirstLayerMethod):
    r"""A network in which the weights of a field are bounded by its weights in a linear skip layer.

    .. math:: f(x) = \theta^\top x + \mathrm{net}(x), \qquad
              \min L + \lambda \sum_n \|\theta_n\|_2 \quad\text{with}\quad \|W_n\|_\infty \le M \|\theta_n\|_2

    Lemhadri et al., LassoNet: A Neural Network with Feature Sparsity, 2021, in its form for groups. x are the
    concatenated embeddings, W_n the columns of field n in the first layer, θ_n its weights in a linear layer from
    x to the logits. After every step of the optimizer both are replaced by their hierarchical proximal step. In
    the paper λ grows by 2 % at a time, and the network is trained to convergence at each value; here λ is
    controlled within one search, so that K fields are left at the end: that path is this package's. Before it the
    skip layer is trained for a fifth of the search without a penalty. The score of a field is ‖θ_n‖. ``penalty=``
    is a fixed λ, and the fields alive at the end are kept.

    The search trains a copy of the model with the skip layer; the model itself is not changed.
    """

    Options = LassoNetOptions
    options: LassoNetOptions
    targets = ("keep", "penalty")
    trial_options = ({"M": 3.0}, {"M": 30.0}, {"M": 1.0}, {"M": 100.0})

    def search(self, task: SearchTask) -> Selection:
        self.check(task.target, first_layer(task.model, self.name).names, task.steps)
        model, optimizer = copy.deepcopy((task.model, task.optimizer))
        net = ModelWithSkip(model, first_layer(model, self.name))
        optimizer.add_param_group({"params": [net.skip.weight], "lr": optimizer.param_groups[0]["lr"]})
        shrinkage = HierarchicalShrinkage(replace(task, model=net), net, self.options.M)
        cost = SearchCost()
        task.fit(shrinkage, cost, model=net, optimizer=optimizer)
        return shrinkage.selection(task, self.name, cost)


class ModelWithSkip(nn.Module):
    """A model plus a linear layer from the input of its first layer to the logits, zero at the start."""

    def __init__(self, model: nn.Module, layer: FirstLayer) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        outputs = int(getattr(model, "outputs_count", 1))
        self.skip = nn.Linear(layer.weight.shape[1], outputs, bias=False).to(layer.weight)
        nn.init.zeros_(self.skip.weight)
        self.layer_input: Tensor | None = None
        model.get_submodule(layer.path).register_forward_pre_hook(self._store_input)

    def _store_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.layer_input = args[0]

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch)
        assert self.layer_input is not None
        skipped: Tensor = self.skip(self.layer_input)
        self.layer_input = None
        return logits + (skipped if logits.ndim == 2 else skipped[:, 0])


class HierarchicalShrinkage(GroupShrinkage):
    """Takes the hierarchical proximal step."""

    def __init__(self, task: SearchTask, net: ModelWithSkip, bound: float) -> None:
        super().__init__(task, net.layer.names, delay=DENSE_FRACTION if task.target.penalty is None else 0.0)
        self.skip, self.weight, self.bound = net.skip.weight, net.layer.weight, bound
        self.columns = net.layer.columns()  # (N, d)

    def groups(self, weight: Tensor) -> Tensor:
        """Return the columns of every field as one row (N, rows·d)."""
        return weight.detach()[:, self.columns].transpose(0, 1).flatten(1)

    def norms(self) -> Tensor:
        norms: Tensor = self.groups(self.skip).norm(dim=1)
        return norms

    @torch.no_grad()
    def shrink(self, state: State) -> None:
        penalty = learning_rate_of(state, self.skip) * self.penalty * self.free
        stepped = hierarchical_prox(self.groups(self.skip), self.groups(self.weight), penalty, self.bound)
        for weight, groups in zip((self.skip, self.weight), stepped, strict=True):
            weight[:, self.columns] = groups.unflatten(1, (len(weight), -1)).transpose(0, 1)  # (rows, N, d)

    def max_reachable(self, state: State) -> Tensor:
        weight_norms = self.bound * self.groups(self.weight).abs().sum(1)
        return (self.norms() + weight_norms) / learning_rate_of(state, self.skip)


def hierarchical_prox(skip: Tensor, weight: Tensor, penalty: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    r"""Return the θ (N, a) and W (N, b) nearest to ``skip`` and ``weight``, under a penalty (N,) and a bound M.

    .. math:: \min_{\theta, W} \tfrac12\|v - \theta\|^2 + \tfrac12\|u - W\|^2 + \lambda\|\theta\|_2
              \quad\text{with}\quad \|W\|_\infty \le M\|\theta\|_2

    θ has the direction of v. With r = ‖θ‖, W is u clipped at Mr, and r solves

    .. math:: r = \frac{\big(\|v\| - \lambda + M \sum_{i \le s} |u|_{(i)}\big)_+}{1 + s M^2},

    where s is the number of |u| above Mr: the first s, of the |u| in descending order, for which that is true.
    """
    length = skip.norm(dim=1, keepdim=True)  # (N, 1)
    sizes = weight.abs().sort(1, descending=True).values  # (N, b)
    zero = torch.zeros_like(length)
    count = torch.arange(sizes.shape[1] + 1, device=sizes.device, dtype=sizes.dtype)
    numerator = length - penalty[:, None] + bound * torch.cat([zero, sizes.cumsum(1)], 1)  # (N, b + 1)
    radius = numerator.clamp(min=0) / (1 + count * bound**2)
    above = torch.cat([sizes, zero], 1) > bound * radius
    solution = radius.gather(1, above.sum(1, keepdim=True))  # (N, 1)
    direction = torch.where(length > 0, skip / length, torch.full_like(skip, skip.shape[1] ** -0.5))
    limit = bound * solution
    return direction * solution, weight.clamp(-limit, limit)
