"""Group sparsity of the first layer: its columns by field, and a λ that moves until K groups are left.

λ grows while more groups are alive than the target of the moment, in proportion to the excess, and falls while
fewer are; the target goes from N to K in the first seven tenths of the search. A group is alive if its norm is
above a tenth of the mean norm at the start. A smaller norm carries no information: the noise of one batch lifts a
group from zero, and the next step sets it back, the more often the larger λ is. For the same reason a group is
scored by its mean norm over the last tenth of the search, plus a thousandth of its mean norm over the whole
search, which orders the groups that are zero by then.

The scale of an embedding moves freely between its table and the first layer, so that the norm of the columns alone
says little: embeddings are centered first, and the norm of a field is ‖W_n‖ times the root mean square of e_n - ē_n.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.gates.controller import Keep
from lpfs.methods.base import (
    Fraction,
    HistoryCallback,
    Method,
    MethodOptions,
    Positive,
    SearchCost,
    SearchTask,
    require_model,
    restore_position,
    select_by_scores,
)
from lpfs.methods.training import center_embeddings
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs
from lpfs.models.layers import Segments
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import device_of, eval_mode, on_device

SCALE_ROWS = 20_000  # rows that the scale of the embeddings is estimated on
ALIVE_FRACTION = 0.1  # of the mean norm at the start: a group with a larger norm is alive
END_FRACTION = 0.9  # norms are averaged from this fraction of the search on
OVERALL_WEIGHT = 1e-3  # weight of the mean norm over the whole search


class FirstLayer:
    """The weight W (H, columns) of the one Linear that uses all parts of a model; block n, W_n, is that of part n.

    ``segments`` are the owners of the columns; columns of no part, whose input is zero, stay unchanged.
    """

    def __init__(self, path: str, weight: nn.Parameter, names: Sequence[str], segments: Segments) -> None:
        self.path, self.weight, self.names = path, weight, tuple(names)
        index = {name: number for number, name in enumerate(names)}
        owners = [index.get(str(owner), len(names)) for owner, width in segments for _ in range(width)]
        self.owner = torch.tensor(owners, device=weight.device)  # (columns,) part of each column, N for none
        widths = [owners.count(number) for number in range(len(names))]
        self.widths = torch.tensor(widths, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def energies(self) -> Tensor:
        """Return ‖W_n‖² of every part (N,)."""
        total = self.weight.new_zeros(len(self.names) + 1)
        return total.index_add_(0, self.owner, self.weight.square().sum(0))[:-1]

    @torch.no_grad()
    def multiply(self, factors: Tensor) -> None:
        """Multiply each block by its factor (N,), in place."""
        self.weight.mul_(torch.cat([factors, factors.new_ones(1)])[self.owner])

    def columns(self) -> Tensor:
        """Return the columns of every part (N, d); all parts must have the same width."""
        return torch.stack([torch.nonzero(self.owner == number)[:, 0] for number in range(len(self.names))])

    @torch.no_grad()
    def scales(self, model: nn.Module, batches: Iterable[Batch], rows: int = SCALE_ROWS) -> Tensor:
        """Return the root mean square of e_n - ē_n per column (N,), over the first rows of a stream."""
        inputs: list[Tensor] = []

        def store_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[:] = [args[0].double()]

        total, squares, count = (torch.zeros((), dtype=torch.float64, device=self.weight.device) for _ in range(3))
        hook = model.get_submodule(self.path).register_forward_pre_hook(store_input)
        try:
            with restore_position(batches), eval_mode(model):
                for batch in batches:
                    model(on_device(batch, device_of(model)))
                    total, squares = total + inputs[0].sum(0), squares + inputs[0].square().sum(0)
                    count += len(batch)
                    if count >= rows:
                        break
        finally:
            hook.remove()
        if not count:
            return self.weight.new_ones(len(self.names))
        variances = (squares / count - (total / count).square()).clamp(min=0).to(self.weight.dtype)  # (columns,)
        by_part = self.weight.new_zeros(len(self.names) + 1).index_add_(0, self.owner, variances)[:-1]
        return (by_part / self.widths).sqrt()


def first_layer(model: nn.Module, method: str) -> FirstLayer:
    """Return the first layer of a model; raise InputError if fields do not enter through one Linear alone."""
    model = require_model(model, method)
    inputs = {path: module for path, module in model.named_modules() if isinstance(module, Inputs)}
    prefixes = tuple(f"{path}." for path in inputs)
    weights = {name: dims for name, dims in model.layout().items() if not name.startswith(prefixes)}
    parts = set(model.fields_of_parts())
    owners = (owner for dims in weights.values() for owner, _ in dims.get(1, ()) if owner not in parts)
    reason = ""
    if any(module.width != module.dim for module in inputs.values()):
        reason = "fields have linear weights beside it"
    elif (product := next(owners, None)) is not None:
        reason = f"columns belong to products of fields such as {product!r}"
    elif len(weights) != 1 or set(next(iter(weights.values()))) != {1}:
        reason = f"fields enter through {', '.join(weights) or 'no Linear'}"
    if reason:
        raise InputError(
            f"{method} scores a field by its columns of the first layer, so fields must enter through that one Linear "
            f"alone; in {type(model).__name__} {reason}. Choose mlp, dlrm with interaction='concat', or dlrm_cross"
        )
    (name, dims), *_ = weights.items()
    return FirstLayer(name.rpartition(".")[0], model.get_parameter(name), model.names, dims[1])


class FirstLayerMethod(Method):
    """A method on the columns of the first layer: it is defined if fields enter the model through one Linear alone."""

    search_per_k = True
    single_pass = True
    cuda_graph = True

    def check_model(self, model: nn.Module) -> None:
        first_layer(model, self.name)

    def centered_layer(self, task: SearchTask) -> FirstLayer:
        """Return the first layer of the model, whose embeddings are centered in place."""
        layer = first_layer(task.model, self.name)
        self.check(task.target, layer.names, task.steps)
        if isinstance(task.model, Model):
            center_embeddings(task.model, task.stream)
        return layer


def learning_rate_of(state: State, weight: Tensor) -> float | Tensor:
    """Return the learning rate that a weight is trained with."""
    for group in state.optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            rate: float | Tensor = group["lr"]
            return rate
    raise InputError("the optimizer does not train the first layer; give it all parameters of the model")


@dataclass(frozen=True)
class GroupLassoOptions(MethodOptions):
    """How λ is moved until K fields are alive, in fractions of the search.

    ``travel``: in which the first λ brings a group without any gradient to zero. ``end``: at which K should be reached.
    ``alive``: of the mean norm at the start, above which a group counts as alive.
    """

    travel: Positive = 0.4
    end: Fraction = 0.7
    alive: Fraction = ALIVE_FRACTION


class GroupShrinkage(HistoryCallback):
    """Shrinks N groups of weights after every step of the optimizer, and moves λ."""

    saved: ClassVar[tuple[str, ...]] = ("penalty", "unit", "recent", "overall", "started")

    def __init__(self, task: SearchTask, names: Sequence[str], options: GroupLassoOptions) -> None:
        super().__init__(task.steps)
        self.names, self.options = tuple(names), options
        self.fixed_penalty = task.target.penalty
        keep = task.target.keep or len(self.names)
        begin = min(0.1, options.end / 2)
        self.control = Keep(keep, begin=begin, end=options.end, hurry=2.0, least=4.0)  # hurry > 1: never
        device = next(task.model.parameters()).device
        # (N,) 0.0 for groups that must be kept: they are never shrunk
        self.free = torch.tensor([float(name not in task.target.must_keep) for name in names], device=device)
        self.penalty = torch.tensor(float(self.fixed_penalty or 0.0), device=device)
        self.started = False
        self.unit = torch.zeros((), device=device)  # mean norm at the first shrinkage
        self.recent, self.overall, self.current = (torch.zeros(len(names), device=device) for _ in range(3))  # norms

    @abstractmethod
    def norms(self) -> Tensor:
        """Return the norm of every group (N,)."""

    @abstractmethod
    def shrink(self, state: State) -> None:
        """Take the proximal step of λ."""

    @abstractmethod
    def max_reachable(self, state: State) -> Tensor:
        """Return the λ that brings each group to zero in one step without any gradient (N,)."""

    def within_step(self, state: State) -> None:
        if self.started:
            self.shrink(state)
        self.current.copy_(self.norms())
        self.overall += self.current / self.steps

    def after_step(self, state: State) -> None:
        norms = self.current
        if state.step > END_FRACTION * self.steps:
            self.recent += norms / (self.steps - math.floor(END_FRACTION * self.steps))
        self.update_penalty(state, norms)
        if self.should_record(state.step):
            self.record(state, alive=self.count_alive(norms), penalty=float(self.penalty))

    def count_alive(self, norms: Tensor) -> int:
        """Return how many groups are alive."""
        return int((norms > self.options.alive * self.unit).sum())

    def update_penalty(self, state: State, norms: Tensor) -> None:
        """Increase λ if too many groups are alive, decrease it if too few are."""
        if not self.started:
            self.started = state.recapture = True
            self.unit.copy_(norms.mean())
            if self.fixed_penalty is None:
                self.penalty.copy_(self.max_reachable(state).mean() / (self.options.travel * self.steps))
        elif self.fixed_penalty is None:
            time, total, alive = state.step / self.steps, len(self.names), self.count_alive(norms)
            too_few = alive < math.floor(self.control.target(time, total))
            growth = -self.control.gain * self.control.most if too_few else self.control.growth_rate(time, total, alive)
            self.penalty.mul_(math.exp(growth / self.steps))

    def selection(self, task: SearchTask, method: str, cost: SearchCost) -> Selection:
        """Return the K groups with the largest norms, or, with a fixed λ, those alive."""
        scores = (self.recent + OVERALL_WEIGHT * self.overall).tolist()
        selected = list(compress(self.names, (self.recent > self.options.alive * self.unit).tolist()))
        facts = {"steps": self.steps, "penalty": float(self.penalty), "history": self.history, **cost.to_dict()}
        return select_by_scores(task, method, dict(zip(self.names, scores, strict=True)), selected, **facts)


class GroupLasso(FirstLayerMethod):
    r"""Group LASSO on the columns of the first layer: fields whose columns shrink to zero are dropped.

    .. math:: W_n \leftarrow \Big(1 - \frac{\eta\lambda\sqrt{d_n}}{\|\tilde W_n\|}\Big)_+ \tilde W_n

    Yuan and Lin, Model Selection and Estimation in Regression with Grouped Variables, 2006; as in the comparison of the
    LPFS paper. W_n are the columns of field n in the first layer, d_n its width, W̃ the weights after the optimizer's
    step, η the optimizer's learning rate; with Adagrad or Adam, whose steps differ between weights, η is still that one
    number. The score of a field is ‖W_n‖·rms(e_n - ē_n), so the method is defined only if fields enter through that
    layer alone. The embeddings are centered first, and the search reads the search rows once, from the pretrained
    model: on rows that the model has memorized a useless field keeps its weights. With ``keep=K`` λ is moved until K
    fields are alive; ``penalty=`` is a fixed λ, and the fields alive at the end are kept.
    """

    Options = GroupLassoOptions
    options: GroupLassoOptions
    targets = ("keep", "penalty")
    trial_options = ({"end": 0.4}, {"end": 0.9}, {"travel": 1.5}, {"alive": 0.03})

    def search(self, task: SearchTask) -> Selection:
        layer, cost = self.centered_layer(task), SearchCost()
        shrinkage = ColumnShrinkage(task, layer, self.options)
        task.fit(shrinkage, cost)
        shrinkage.finish(task)
        return shrinkage.selection(task, self.name, cost)


class ColumnShrinkage(GroupShrinkage):
    """Shrinks the columns of each field in the first layer."""

    saved = (*GroupShrinkage.saved, "scales")

    def __init__(self, task: SearchTask, layer: FirstLayer, options: GroupLassoOptions | None = None) -> None:
        super().__init__(task, layer.names, options or GroupLassoOptions())
        self.layer = layer
        self.scales = layer.scales(task.model, task.stream)  # (N,) of the embeddings at the start

    def norms(self) -> Tensor:
        return self.column_norms() * self.scales

    def column_norms(self) -> Tensor:
        """Return ‖W_n‖ (N,)."""
        return self.layer.energies().sqrt()

    def shrink(self, state: State) -> None:
        threshold = self.penalty * self.unit_threshold(state) * self.free
        self.layer.multiply(shrink_factors(self.column_norms(), threshold))

    def finish(self, task: SearchTask) -> None:
        """Correct the norms for the growth of the embeddings in the search."""
        growth = self.layer.scales(task.model, task.stream) / self.scales.clamp(min=1e-12)
        self.recent *= growth

    def unit_threshold(self, state: State) -> Tensor:
        """Return by how much λ = 1 reduces the norm of each block in a step: η√d_n (N,)."""
        return learning_rate_of(state, self.layer.weight) * self.layer.widths.sqrt()

    def max_reachable(self, state: State) -> Tensor:
        return self.column_norms() / self.unit_threshold(state)


def shrink_factors(norms: Tensor, threshold: Tensor) -> Tensor:
    """Return the factor of each group (N,) that reduces its norm by ``threshold``, at most to zero.

    >>> shrink_factors(torch.tensor([4.0, 1.0, 0.0]), torch.tensor(2.0))
    tensor([0.5000, 0.0000, 0.0000])
    """
    return torch.where(norms > threshold, 1 - threshold / norms, torch.zeros_like(norms))
