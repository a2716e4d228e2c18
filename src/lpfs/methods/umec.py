r"""UMEC: the smallest groups of the first layer are squeezed out under a budget, as a min-max problem.

.. math:: \min_{W,s}\ \max_{y,z \ge 0}\ L(W) + y\, S_{\lceil s \rceil}(W) + z\,(R(s) - B)

Shen et al., UMEC: Unified Model and Embedding Compression for Efficient Recommendation Systems, 2021. S_s is
the sum of the s smallest energies ‖W_n‖² of the first layer's groups, R(s) = 1 - s/N the relative cost of what
is left, and B = K/N the budget. After every step of the optimizer the ⌈s⌉ smallest groups shrink by 1/(1 +
2ηy); s moves by its gradient, where the ceiling passes it straight through, and y and z climb, never below
zero. At the end the ⌈s⌉ smallest groups are gone; training the rest further is what comes after the search.

Ours: energies count in shares of their total at the start, s, y and z move at rates given for a whole search
(so that they mean the same in a short one), and s never goes beyond N - K, which is what the budget asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import FirstLayer, first_layer
from lpfs.methods.group_lasso import rate_of
from lpfs.methods.polarize import RECORDS
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys
from lpfs.train.callbacks import Callback, State


@dataclass(frozen=True)
class Options:
    """Settings: how far s (of N), y and z move in a whole search when what moves them stays at 1."""

    s_rate: float = 10.0
    y_rate: float = 100.0
    z_rate: float = 10.0

    def __post_init__(self) -> None:
        check_numbers(self, positive=("s_rate", "y_rate", "z_rate"))


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("umec", wish)


def check_model(model: nn.Module) -> None:
    """Refuse a backbone on which this is not defined; the model may be one without numbers."""
    first_layer(model, "umec")


def search(task: Task) -> Selection:
    """Train the model under the budget, in place; return the K groups with the most energy."""
    options = Options(**known_keys(Options, task.options))
    need_number("umec", task.wish)
    layer = first_layer(task.model, "umec")
    task.wish.check(layer.names)
    driver, effort = Budget(task, layer, options), Effort()
    task.fit(driver, effort)
    energies = layer.energies()
    found = ranked(
        task,
        "umec",
        dict(zip(layer.names, energies.tolist(), strict=True)),
        steps=task.steps,
        own_count=len(layer.names) - math.ceil(float(driver.s)),
        **effort.told(),
    )
    gone = torch.tensor([float(name in found.kept) for name in layer.names], device=energies.device)
    layer.multiply(gone)
    return replace(found, history=tuple(driver.history))


class Budget(Callback):
    """Squeezes the smallest groups, and moves s, y and z; all on the device, so that a graph can be captured."""

    def __init__(self, task: Task, layer: FirstLayer, options: Options) -> None:
        assert task.wish.keep is not None
        self.layer, self.steps, self.options = layer, task.steps, options
        self.total, self.keep = len(layer.names), task.wish.keep
        device = layer.weight.device
        must = [float(name in task.wish.must_keep) for name in layer.names]
        self.held = torch.tensor(must, device=device) > 0  # (N,) never among the smallest
        self.s, self.y, self.z = (torch.zeros((), device=device) for _ in range(3))
        self.unit = layer.energies().mean().clamp(min=1e-30)
        self.every = max(1, task.steps // RECORDS)
        self.history: list[dict[str, Any]] = []

    def within_step(self, state: State) -> None:
        """Shrink the smallest groups, then move s down and y and z up their slopes."""
        energies = self.layer.energies() / self.unit
        order = energies.masked_fill(self.held, math.inf).argsort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(self.total, device=order.device))
        smallest = rank < self.s.ceil()  # (N,)
        factor = 1 / (1 + 2 * rate_of(state, self.layer.weight) * self.y)
        self.layer.multiply(torch.where(smallest, factor, torch.ones_like(energies)))
        squeezed = torch.where(smallest, energies, torch.zeros_like(energies)).mean()  # S
        following = torch.where(rank == self.s.ceil(), energies, torch.zeros_like(energies)).sum()
        over = 1 - self.s / self.total - self.keep / self.total  # R(s) - B
        uphill = self.z - self.y * following  # minus the slope along s/N
        moved = self.s + self.total * self.options.s_rate / self.steps * uphill
        self.s.copy_(moved.clamp(0, self.total - self.keep))
        self.y.add_(self.options.y_rate / self.steps * squeezed).clamp_(min=0)
        self.z.add_(self.options.z_rate / self.steps * over).clamp_(min=0)

    def after_step(self, state: State) -> None:
        """Write down where the search stands, now and then."""
        if state.step % self.every == 0 or state.step == self.steps:
            loss = float("nan") if state.loss is None else float(state.loss.detach())
            left = self.total - math.ceil(float(self.s))
            found = {"step": state.step, "loss": loss, "alive": left, "y": float(self.y), "z": float(self.z)}
            self.history.append(found)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill; the weights are the model's."""
        numbers = {name: getattr(self, name).clone() for name in ("s", "y", "z", "unit")}
        return {**numbers, "history": list(self.history)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        for name in ("s", "y", "z", "unit"):
            getattr(self, name).copy_(values[name])
        self.history = list(values["history"])
