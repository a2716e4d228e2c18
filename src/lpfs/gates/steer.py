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

if TYPE_CHECKING:
    from lpfs.gates.module import Gates


def steer(gates: Gates, prox: ProxSGD, keep: Keep, done: int) -> None:
    """Move λ after a step of the gates; take the step back if it killed too many."""
    penalty, caution, frozen = gates.view("control").tolist()
    u = done / gates.steps
    alive = int(np.count_nonzero(gates.view("x")))
    if alive < keep.keep:
        _step_back(gates, prox)
        alive = int(np.count_nonzero(gates.view("x")))
        penalty, caution = penalty * keep.cut, max(0.01, caution * 0.5)
    elif frozen:
        penalty *= math.exp(-keep.fade / gates.steps)
        _lead_away(gates, keep, done)
    else:
        penalty *= math.exp(min(20.0, caution * keep.growth(u, len(gates.names), alive) / gates.steps))
        caution = min(1.0, caution * 1.1)
    if not frozen and alive == keep.keep and u >= keep.freeze:
        clear = float(gates.values[gates.x != 0].abs().min()) >= keep.clear
        if clear or u >= keep.hurry:
            gates.dead.copy_(gates.x == 0)
            frozen = 1.0
    gates.store("control", penalty, caution, frozen)
    remember(gates, prox)
    set_penalty(gates, prox, penalty, bool(frozen))


def remember(gates: Gates, prox: ProxSGD) -> None:
    """Keep x and its momentum, to step back to."""
    velocity = prox.state[gates.x].get("momentum_buffer")
    x = gates.x.detach()
    if velocity is None:
        velocity = torch.zeros_like(x)
    if x.is_cpu:
        gates.store("before", gates.view("x"), velocity.numpy())
    else:
        gates.before.copy_(torch.stack([x, velocity]))


def set_penalty(gates: Gates, prox: ProxSGD, penalty: float, frozen: bool) -> None:
    """Tell the optimizer its λ: infinite where the dead set is frozen."""
    prox.param_groups[0]["penalty"] = torch.where(gates.dead, math.inf, penalty) if frozen else penalty


@torch.no_grad()
def _step_back(gates: Gates, prox: ProxSGD) -> None:
    velocity = prox.state[gates.x].get("momentum_buffer")
    gates.x.copy_(gates.before[0])
    if velocity is not None:
        velocity.copy_(gates.before[1])


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
