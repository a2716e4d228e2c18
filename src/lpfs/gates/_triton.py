"""The gates of a step in three Triton kernels: value and slope, the proximal step, the control law.

The torch form takes about a hundred small kernels for the same; in a CUDA graph of a small batch these take as
long as the rest of the step. One program holds all gates. Constants and the layout of the table come from
:mod:`~lpfs.gates.controller`, whose law ``_control`` repeats; ``tests/gates/test_cuda.py`` compares the two step
by step. For LPFS and LPFS++; other gate functions take the steps of torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lpfs._imports import fused_kernels_enabled
from lpfs.gates.controller import RESOLUTION, Constants, PenaltyController, TableRow
from lpfs.gates.functions import GateFunction

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

MAX_GATES = 4096  # gates that one program holds
DIRECT_LAUNCHES = triton.__version__.startswith("3.6.")  # whether the launcher of a compiled kernel is known
MAX_LAUNCHES = 256  # launches with known addresses that are kept

# Columns of the table and their number.
_COLUMN = TableRow(*(tl.constexpr(index) for index in range(len(TableRow._fields))))
_EPSILON, _LR, _SCALE, _REFRESH = _COLUMN.epsilon, _COLUMN.lr, _COLUMN.scale, _COLUMN.refresh
_TARGET, _EXCESS_SCALE, _MAX_GROWTH = _COLUMN.target, _COLUMN.excess_scale, _COLUMN.max_growth
_ALIVE_WEIGHT, _FREEZE, _HURRY = _COLUMN.alive_weight, _COLUMN.freeze, _COLUMN.hurry
_COLUMNS = tl.constexpr(len(TableRow._fields))
_RESOLUTION = tl.constexpr(float(RESOLUTION))

# Constants of the control law, in one tensor of float64: a float argument of a kernel would be float32.
_LAW = Constants(*(tl.constexpr(index) for index in range(len(Constants._fields))))
_KEEP, _GAIN, _CUT, _CLEAR = _LAW.keep, _LAW.gain, _LAW.cut, _LAW.clear
_AHEAD_PER_LAG, _LAG_STEPS, _BASE_PENALTY, _STEPS = _LAW.ahead_per_lag, _LAW.lag_steps, _LAW.base_penalty, _LAW.steps


@lru_cache(maxsize=64)
def constant_tensor(controller: PenaltyController, device: torch.device) -> Tensor:
    """Return the constants as a tensor; it cannot be made while a graph is captured."""
    return torch.tensor(controller.constants, dtype=torch.float64, device=device)


@triton.jit
def _gate(x, epsilon, weight, ODD: tl.constexpr):
    """Return g(x) and g'(x), as functions.lpfs and functions.arctan_plus do."""
    x = tl.minimum(tl.maximum(x, -1e15), 1e15)
    below = x * x + epsilon
    value = tl.div_rn(x * x, below)
    slope = 2 * tl.div_rn(x, below) * tl.div_rn(epsilon, below)
    if ODD:
        value = tl.where(x < 0, -value, value) + weight * libdevice.atan(x.to(tl.float64)).to(tl.float32)
        slope = tl.abs(slope) + tl.div_rn(weight, 1 + x * x)
    return value, slope


