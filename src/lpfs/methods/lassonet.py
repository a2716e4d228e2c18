"""LassoNet: skip weights of a field bound its weights in the first layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.methods.base import (
    HistoryCallback,
    MethodOptions,
    Positive,
    SearchCost,
    SearchTask,
    require_model,
    restore_position,
    select_by_scores,
)
from lpfs.methods.group_sparsity import (
    ALIVE_FRACTION,
    END_FRACTION,
    FirstLayer,
    FirstLayerMethod,
    first_layer,
    learning_rate_of,
)
from lpfs.methods.pretraining import new_model, pretrain
from lpfs.methods.training import center_embeddings
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import device_of, on_device

DENSE_FRACTION = 0.2  # of a search without rows of pretraining, that trains the skip layer without a penalty
MIN_LEVELS, MAX_LEVELS = 20, 100  # of λ in a path; as many as fields in between
FIRST_LEVEL = 10.0  # the first λ is this many times smaller than one that removes an average field during the path
PAPER_GROWTH = 1.02  # of λ from level to level, at least
MAX_GROWTH = math.log(1.3)  # of log λ from level to level
TIE_BREAK = 1e-3  # weight of ‖θ_n‖ among fields that disappear at the same λ


@dataclass(frozen=True)
class LassoNetOptions(MethodOptions):
    """M, the bound of the first layer relative to the skip weights (10 in the paper)."""

    M: Positive = 10.0


class LassoNet(FirstLayerMethod):
    r"""A network in which the weights of a field are bounded by its weights in a linear skip layer.

    .. math:: f(x) = \theta^\top x + \mathrm{net}(x), \qquad
              \min L + \lambda \sum_n \|\theta_n\|_2 \quad\text{with}\quad \|W_n\|_\infty \le M \|\theta_n\|_2

    Lemhadri et al., LassoNet: A Neural Network with Feature Sparsity, 2021, in its form for groups. x are the
    concatenated embeddings, standardized (centered, and divided by their root mean square), W_n the columns of field n
    in the first layer, θ_n its weights in a linear layer from x to the logits. After every step of the optimizer both
    are replaced by their hierarchical proximal step. The network with the skip layer is trained from new weights on
    the rows of pretraining, in addition to the pretraining that all methods share; then λ grows in at least twenty
    levels during one pass over the search rows. The score of a field is the λ at which it disappears, so that one path
    serves every K. ``penalty=`` is a fixed λ, and the fields alive at the end are kept.

    In the paper the network is trained to convergence at each λ, on the same rows, with early stopping on a tenth of
    them, and λ grows by 2 % at a time; here it grows by at least that, faster while too many fields are left. Without
    the rows of pretraining (``lpfs.search``) the skip layer is added to a copy of the model and trained without a
    penalty in the first fifth of the search. The model itself is not changed.
    """

    Options = LassoNetOptions
    options: LassoNetOptions
    targets = ("keep", "penalty")
    trial_options = ({"M": 3.0}, {"M": 30.0}, {"M": 1.0}, {"M": 100.0})
    search_per_k = False
    pretrains = True

    def search(self, task: SearchTask) -> Selection:
        layer = first_layer(task.model, self.name)
        self.check(task.target, layer.names, task.steps)
        cost = SearchCost()
        if task.early is not None:
            model = new_model(task, self.name)
            net = ModelWithSkip(model, first_layer(model, self.name))
            optimizer = pretrain(task, net, "lassonet", cost)
            net.center(task.stream)
        else:
            model, optimizer = copy.deepcopy((require_model(task.model, self.name), task.optimizer))
            net = ModelWithSkip(model, first_layer(model, self.name))
            net.center(task.stream)
            optimizer.add_param_group({"params": [*net.skip.parameters()], "lr": optimizer.param_groups[0]["lr"]})
        path = PenaltyPath(task, net, self.options.M, delay=0.0 if task.early is not None else DENSE_FRACTION)
        task.fit(path, cost, model=net, optimizer=optimizer)
        return path.selection(task, self.name, cost)


class ModelWithSkip(nn.Module):
    """A model plus a linear layer from the input of its first layer to the logits, zero at the start."""

    def __init__(self, model: Model, layer: FirstLayer) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        outputs = int(getattr(model, "outputs_count", 1))
        self.skip = nn.Linear(layer.weight.shape[1], outputs).to(layer.weight)
        nn.init.zeros_(self.skip.weight)
        nn.init.zeros_(self.skip.bias)
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

    @torch.no_grad()
    def center(self, batches: Iterable[Batch]) -> None:
        """Center the embeddings; the skip layer, too, gets their means in its bias, so that logits stay equal."""
        with restore_position(batches):
            batch = on_device(next(iter(batches)), device_of(self.model))
        outputs = []
        for step in (lambda: None, lambda: center_embeddings(self.model, batches)):
            step()
            self.model(batch)
            assert self.layer_input is not None
            outputs.append(self.skip(self.layer_input).mean(0))
        self.layer_input = None
        self.skip.bias.add_(outputs[0] - outputs[1])


class PenaltyPath(HistoryCallback):
    """Takes hierarchical proximal steps under a λ that grows level by level, until no field is left.

    A field is alive at a level if the mean of ‖θ_n‖ over its steps is above a tenth of the mean norm at the start: the
    noise of a batch lifts it from zero. With a fixed λ there is one level, the last tenth of the search.
    """

    saved = ("penalty", "unit", "level", "sizes", "last_penalty", "last_size", "counts")

    def __init__(self, task: SearchTask, net: ModelWithSkip, bound: float, delay: float = 0.0) -> None:
        super().__init__(task.steps)
        self.names, self.fixed = net.layer.names, task.target.penalty
        self.skip, self.weight, self.bound = net.skip.weight, net.layer.weight, bound
        self.columns = net.layer.columns()  # (N, d)
        device = self.weight.device
        self.free = torch.tensor([float(name not in task.target.must_keep) for name in self.names], device=device)
        self.scales = net.layer.scales(net.model, task.stream).clamp(min=1e-12)  # (N,) of the embeddings
        self.first_step = round(delay * task.steps) if self.fixed is None else round(END_FRACTION * task.steps)
        path_steps = max(1, task.steps - self.first_step)
        self.levels = (
            1 if self.fixed is not None else min(path_steps, max(MIN_LEVELS, min(MAX_LEVELS, len(self.names))))
        )
        self.level_steps = -(-path_steps // self.levels)
        self.level, self.is_shrinking = 0, self.fixed is not None
        self.penalty = torch.tensor(float(self.fixed or 0.0), device=device)
        self.unit = torch.zeros((), device=device)  # mean norm at the start of the path
        self.sizes, self.last_penalty, self.last_size = (torch.zeros_like(self.scales) for _ in range(3))
        self.counts = [len(self.names)]  # of fields alive at the end of each level

    def groups(self, weight: Tensor) -> Tensor:
        """Return the columns of every field as one row (N, rows·d)."""
        return weight.detach()[:, self.columns].transpose(0, 1).flatten(1)

    def norms(self) -> Tensor:
        """Return ‖θ_n‖ of the standardized embeddings (N,)."""
        norms: Tensor = self.groups(self.skip).norm(dim=1) * self.scales
        return norms

    def on_begin(self, state: State) -> None:
        self.is_shrinking = self.fixed is not None or (self.level > 0 and float(self.penalty) > 0)

    def within_step(self, state: State) -> None:
        if self.is_shrinking:
            self.shrink(state)

    @torch.no_grad()
    def shrink(self, state: State) -> None:
        """Take the proximal step of λ."""
        penalty = learning_rate_of(state, self.skip) * self.penalty * self.free
        scales = self.scales[:, None]
        groups = (self.groups(self.skip) * scales, self.groups(self.weight) * scales)
        stepped = hierarchical_prox(*groups, penalty, self.bound)
        for weight, group in zip((self.skip, self.weight), stepped, strict=True):
            weight[:, self.columns] = (group / scales).unflatten(1, (len(weight), -1)).transpose(0, 1)  # (rows, N, d)

    def after_step(self, state: State) -> None:
        step = state.step - self.first_step
        if step == 0 or (state.step == 1 and self.first_step == 0):
            self.begin(state)
        if step > 0:
            self.sizes += self.norms()
            if step % self.level_steps == 0 or state.step == self.steps:
                self.end_level((step - 1) % self.level_steps + 1)
        if self.should_record(state.step):
            self.record(state, alive=self.counts[-1], penalty=float(self.penalty), level=self.level)

    def begin(self, state: State) -> None:
        """Set the first λ: it would bring an average field to zero in ten times the whole path."""
        self.level = max(1, self.level)
        self.unit.copy_(self.norms().mean())
        if self.fixed is None:
            reach = self.norms() + self.bound * self.groups(self.weight).abs().sum(1) * self.scales
            total = learning_rate_of(state, self.skip) * self.levels * self.level_steps
            self.penalty.copy_(reach.mean() / total / FIRST_LEVEL)
            self.is_shrinking, state.recapture = float(self.penalty) > 0, True

    def end_level(self, steps: int) -> None:
        """Record the fields that are still alive, and increase λ."""
        sizes = self.sizes / steps
        alive = sizes > ALIVE_FRACTION * self.unit if self.fixed is None else sizes > 0
        self.last_penalty.copy_(torch.where(alive, self.penalty, self.last_penalty))
        self.last_size.copy_(torch.where(alive, sizes, self.last_size))
        self.counts.append(int(alive.sum()))
        self.sizes.zero_()
        target = len(self.names) * (1 - self.level / self.levels)
        excess = max(0.0, self.counts[-1] - target) / max(1.0, target)
        self.level += 1
        if self.fixed is None:
            self.penalty.mul_(math.exp(min(MAX_GROWTH, math.log(PAPER_GROWTH) + excess)))

    def selection(self, task: SearchTask, method: str, cost: SearchCost) -> Selection:
        """Return the fields that disappear last, or, with a fixed λ, those alive at the end."""
        sizes = self.last_size / self.last_size.max().clamp(min=1e-30)
        scores = (self.last_penalty if self.fixed is None else (self.last_size > 0).float()) * (1 + TIE_BREAK * sizes)
        scores = scores + TIE_BREAK * (self.free == 0) * scores.max()
        selected = None
        if self.fixed is not None:
            selected = list(compress(self.names, ((self.last_size > 0) | (self.free == 0)).tolist()))
        by_name = dict(zip(self.names, scores.tolist(), strict=True))
        facts = {"steps": self.steps, "levels": self.levels, "history": self.history, **cost.to_dict()}
        return select_by_scores(task, method, by_name, selected, **facts, penalty=float(self.penalty))


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
