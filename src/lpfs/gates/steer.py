"""Steering: what ``gates.step()`` does to λ and x while ``keep=K`` is asked for (see control.py)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.gates.control import Keep
from lpfs.gates.optimizer import ProxSGD

PARTS = 1 << 24  # as fine as float32: coarser ones would turn the last bit of a gate into a step of λ

if TYPE_CHECKING:
    from lpfs.gates.module import Gates


def steer(gates: Gates, prox: ProxSGD, keep: Keep, done: int) -> None:
    """Move λ after a step of the gates; hold those who died in it if they were too many."""
    penalty, caution, frozen, smooth = gates.view("control").tolist()
    u = done / gates.steps
    alive = int(np.count_nonzero(gates.view("x")))
    held = alive < keep.keep
    if held:
        _hold(gates, prox, keep.keep - alive if u >= keep.hurry else len(gates.names))
        alive = int(np.count_nonzero(gates.view("x")))
        least = 0.0 if frozen else min(penalty, gates.base_penalty)
        penalty, caution = max(penalty * keep.cut, least), max(0.01, caution * 0.5)
    open_ = openness(gates.values) if keep.ahead else 0.0
    smooth = smooth + (open_ - smooth) / max(1.0, keep.lag * gates.steps) if smooth else open_
    if frozen and not held:
        penalty *= math.exp(-keep.fade / gates.steps)
    elif not held:
        expected = keep.expected(u, alive, open_, smooth)
        penalty *= math.exp(min(20.0, caution * keep.growth(u, len(gates.names), expected) / gates.steps))
        caution = min(1.0, caution * 1.1)
    if frozen:
        _lead_away(gates, keep, done)
    if not frozen and alive == keep.keep and u >= keep.freeze:
        clear = float(gates.values[gates.x != 0].abs().min()) >= keep.clear
        if clear or u >= keep.hurry:
            gates.dead.copy_(gates.x == 0)
            frozen = 1.0
    gates.store("control", penalty, caution, frozen, smooth)
    remember(gates)
    set_penalty(gates, prox, penalty, bool(frozen))


def openness(values: Tensor) -> float:
    """Return Σ|g| over the largest |g|, each in parts of 2⁻²⁴: whole numbers add up alike in any order.

    >>> openness(torch.tensor([0.0, 0.8, -0.4, 0.2]))
    1.75
    """
    size = values.detach().abs()
    return int((size / size.max().clamp(min=1e-30) * PARTS).long().sum()) / PARTS


def remember(gates: Gates) -> None:
    """Keep x, to hold those who die in the next step where they are."""
    gates.before.copy_(gates.x.detach())


def set_penalty(gates: Gates, prox: ProxSGD, penalty: float, frozen: bool) -> None:
    """Tell the optimizer its λ: infinite where the dead set is frozen."""
    prox.param_groups[0]["penalty"] = torch.where(gates.dead, math.inf, penalty) if frozen else penalty


@torch.no_grad()
def _hold(gates: Gates, prox: ProxSGD, most: int) -> None:
    """Put back up to so many of those who died in this step, at rest; who was farthest from zero comes first."""
    held = held_back(gates.x, gates.before, torch.tensor(most, device=gates.x.device))
    velocity = prox.state[gates.x].get("momentum_buffer")
    gates.x.copy_(torch.where(held, gates.before, gates.x))
    if velocity is not None:
        velocity.masked_fill_(held, 0.0)


def held_back(x: Tensor, before: Tensor, most: Tensor) -> Tensor:
    """Return who (N,) died in this step and is put back: at most so many, who was farthest from zero first.

    >>> x, before = torch.tensor([0.0, 0.0, 0.5, 0.0]), torch.tensor([0.1, -0.2, 0.4, 0.0])
    >>> held_back(x, before, torch.tensor(1))
    tensor([False,  True, False, False])
    """
    died = (x == 0) & (before != 0)
    order = torch.where(died, before.abs(), -1.0).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=x.device)
    return died & (rank < most)


@torch.no_grad()
def _lead_away(gates: Gates, keep: Keep, done: int) -> None:
    """Lead survivors that sit near zero away from it, before the search ends."""
    near = (gates.values.abs() < 1.5 * keep.clear) & (gates.x != 0)
    if bool(near.any()):
        scale = gates.epsilon.sqrt() if gates.function.square else gates.epsilon
        pace = min(max(1, gates.steps - done), 100)
        gates.x.add_(torch.where(near, torch.sign(gates.x) * 2 * scale / pace, 0.0))


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor: a view on the CPU, a copy from elsewhere."""
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
