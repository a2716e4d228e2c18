"""The same steps as ``ProxSGD.step`` and ``Gates.step``, without a branch and without a word from the host.

On a GPU every question that the host asks a tensor waits for all that was queued before it. Here each decision
of :mod:`~lpfs.gates.steer` is a ``torch.where`` on the device, so nothing waits, and the whole step can be
captured in a CUDA graph. What depends on the step number alone (ε, η, the target, the phases) stands in a table,
read by the step count on the device. The arithmetic is that of the plain path; tests compare the two step by step.

No number of the host goes into a ``torch.where``: that would be a copy to the device.

What would raise there sets a flag here, and moves nothing where nothing may move; ``Gates.check`` reads the flags.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpfs.gates.optimizer import ProxSGD, factor_of, prox_of
from lpfs.gates.steer import PARTS, held_back

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

# columns of the table
EPSILON, LR, TARGET, WIDTH, LIMIT, RUSH, FREEZE, HURRY, PACE, REFRESH, SCALE, COUNTED = range(12)
# flags: how many gradients were not finite; the step after which all gates were zero
NOT_FINITE, ALL_ZERO = range(2)


def make_table(gates: Gates) -> Tensor:
    """Return (steps + 1, 12) in float64, on the device: row t is for step t; later steps read the last row."""
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
            row += [target, width, keep.limit(u), rush, u >= keep.freeze, u >= keep.hurry]
        row += [min(max(1, gates.steps - done), 100), gates.refreshes(done), 0.0]
        row += [1.0 if keep is None else keep.counted(u)]
        rows.append(row)
    table = torch.tensor(rows, dtype=torch.float64).to(gates.x.device)
    if gates.rescale == "epsilon":
        fresh = table[:, REFRESH].nonzero().flatten()
        table[fresh, SCALE] = _scales(gates, table[fresh, EPSILON].to(gates.x.dtype)).double()
    return table


def _scales(gates: Gates, epsilons: Tensor) -> Tensor:
    """Return the gate of x = 1 at each ε; one by one on a CPU, where powers of many numbers round otherwise."""
    if epsilons.is_cuda:
        return gates.function.value(torch.ones_like(epsilons), epsilons) / gates.norm[0]
    one = torch.ones_like(gates.x)
    found = [(gates.function.value(one, each) / gates.norm)[0] for each in epsilons.unbind()]
    return torch.stack(found) if found else epsilons


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
    penalty, _, frozen, _ = gates.control.unbind()
    reach = factor_of(group) * lr
    free = (penalty * reach).to(gates.x.dtype)
    level = penalty.to(gates.x.dtype).expand_as(gates.x)
    held = level.masked_fill(gates.dead, math.inf) * reach.to(gates.x.dtype)
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
    if gates.rescale == "epsilon":
        gates.scale.copy_(torch.where(row[REFRESH] != 0, row[SCALE].to(gates.scale.dtype), gates.scale))
    elif gates.rescale == "rms":
        gates.scale.copy_(torch.where(row[REFRESH] != 0, _rms(gates, alive), gates.scale))


def _rms(gates: Gates, alive: Tensor) -> Tensor:
    squares = (gates.function.value(gates.x, gates.epsilon) / gates.norm).square().masked_fill(~alive, 0.0)
    return (squares.sum() / alive.sum().clamp(min=1)).sqrt()


def _steer(gates: Gates, prox: ProxSGD, row: Tensor) -> None:
    """Do what :func:`lpfs.gates.steer.steer` does."""
    keep = gates.keep
    assert keep is not None
    x, velocity = gates.x, prox.state[gates.x].get("momentum_buffer")
    penalty, caution, frozen, smooth = gates.control.unbind()
    settled = frozen != 0
    alive = (x != 0).sum()
    few = alive < keep.keep
    most = torch.where(row[HURRY] != 0, keep.keep - alive, len(gates.names))
    held = held_back(x, gates.before, most) & few
    back = torch.where(held, gates.before, x)
    alive = (back != 0).sum()
    values = gates.values_of(back)

    excess = alive - row[TARGET]
    if keep.ahead:
        size = values.abs()
        wide = (size / size.amax().clamp(min=1e-30) * PARTS).long().sum().double() / PARTS
        smooth = torch.where(smooth != 0, smooth + (wide - smooth) / max(1.0, keep.lag * gates.steps), wide)
        expected = wide + keep.ahead / keep.lag * (wide - smooth)
        excess = row[COUNTED] * alive + (1 - row[COUNTED]) * expected - row[TARGET]
    growth = keep.gain * torch.minimum(excess / row[WIDTH], row[LIMIT])
    growth = torch.where(row[HURRY] != 0, row[RUSH], growth)
    growth = growth.masked_fill((row[LIMIT] == 0) | (excess <= 0), 0.0)
    grown = penalty * torch.exp((caution * growth / gates.steps).clamp(max=20.0))
    faded = penalty * math.exp(-keep.fade / gates.steps)
    least = penalty.clamp(max=gates.base_penalty).masked_fill(settled, 0.0)
    after = torch.where(few, torch.maximum(penalty * keep.cut, least), torch.where(settled, faded, grown))
    care = torch.where(settled, caution, (caution * 1.1).clamp(max=1.0))
    care = torch.where(few, (caution * 0.5).clamp(min=0.01), care)

    near = (values.abs() < 1.5 * keep.clear) & (back != 0) & settled
    size = gates.epsilon.sqrt() if gates.function.square else gates.epsilon
    led = torch.where(near, back + torch.sign(back) * 2 * size / row[PACE], back)
    smallest = values.abs().masked_fill(back == 0, math.inf).amin().double()
    freeze = ~settled & (alive == keep.keep) & (row[FREEZE] != 0) & ((smallest >= keep.clear) | (row[HURRY] != 0))
    gates.dead.copy_(torch.where(freeze, back == 0, gates.dead))
    gates.control.copy_(torch.stack([after, care, frozen.masked_fill(freeze, 1.0), smooth]))
    x.copy_(led)
    gates.before.copy_(led)
    if velocity is not None:
        velocity.masked_fill_(held, 0.0)
