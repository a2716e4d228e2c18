"""Group sparsity of the first layer: its columns by field, and a λ that moves until K groups are left.

λ grows while more groups are alive than the target of the moment, in proportion to the excess, and falls while
fewer are; the target goes from N to K in the first seven tenths of the search. A group is alive if its norm is
above a tenth of the mean norm at the start. A smaller norm carries no information: the noise of one batch lifts a
group from zero, and the next step sets it back, the more often the larger λ is. For the same reason a group is
scored by its mean norm over the last tenth of the search, plus a thousandth of its mean norm over the whole
search, which orders the groups that are zero by then.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.gates.controller import Keep
from lpfs.methods.base import HistoryCallback, SearchCost, SearchTask, require_model, select_by_scores
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs
from lpfs.models.layers import Segments
from lpfs.schema import Selection
from lpfs.train.callbacks import State

TRAVEL = 0.4  # fraction of a search in which the first λ brings a group without any gradient to zero
ALIVE_FRACTION = 0.1  # of the mean norm at the start: a group with a larger norm is alive
END_FRACTION = 0.9  # norms are averaged from this fraction of the search on
OVERALL_WEIGHT = 1e-3  # weight of the mean norm over the whole search
SAVED = ("penalty", "unit", "recent", "overall")


class FirstLayer:
    """The weight W of the one Linear that uses all parts of a model; block n, W_n, are the columns of part n.

    Args:
        path: path of the Linear in the model.
        weight: (H, columns).
        names: the parts, in order.
        segments: owners of the columns, in order; columns of other owners (their input is zero) stay unchanged.
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


def first_layer(model: nn.Module, method: str) -> FirstLayer:
    """Return the first layer of a model; raise InputError if fields do not enter through one Linear alone."""
    model = require_model(model, method)
    inputs = {path: module for path, module in model.named_modules() if isinstance(module, Inputs)}
    weights = {
        name: dims for name, dims in model.layout().items() if not any(name.startswith(f"{path}.") for path in inputs)
    }
    segments = [segment for dims in weights.values() for segment in dims.get(1, ())]
    reason = _other_paths(model, list(inputs.values()), segments)
    if not reason and (len(weights) != 1 or set(next(iter(weights.values()))) != {1}):
        reason = f"fields enter through {', '.join(weights) or 'no Linear'}"
    if reason:
        raise InputError(
            f"{method} scores a field by its columns of the first layer, so fields must enter through that one "
            f"Linear alone; in {type(model).__name__} {reason}. Choose mlp, dlrm with interaction='concat', or "
            "dlrm_cross"
        )
    (name, dims), *_ = weights.items()
    return FirstLayer(name.rpartition(".")[0], model.get_parameter(name), model.names, dims[1])


def _other_paths(model: Model, inputs: Sequence[Inputs], segments: Sequence[tuple[Hashable, int]]) -> str:
    """Return how fields reach the prediction outside of their own columns; empty if they do not."""
    if any(module.width != module.dim for module in inputs):
        return "fields have linear weights beside it"
    parts = set(model.fields_of_parts())
    product = next((owner for owner, _ in segments if owner not in parts), None)
    return "" if product is None else f"columns belong to products of fields such as {product!r}"


def learning_rate_of(state: State, weight: Tensor) -> float | Tensor:
    """Return the learning rate that a weight is trained with."""
    for group in state.optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            rate: float | Tensor = group["lr"]
            return rate
    raise InputError("the optimizer does not train the first layer; give it all parameters of the model")


class GroupShrinkage(HistoryCallback):
    """Shrinks groups of weights after every step of the optimizer, and moves λ.

    Args:
        task: the search.
        names: names of the N groups.
        delay: fraction of the search before the first shrinkage.
    """

    def __init__(self, task: SearchTask, names: Sequence[str], delay: float = 0.0) -> None:
        super().__init__(task.steps)
        self.names, self.first_step = tuple(names), delay * task.steps
        self.fixed_penalty = task.target.penalty
        keep = task.target.keep or len(self.names)
        self.control = Keep(keep, begin=delay + 0.1, end=0.7, hurry=2.0, least=4.0)  # hurry > 1: never
        device = next(task.model.parameters()).device
        # (N,) 0.0 for groups that must be kept: they are never shrunk
        self.free = torch.tensor([float(name not in task.target.must_keep) for name in names], device=device)
        self.penalty = torch.tensor(float(self.fixed_penalty or 0.0), device=device)
        self.started = False
        self.unit = torch.zeros((), device=device)  # mean norm at the first shrinkage
        self.recent, self.overall = (torch.zeros(len(names), device=device) for _ in range(2))

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
        """Shrink, from the first shrinkage on."""
        if self.started:
            self.shrink(state)

    def after_step(self, state: State) -> None:
        """Move λ, and record the state of the search."""
        norms = self.norms()
        self.overall += norms / self.steps
        if state.step > END_FRACTION * self.steps:
            self.recent += norms / (self.steps - math.floor(END_FRACTION * self.steps))
        if state.step >= self.first_step:
            self.update_penalty(state, norms)
        if self.should_record(state.step):
            self.record(state, alive=self.count_alive(norms), penalty=float(self.penalty))

    def count_alive(self, norms: Tensor) -> int:
        """Return how many groups are alive."""
        return int((norms > ALIVE_FRACTION * self.unit).sum())

    def update_penalty(self, state: State, norms: Tensor) -> None:
        """Increase λ if too many groups are alive, decrease it if too few are."""
        if not self.started:
            self.started = state.recapture = True
            self.unit.copy_(norms.mean())
            if self.fixed_penalty is None:
                self.penalty.copy_(self.max_reachable(state).mean() / (TRAVEL * self.steps))
        elif self.fixed_penalty is None:
            time, total, alive = state.step / self.steps, len(self.names), self.count_alive(norms)
            too_few = alive < math.floor(self.control.target(time, total))
            growth = -self.control.gain * self.control.most if too_few else self.control.growth_rate(time, total, alive)
            self.penalty.mul_(math.exp(growth / self.steps))

    def selection(self, task: SearchTask, method: str, cost: SearchCost) -> Selection:
        """Return the K groups with the largest norms, or, with a fixed λ, those alive."""
        scores = (self.recent + OVERALL_WEIGHT * self.overall).tolist()
        alive = (self.recent > ALIVE_FRACTION * self.unit).tolist()
        selected = [name for name, is_alive in zip(self.names, alive, strict=True) if is_alive]
        by_name = dict(zip(self.names, scores, strict=True))
        facts = {"steps": self.steps, "penalty": float(self.penalty), **cost.to_dict()}
        return replace(select_by_scores(task, method, by_name, selected, **facts), history=tuple(self.history))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs; the weights are part of the model."""
        tensors = {name: getattr(self, name).clone() for name in SAVED}
        return {**tensors, "started": self.started, "history": list(self.history)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for name in SAVED:
            getattr(self, name).copy_(values[name])
        self.started, self.history = values["started"], list(values["history"])