@triton.jit
def _values(x, epsilon, norm, scale, value, slope, count, alpha, power, ODD: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inside = at < count
    eps = tl.load(epsilon)
    weight = alpha.to(tl.float32) * libdevice.pow(eps, power.to(tl.float32))  # torch.compile passes doubles
    g, g_slope = _gate(tl.load(x + at, inside, 1.0), eps, weight, ODD)
    divisor = tl.load(norm + at, inside, 1.0) * tl.load(scale)
    tl.store(value + at, tl.div_rn(g, divisor), inside)
    tl.store(slope + at, tl.div_rn(g_slope, divisor), inside)


@triton.jit
def _prox(x, grad, momentum_buffer, nonfinite_steps, learning_rate, penalty, weights, count, momentum, factor,
          HAS_MOMENTUM: tl.constexpr, PENALTIES: tl.constexpr, WEIGHTED: tl.constexpr, POSITIVE: tl.constexpr,
          SIZE: tl.constexpr):  # fmt: skip
    at = tl.arange(0, SIZE)
    inside = at < count
    g = tl.load(grad + at, inside, 0.0)
    is_nonfinite = (g != g) | (tl.abs(g) == float("inf"))
    finite = tl.sum(is_nonfinite.to(tl.int32)) == 0
    tl.store(nonfinite_steps, tl.load(nonfinite_steps) + tl.where(finite, 0.0, 1.0))
    lr = tl.load(learning_rate)
    old = tl.load(x + at, inside, 0.0)
    direction = g
    if HAS_MOMENTUM:
        v = tl.load(momentum_buffer + at, inside, 0.0)
        direction = v * momentum + g
        tl.store(momentum_buffer + at, tl.where(finite, direction, v), inside)
    moved = old - lr.to(tl.float32) * direction
    level = tl.load(penalty + at, inside, 0.0) if PENALTIES else tl.load(penalty)
    threshold = (level * (factor * lr)).to(tl.float32) + tl.zeros_like(old)
    free = at >= SIZE
    if WEIGHTED:
        weight = tl.load(weights + at, inside, 0.0)
        threshold, free = threshold * weight, weight == 0
    shrunk = moved - tl.minimum(tl.maximum(moved, -threshold), threshold)
    if POSITIVE:
        shrunk = tl.where(free, moved, tl.maximum(shrunk, 0.0))
    tl.store(x + at, tl.where(finite, shrunk, old), inside)


@triton.jit
def _control(x, momentum_buffer, previous_x, dead, control, penalty_now, lr_now, constants, table, steps_done,
             all_zero_step, epsilon, scale, norm, count, steps, alpha, power, ODD: tl.constexpr,
             CONTROLLED: tl.constexpr, RESCALE: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    at = tl.arange(0, SIZE)
    inside = at < count
    done = tl.load(steps_done) + 1
    tl.store(steps_done, done)
    row = table + tl.minimum(done, steps) * _COLUMNS
    now = tl.load(x + at, inside, 0.0)
    eps, divisor, old_scale = tl.load(epsilon), tl.load(norm + at, inside, 1.0), tl.load(scale)
    if CONTROLLED:
        penalty, frozen, average = tl.load(control), tl.load(control + 1), tl.load(control + 2)
        is_frozen, in_hurry = frozen != 0, tl.load(row + _HURRY) != 0
        keep = tl.load(constants + _KEEP).to(tl.int32)
        alive = tl.sum((now != 0).to(tl.int32))
        too_few = alive < keep
        previous = tl.load(previous_x + at, inside, 0.0)
        zeroed = (now == 0) & (previous != 0) & too_few
        revived = zeroed & (in_hurry == 0)
        zeroed = zeroed & in_hurry
        for _ in range(tl.where(in_hurry, keep - alive, 0)):
            largest = tl.max(tl.where(zeroed, tl.abs(previous), -1.0))
            first = tl.min(tl.where(zeroed & (tl.abs(previous) == largest), at, SIZE))
            revived = revived | (at == first)
            zeroed = zeroed & (at != first)
        now = tl.where(revived, previous, now)
        alive = tl.sum((now != 0).to(tl.int32))

        size, _ = _gate(now, eps, alpha * libdevice.pow(eps, power), ODD)
        size = tl.abs(tl.div_rn(size, divisor * old_scale))
        size = tl.where(inside, size, 0.0)
        alive_weight = tl.load(row + _ALIVE_WEIGHT)
        predicts = (alive_weight < 1) & (is_frozen == 0)
        largest_size = tl.zeros_like(size) + tl.maximum(tl.max(size), 1e-30)
        shares = tl.floor(tl.div_rn(size, largest_size) * _RESOLUTION)
        wide = tl.sum(shares.to(tl.float64)) / _RESOLUTION
        moved = tl.where(average != 0, average + (wide - average) / tl.load(constants + _LAG_STEPS), wide)
        average = tl.where(predicts, moved, average)
        predicted = wide + tl.load(constants + _AHEAD_PER_LAG) * (wide - average)
        expected = tl.where(predicts, alive_weight * alive + (1 - alive_weight) * predicted, alive.to(tl.float64))

        excess = tl.maximum(expected - tl.load(row + _TARGET), 0.0)
        growth = tl.minimum(excess / tl.load(row + _EXCESS_SCALE), tl.load(row + _MAX_GROWTH))
        growth = tl.load(constants + _GAIN) * growth
        grown = penalty * tl.exp(growth / tl.load(constants + _STEPS))
        floor = tl.minimum(penalty, tl.load(constants + _BASE_PENALTY))
        reduced = tl.maximum(penalty * tl.load(constants + _CUT), floor)
        next_penalty = tl.where(is_frozen, 0.0, tl.where(too_few, reduced, grown))

        smallest = tl.min(tl.where(now != 0, size, float("inf"))).to(tl.float64)
        clear = (smallest >= tl.load(constants + _CLEAR)) | in_hurry
        freezes = (is_frozen == 0) & (alive == keep) & (tl.load(row + _FREEZE) != 0) & clear
        was_dead = tl.load(dead + at, inside, 0)
        is_dead = (was_dead != 0) | (freezes & (now == 0))
        rise = tl.sqrt_rn(eps)  # the x at which the gate function rises
        near = (now != 0) & (tl.abs(now) < rise) & is_frozen
        now = tl.where(near, tl.where(now > 0, rise, -rise), now)
        next_frozen = tl.where(freezes, 1.0, frozen)
        tl.store(dead + at, is_dead.to(was_dead.dtype), inside)
        tl.store(control, next_penalty)
        tl.store(control + 1, next_frozen)
        tl.store(control + 2, average)
        tl.store(penalty_now + at, tl.where(is_dead, float("inf"), next_penalty), inside)
        tl.store(x + at, now, inside)
        tl.store(previous_x + at, now, inside)
        v = tl.load(momentum_buffer + at, inside, 0.0)
        tl.store(momentum_buffer + at, tl.where(revived, 0.0, v), inside)
    is_alive = (now != 0) & inside
    alive_count = tl.sum(is_alive.to(tl.int32))
    zero_step = tl.load(all_zero_step)
    tl.store(all_zero_step, tl.where((alive_count == 0) & (zero_step == 0), done, zero_step))
    eps = tl.load(row + _EPSILON).to(tl.float32)
    tl.store(epsilon, eps)
    tl.store(lr_now, tl.load(row + _LR))
    if RESCALE == 1:
        tl.store(scale, tl.load(row + _SCALE).to(tl.float32))
    if RESCALE == 2:
        value, _ = _gate(now, eps, alpha * libdevice.pow(eps, power), ODD)
        value = tl.div_rn(value, divisor)
        squares = tl.sum(tl.where(is_alive, value * value, 0.0))
        rms = tl.sqrt_rn(squares / tl.maximum(alive_count, 1).to(tl.float32))
        tl.store(scale, tl.where(tl.load(row + _REFRESH) != 0, rms, old_scale))


_launches: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launch one program of a kernel; ``constants`` in the order of its last parameters.

    To examine some twenty arguments takes Triton longer than the host needs for the rest of a small step. So a launch
    with the tensors of an earlier one, at the same addresses, uses the compiled kernel itself.
    """
    if not (DIRECT_LAUNCHES and fused_kernels_enabled()) or torch.compiler.is_compiling():
        kernel[(1,)](*arguments, **constants)
        return
    device = arguments[0].device.index
    addresses = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    key = (kernel.__name__, device, *addresses, *constants.values())
    launch = _launches.get(key)
    if launch is not None:
        launch(*arguments, *constants.values())
        return
    compiled = kernel[(1,)](*arguments, **constants)
    if len(_launches) >= MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = compiled[(1, 1, 1)]


class GateValues(torch.autograd.Function):
    """The gate values (N,); the slope comes from the same kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: GateFunction, epsilon: Tensor, norm: Tensor, scale: Tensor) -> Tensor:
        """Return g(x) / (norm · scale)."""
        value, slope = values(x, function, epsilon, norm, scale)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of x."""
        return grad * ctx.saved_tensors[0], None, None, None, None


def values(x: Tensor, function: GateFunction, epsilon: Tensor, norm: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate values (N,) at some x, and their slopes."""
    value, slope = torch.empty_like(x), torch.empty_like(x)
    arguments = x, epsilon, norm, scale, value, slope, x.numel(), *_alpha_and_power(function)
    _launch(_values, arguments, ODD=function.odd, SIZE=_block_size(x))
    return value, slope


def supports(function: GateFunction, count: int) -> bool:
    """Return whether these kernels can take the steps of gates with this function and number."""
    return count <= MAX_GATES and function.name in ("lpfs", "lpfs++")


def prox_step(
    x: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    nonfinite_steps: Tensor,
    group: dict[str, Any],
    factor: float,
) -> None:
    """Take one step of ProxSGD; its learning rate and penalty are tensors in float64."""
    lr, penalty, weights = group["lr"], group["penalty"], group["weights"]
    arguments = (
        x, grad, x if momentum_buffer is None else momentum_buffer, nonfinite_steps, lr, penalty,
        x if weights is None else weights, x.numel(), group["momentum"], factor,
    )  # fmt: skip
    _launch(
        _prox, arguments, HAS_MOMENTUM=momentum_buffer is not None, PENALTIES=penalty.ndim > 0,
        WEIGHTED=weights is not None, POSITIVE=group["prox"] == "positive", SIZE=_block_size(x),
    )  # fmt: skip


def control_step(gates: Gates, momentum_buffer: Tensor | None, table: Tensor) -> None:
    """Take the step of ``Gates.step``: the control law if there is a momentum, ε, η and the rescale."""
    x = gates.x
    constants = gates.control
    if momentum_buffer is not None:
        assert gates.controller is not None
        constants = constant_tensor(gates.controller, x.device)
    arguments = (
        x, x if momentum_buffer is None else momentum_buffer, gates.previous_x, gates.dead.view(torch.uint8),
        gates.control, gates.penalty_now, gates.lr_now, constants, table, gates.steps_done, gates.all_zero_step,
        gates.epsilon, gates.scale, gates.norm, x.numel(), gates.steps, *_alpha_and_power(gates.function),
    )  # fmt: skip
    _launch(
        _control, arguments, ODD=gates.function.odd, CONTROLLED=momentum_buffer is not None,
        RESCALE={"off": 0, "epsilon": 1, "rms": 2}[gates.rescale], SIZE=_block_size(x),
    )  # fmt: skip


def _block_size(x: Tensor) -> int:
    return max(16, 1 << (x.numel() - 1).bit_length())


def _alpha_and_power(function: GateFunction) -> tuple[float, float]:
    """Return α and 1/τ."""
    if function.alpha is None or function.tau is None:
        return 0.0, 1.0
    return float(function.alpha), 1 / function.tau
