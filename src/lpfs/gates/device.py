"""The same steps as ``ProxSGD.step`` and ``Gates.step``, without a branch and without a word from the host.

On a GPU every question that the host asks a tensor waits for all that was queued before it. Here each decision
of :mod:`~lpfs.gates.steer` is a ``torch.where`` on the device, so nothing waits, and the whole step can be
captured in a CUDA graph. What depends on the step number alone (ε, η, the target, the phases) stands in a table,
read by the step count on the device. The arithmetic is that of the plain path; tests compare the two step by step.

What would raise there sets a flag here, and moves nothing where nothing may move; ``Gates.check`` reads the flags.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpfs.gates.optimizer import ProxSGD, factor_of, prox_of

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

# columns of the table
EPSILON, LR, TARGET, WIDTH, BEGUN, RUSH, FREEZE, HURRY, PACE, REFRESH, END = range(11)
# flags: how many gradients were not finite; the step after which all gates were zero; whether the end was wrong
NOT_FINITE, ALL_ZERO, WRONG_END = range(3)


def make_table(gates: Gates) -> Tensor:
    """Return (steps + 1, 11) in float64: row t holds what holds after step t; later steps read the last row."""
    rows = []
    keep, total = gates.keep, len(gates.names)
    for done in range(gates.steps + 1):
        u = done / gates.steps
        row = [gates.schedule.epsilon(done), gates.schedule.lr(done)]
        if keep is None:
            row += [0.0] * 6
        else:
            target = keep.target(u, total)
            width = max(1.0, keep.width * min(target, total - keep.keep))
            rush = keep.gain * (1 + 100 * (u - keep.hurry) / (1 - keep.hurry)) if u >= keep.hurry else 0.0
            row += [target, width, u >= keep.begin, rush, u >= keep.freeze, u >= keep.hurry]
        row += [min(max(1, gates.steps - done), 100), gates.refreshes(done), done == gates.steps]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def move(prox: ProxSGD, gates: Gates) -> None:
    """Take one step of the gates' optimizer; a gradient that is not finite moves nothing and sets a flag."""
    x, group = gates.x, prox.param_groups[0]
    grad = x.grad
    if grad is None:
        return
    finite = torch.isfinite(grad).all()
    gates.flags[NOT_FINITE] += ~finite
    lr = gates.row()[LR]
    direction, momentum = grad, group["momentum"]
    if momentum:
        state = prox.state[x]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(x)
        velocity = state["momentum_buffer"]
        direction = velocity * momentum + grad
        velocity.copy_(torch.where(finite, direction, velocity))
    # one rounding, as in the fused x.add_(direction, alpha=-lr)
    moved = (x.double() - lr.to(x.dtype).double() * direction.double()).to(x.dtype)
    moved = prox_of(group)(moved, _threshold(gates, group, lr))
    x.copy_(torch.where(finite, moved, x))


def _threshold(gates: Gates, group: dict[str, object], lr: Tensor) -> Tensor:
    """Return λη for every gate (N,), rounded as in the plain path; infinite where the dead set is frozen."""
    penalty, _, frozen = gates.control.unbind()
    reach = factor_of(group) * lr
    free = (penalty * reach).to(gates.x.dtype)
    held = torch.where(gates.dead, math.inf, penalty.to(gates.x.dtype)) * reach.to(gates.x.dtype)
    threshold = torch.where(frozen != 0, held, free)
    weights = group["weights"]
    return threshold if weights is None else weights * threshold  # type: ignore[operator]


def advance(gates: Gates, prox: ProxSGD | None) -> None:
    """Move on by one training step: λ, ε, the rescale, the step count; set flags where something is wrong."""
    gates.steps_done += 1
    row = gates.row()
    if gates.keep is not None and prox is not None:
        _steer(gates, prox, row)
    alive = gates.x != 0
    none = ~alive.any()
    gates.flags[ALL_ZERO] = torch.where(
        none & (gates.flags[ALL_ZERO] == 0), gates.steps_done, gates.flags[ALL_ZERO]
    )
    gates.epsilon.copy_(row[EPSILON])
    if gates.rescale != "off":
        gates.scale.copy_(torch.where(row[REFRESH] != 0, gates.fresh_scale(alive), gates.scale))
    if gates.keep is not None:
        smallest = torch.where(alive, gates.values.abs(), math.inf).amin().double()
        wrong = (alive.sum() != gates.keep.keep) | (smallest < gates.keep.clear)
        gates.flags[WRONG_END] |= ((row[END] != 0) & (gates.steps_done == gates.steps) & wrong).long()


def _steer(gates: Gates, prox: ProxSGD, row: Tensor) -> None:
    """Do what :func:`lpfs.gates.steer.steer` does."""
    keep = gates.keep
    assert keep is not None
    x, velocity = gates.x, prox.state[gates.x].get("momentum_buffer")
    penalty, caution, frozen = gates.control.unbind()
    settled = frozen != 0
    alive = (x != 0).sum()
    few = alive < keep.keep
    back = torch.where(few, gates.before[0], x)
    alive = (back != 0).sum()
    values = gates.values_of(back)

    excess = alive - row[TARGET]
    growth = keep.gain * (excess / row[WIDTH]).clamp(max=keep.most)
    growth = torch.where(row[HURRY] != 0, row[RUSH], growth)
    growth = torch.where((row[BEGUN] != 0) & (excess > 0), growth, 0.0)
    grown = penalty * torch.exp((caution * growth / gates.steps).clamp(max=20.0))
    faded = penalty * math.exp(-keep.fade / gates.steps)
    after = torch.where(few, penalty * keep.cut, torch.where(settled, faded, grown))
    care = torch.where(settled, caution, (caution * 1.1).clamp(max=1.0))
    care = torch.where(few, (caution * 0.5).clamp(min=0.01), care)

    near = (values.abs() < 1.5 * keep.clear) & (back != 0) & settled & ~few
    size = gates.epsilon.sqrt() if gates.function.square else gates.epsilon
    led = torch.where(near, back + torch.sign(back) * 2 * size / row[PACE], back)
    smallest = torch.where(back != 0, values.abs(), math.inf).amin().double()
    freeze = ~settled & (alive == keep.keep) & (row[FREEZE] != 0) & ((smallest >= keep.clear) | (row[HURRY] != 0))
    gates.dead.copy_(torch.where(freeze, back == 0, gates.dead))
    gates.control.copy_(torch.stack([after, care, torch.where(freeze, 1.0, frozen)]))
    x.copy_(led)
    gates.before[0].copy_(led)
    if velocity is not None:
        velocity.copy_(torch.where(few, gates.before[1], velocity))
        gates.before[1].copy_(velocity)
