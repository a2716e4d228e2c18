"""The gates of a step in three kernels on an NVIDIA GPU: value and slope, the proximal step, the control of λ.

The arithmetic is that of :mod:`~lpfs.gates.device`, which takes about a hundred kernels for the same; in a CUDA
graph of a small batch these would take as long as the rest of the step. One program holds all gates. For LPFS and
LPFS++; other gate functions go through ``device``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lpfs.gates import device
from lpfs.gates.optimizer import ProxSGD, factor_of

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

MOST = 4096  # gates that one program holds
COLUMNS = 12  # of the table in device.py


@triton.jit
def _gate(x, epsilon, weight, ODD: tl.constexpr):
    """Return g(x) and g'(x), as functions.lpfs and functions.plusplus do."""
    x = tl.minimum(tl.maximum(x, -1e15), 1e15)
    below = x * x + epsilon
    value = tl.div_rn(x * x, below)
    slope = 2 * tl.div_rn(x, below) * tl.div_rn(epsilon, below)
    if ODD:
        value = tl.where(x < 0, -value, value) + weight * libdevice.atan(x)
        slope = tl.abs(slope) + tl.div_rn(weight, 1 + x * x)
    return value, slope


@triton.jit
def _values(x, epsilon, norm, scale, value, slope, count, alpha, power, ODD: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inside = at < count
    small = tl.load(epsilon)
    weight = alpha.to(tl.float32) * libdevice.pow(small, power.to(tl.float32))  # torch.compile hands over doubles
    g, rise = _gate(tl.load(x + at, inside, 1.0), small, weight, ODD)
    whole = tl.load(norm + at, inside, 1.0) * tl.load(scale)
    tl.store(value + at, tl.div_rn(g, whole), inside)
    tl.store(slope + at, tl.div_rn(rise, whole), inside)


@triton.jit
def _move(x, grad, velocity, dead, control, table, steps_done, flags, weights, count, steps, momentum, factor,
          COLS: tl.constexpr, WEIGHTED: tl.constexpr, POSITIVE: tl.constexpr,
          SIZE: tl.constexpr):  # fmt: skip
    at = tl.arange(0, SIZE)
    inside = at < count
    g = tl.load(grad + at, inside, 0.0)
    odd = (g != g) | (tl.abs(g) == float("inf"))
    finite = tl.sum(odd.to(tl.int32)) == 0
    tl.store(flags, tl.load(flags) + tl.where(finite, 0, 1))
    lr = tl.load(table + tl.minimum(tl.load(steps_done), steps) * COLS + 1)
    old, v = tl.load(x + at, inside, 0.0), tl.load(velocity + at, inside, 0.0)
    new_v = v * momentum + g
    moved = old - lr.to(tl.float32) * new_v
    penalty, frozen = tl.load(control), tl.load(control + 2)
    reach = factor * lr
    held = tl.where(tl.load(dead + at, inside, 0) != 0, float("inf"), penalty.to(tl.float32)) * reach.to(
        tl.float32
    )
    limit = tl.where(frozen != 0, held, (penalty * reach).to(tl.float32))
    free = at >= SIZE
    if WEIGHTED:
        weight = tl.load(weights + at, inside, 0.0)
        limit, free = limit * weight, weight == 0
    moved = moved - tl.minimum(tl.maximum(moved, -limit), limit)
    if POSITIVE:
        moved = tl.where((moved < 0) & (free == 0), 0.0, moved)
    tl.store(velocity + at, tl.where(finite, new_v, v), inside)
    tl.store(x + at, tl.where(finite, moved, old), inside)


@triton.jit
def _advance(x, velocity, before, dead, control, table, steps_done, flags, epsilon, scale, norm, count, steps,
             alpha, power, keep, gain, fade, cut, clear, base, ahead, lag, ODD: tl.constexpr,
             STEERED: tl.constexpr, RESCALE: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    at = tl.arange(0, SIZE)
    inside = at < count
    done = tl.load(steps_done) + 1
    tl.store(steps_done, done)
    row = table + tl.minimum(done, steps) * COLS
    now = tl.load(x + at, inside, 0.0)
    small, whole, size = tl.load(epsilon), tl.load(norm + at, inside, 1.0), tl.load(scale)
    if STEERED:
        penalty, caution, frozen = tl.load(control), tl.load(control + 1), tl.load(control + 2)
        smooth = tl.load(control + 3)
        settled = frozen != 0
        alive = tl.sum((now != 0).to(tl.int32))
        few = alive < keep
        last = tl.load(before + at, inside, 0.0)
        died = (now == 0) & (last != 0) & few
        held = died & (tl.load(row + 7) == 0)
        died = died & (tl.load(row + 7) != 0)
        for _ in range(tl.where(tl.load(row + 7) != 0, keep - alive, 0)):
            top = tl.max(tl.where(died, tl.abs(last), -1.0))
            first = tl.min(tl.where(died & (tl.abs(last) == top), at, SIZE))
            held = held | (at == first)
            died = died & (at != first)
        now = tl.where(held, last, now)
        alive = tl.sum((now != 0).to(tl.int32))
        value, _ = _gate(now, small, alpha * libdevice.pow(small, power), ODD)
        value = tl.abs(tl.div_rn(value, whole * size))
        widest = tl.zeros_like(value) + tl.maximum(tl.max(value), 1e-30)
        parts = tl.sum((tl.div_rn(value, widest) * 16777216.0).to(tl.int64))
        wide = parts.to(tl.float64) / 16777216.0
        smooth = tl.where(smooth != 0, smooth + (wide - smooth) / lag, wide) * (ahead != 0)
        counted = tl.load(row + 11)
        excess = counted * alive + (1 - counted) * (wide + ahead * (wide - smooth)) - tl.load(row + 2)
        growth = gain * tl.minimum(excess / tl.load(row + 3), tl.load(row + 4))
        growth = tl.where(tl.load(row + 7) != 0, tl.load(row + 5), growth)
        growth = tl.where((tl.load(row + 4) != 0) & (excess > 0), growth, 0.0)
        grown = penalty * tl.exp(tl.minimum(caution * growth / steps, 20.0))
        least = tl.where(settled, 0.0, tl.minimum(penalty, base))
        after = tl.where(few, tl.maximum(penalty * cut, least), tl.where(settled, penalty * fade, grown))
        care = tl.where(settled, caution, tl.minimum(caution * 1.1, 1.0))
        care = tl.where(few, tl.maximum(caution * 0.5, 0.01), care)
        near = (value < 1.5 * clear) & (now != 0) & settled
        pace = tl.load(row + 8).to(tl.float32)
        led = now + tl.where(now > 0, 2.0, -2.0) * tl.sqrt_rn(small) / pace
        smallest = tl.min(tl.where(now != 0, value, float("inf"))).to(tl.float64)
        ready = (smallest >= clear) | (tl.load(row + 7) != 0)
        freeze = (settled == 0) & (alive == keep) & (tl.load(row + 6) != 0) & ready
        gone = tl.load(dead + at, inside, 0)
        tl.store(dead + at, tl.where(freeze, (now == 0).to(gone.dtype), gone), inside)
        tl.store(control, after)
        tl.store(control + 1, care)
        tl.store(control + 2, tl.where(freeze, 1.0, frozen))
        tl.store(control + 3, smooth)
        now = tl.where(near, led, now)
        tl.store(x + at, now, inside)
        v = tl.load(velocity + at, inside, 0.0)
        tl.store(velocity + at, tl.where(held, 0.0, v), inside)
        tl.store(before + at, now, inside)
    living = (now != 0) & inside
    number = tl.sum(living.to(tl.int32))
    zero = tl.load(flags + 1)
    tl.store(flags + 1, tl.where((number == 0) & (zero == 0), done, zero))
    small = tl.load(row).to(tl.float32)
    tl.store(epsilon, small)
    if RESCALE == 1:
        tl.store(scale, tl.where(tl.load(row + 9) != 0, tl.load(row + 10).to(tl.float32), size))
    if RESCALE == 2:
        value, _ = _gate(now, small, alpha * libdevice.pow(small, power), ODD)
        value = tl.div_rn(value, whole)
        squares = tl.sum(tl.where(living, value * value, 0.0))
        fresh = tl.sqrt_rn(squares / tl.maximum(number, 1).to(tl.float32))
        tl.store(scale, tl.where(tl.load(row + 9) != 0, fresh, size))


class Values(torch.autograd.Function):
    """The gate values (N,); the slope comes from the same kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Gates) -> Tensor:
        """Return g(x) / (g at the start · scale)."""
        value, slope = values(x, gates)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of x."""
        return grad * ctx.saved_tensors[0], None


def values(x: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    """Return the gate values (N,) at some x, and their slopes."""
    return _both(x, gates, gates.epsilon, gates.norm, gates.scale)


def at_start(x: Tensor, gates: Gates, epsilon: Tensor) -> Tensor:
    """Return g(x) for an ε, by the kernel that will divide by it."""
    one = torch.ones_like(x)
    return _both(x, gates, epsilon, one, one[:1])[0]


def _both(x: Tensor, gates: Gates, epsilon: Tensor, norm: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    value, slope = torch.empty_like(x), torch.empty_like(x)
    _values[(1,)](
        x, epsilon, norm, scale, value, slope, x.numel(), *_constants(gates),
        ODD=gates.function.odd, SIZE=_size(gates),
    )  # fmt: skip
    return value, slope


def takes(gates: Gates) -> bool:
    """Whether these kernels can do what these gates want."""
    return gates.x.numel() <= MOST and gates.function.name in ("lpfs", "lpfs++")


def move(prox: ProxSGD, gates: Gates) -> None:
    """Take one step of the gates' optimizer."""
    x, group = gates.x, prox.param_groups[0]
    if x.grad is None:
        return
    if group["prox"] == "l0":
        device.move(prox, gates)
        return
    state = prox.state[x]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(x)
    weights = group["weights"]
    _move[(1,)](
        x, x.grad, state["momentum_buffer"], gates.dead.view(torch.uint8), gates.control, gates.table(),
        gates.steps_done, gates.flags, x if weights is None else weights, x.numel(), gates.steps,
        group["momentum"], factor_of(group), COLS=COLUMNS, WEIGHTED=weights is not None,
        POSITIVE=group["prox"] == "positive", SIZE=_size(gates),
    )  # fmt: skip


def advance(gates: Gates, prox: ProxSGD | None) -> None:
    """Move on by one training step."""
    x, keep = gates.x, gates.keep
    steered = keep is not None and prox is not None
    velocity = None if prox is None else prox.state[x].get("momentum_buffer")
    numbers = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    if keep is not None:
        fade = math.exp(-keep.fade / gates.steps)
        lag = max(1.0, keep.lag * gates.steps)
        numbers = (
            keep.keep, keep.gain, fade, keep.cut, keep.clear, gates.base_penalty, keep.ahead / keep.lag, lag,
        )  # fmt: skip
    rescale = {"off": 0, "epsilon": 1, "rms": 2}[gates.rescale]
    _advance[(1,)](
        x, x if velocity is None else velocity, gates.before, gates.dead.view(torch.uint8), gates.control,
        gates.table(), gates.steps_done, gates.flags, gates.epsilon, gates.scale, gates.norm, x.numel(),
        gates.steps, *_constants(gates), *numbers, STEERED=steered and velocity is not None, RESCALE=rescale,
        COLS=COLUMNS, ODD=gates.function.odd, SIZE=_size(gates),
    )  # fmt: skip


def _size(gates: Gates) -> int:
    return max(16, 1 << (gates.x.numel() - 1).bit_length())


def _constants(gates: Gates) -> tuple[float, float]:
    """Return α and 1/τ."""
    function = gates.function
    if function.alpha is None or function.tau is None:
        return 0.0, 1.0
    return float(function.alpha), 1 / function.tau
