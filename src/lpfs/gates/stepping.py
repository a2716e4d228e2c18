"""One training step of gates in torch: schedules, control law, rescale and noise; the errors of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from lpfs._imports import has_numba
from lpfs.errors import AllGatesZeroError, FieldError, NonFiniteError, SearchError, StateError
from lpfs.gates import host
from lpfs.gates.controller import COLUMN, CONSTANT, Keep, control_table, restore_gates, update_penalty
from lpfs.gates.functions import ValueAndSlope, fill_values
from lpfs.gates.optimizer_state import optimizer_list

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

RMS_RESCALE_UNTIL = 0.95  # share of a search after which the RMS rescale is no longer updated
NOISE_UNTIL = 0.7  # share of a search after which noise is zero
MAX_UPDATES = 10  # updates of x without a step of the gates before an error is raised
STEP_BUFFERS = (
    "previous_x", "dead", "control", "penalty_now", "epsilon", "lr_now", "scale", "steps_done", "norm"
)  # fmt: skip
STEPS_DONE = 1 + STEP_BUFFERS.index("steps_done")
SCALE_CHECKS = 20  # first steps in which the gradient of a loss in float16 is checked
MAX_GRADIENT = 10.0  # of a gate; the mean loss of a batch gives far less, a GradScaler multiplies it by 65,536
UNVERIFIED = (
    "gates at='reader' have not been compared with gates on the outputs: no forward pass of the model ran all fields "
    "outside of compiled or captured code, or its output did not depend on them. Call the model once before "
    "torch.compile, or omit at='reader'"
)
CHECK_EVERY = 100  # steps on a GPU between two checks for errors, because a check waits for the device


@dataclass(frozen=True)
class GateStatus:
    """Progress of a search; ``print`` shows it in one line."""

    step: int
    steps: int
    alive: int
    total: int
    smallest: float
    epsilon: float
    lr: float
    penalty: float
    frozen: bool

    def __str__(self) -> str:
        frozen = ", frozen" if self.frozen else ""
        return (
            f"step {self.step:,} of {self.steps:,}: {self.alive} of {self.total} gates alive{frozen}, "
            f"smallest |g| {self.smallest:.3g}, ε {self.epsilon:.2g}, η {self.lr:.2g}, λ {self.penalty:.3g}"
        )


def advance(gates: Gates, momentum: Tensor | None) -> None:
    """Take the step of ``Gates.step``: compiled on a CPU; otherwise in torch, without a value that the host reads.

    With ``momentum`` (N,), that of the optimizer, λ is controlled.
    """
    x, steps, function, table = gates.x, gates.steps, gates.function, gates._control_table()
    buffers: dict[str, Any] = gates._buffers
    tensors = x, *[buffers[name] for name in STEP_BUFFERS], table, x if momentum is None else momentum
    on_host = x.is_cpu and not gates._device_ops
    compiled = on_host and has_numba()
    memory: Any = gates._step_arrays(*tensors) if compiled else tensors
    steps_done = memory[STEPS_DONE]
    done: Any = int(steps_done) + 1 if on_host else steps_done + 1
    if on_host and done == min(CHECK_EVERY, steps):
        check_all_used(gates)  # before anything changes
    if compiled and function.compiles and momentum is not None and gates.controller is not None:
        settings = function.constants, gates.controller.constant_array, function.square, gates.rescale == "epsilon"
        alive = _compiled_step(function.both)(*memory, *settings)
    else:
        alive = _advance(gates, memory, done, momentum is not None, on_host, compiled)
    if gates.rescale == "rms":
        row = table[min(done, steps)] if on_host else table.index_select(0, done.clamp(max=steps).view(1))[0]
        if not on_host or row[COLUMN.refresh]:
            gates.scale.copy_(torch.where(row[COLUMN.refresh] != 0, _rms_scale(gates), gates.scale))
    if not on_host:
        zero_step = gates.all_zero_step
        zero_step.copy_(torch.where((alive == 0) & (zero_step == 0), steps_done, zero_step))
    elif not alive or done == steps:
        if not alive and not gates.all_zero_step:
            gates.all_zero_step.fill_(done)
        check(gates)


@torch.no_grad()
def _advance(gates: Gates, memory: Any, done: Any, controlled: bool, on_host: bool, compiled: bool) -> Any:
    """Take the step in parts; return the number of gates alive. ``memory``: tensors, or arrays if ``compiled``."""
    x, previous_x, dead, control, penalty_now, epsilon, lr_now, scale, steps_done, _, rows, velocity = memory
    steps, function = gates.steps, gates.function
    row = rows[min(done, steps)] if on_host else rows.index_select(0, done.clamp(max=steps).view(1))[0]
    steps_done[...] = done
    if controlled and gates.controller is not None:
        restore: Any = host.compiled(restore_gates) if compiled else restore_gates
        update: Any = host.compiled(update_penalty) if compiled else update_penalty
        law: Any = gates.controller.constant_array if compiled else gates.controller.constants
        alive, too_few = restore(x, previous_x, velocity, row[COLUMN.hurry], law[CONSTANT.keep])
        value, at = (host_values(gates)[0], epsilon[()]) if compiled else (gates.values, epsilon)
        update(x, previous_x, dead, control, penalty_now, value, alive, too_few, at, function.square, row, law)
    else:
        alive = (x != 0).sum()
    epsilon[...], lr_now[...] = row[COLUMN.epsilon], row[COLUMN.lr]
    if gates.rescale == "epsilon":
        scale[...] = row[COLUMN.scale]
    return alive


@cache
def _compiled_step(both: Callable[..., ValueAndSlope]) -> Callable[..., Any]:
    """Return the whole of ``_advance`` with control of λ as one compiled function: four calls take longer."""

    def step(
        x: Any,
        previous_x: Any,
        dead: Any,
        control: Any,
        penalty_now: Any,
        epsilon: Any,
        lr_now: Any,
        scale: Any,
        steps_done: Any,
        norm: Any,
        rows: Any,
        velocity: Any,
        constants: Any,
        law: Any,
        square: Any,
        rescales: Any,
    ) -> Any:
        done = steps_done[()] + 1
        steps_done[()] = done
        row = rows[min(done, len(rows) - 1)]
        alive, too_few = restore_gates(x, previous_x, velocity, row[COLUMN.hurry], law[CONSTANT.keep])
        at = epsilon[()]
        value, _ = fill_values(both, x, at, norm, scale[()], constants)
        update_penalty(x, previous_x, dead, control, penalty_now, value, alive, too_few, at, square, row, law)
        epsilon[()], lr_now[()] = row[COLUMN.epsilon], row[COLUMN.lr]
        if rescales:
            scale[()] = row[COLUMN.scale]
        return alive

    compiled = host.compiled(step)
    assert compiled is not None  # has_numba() was checked
    return compiled


def host_values(gates: Gates) -> Sequence[NDArray[np.float32]]:
    """Return the gate values (N,) and their slopes as arrays, on a CPU."""
    function, loop = gates.function, gates.function.loop
    if loop is None:
        with torch.no_grad():
            values = function.value_and_slope(gates.x, gates.epsilon, gates.norm * gates.scale)
        return [part.numpy() for part in values]
    buffers: dict[str, Any] = gates._buffers
    arrays = gates._value_arrays(gates.x, buffers["epsilon"], buffers["norm"], buffers["scale"])
    result: Sequence[NDArray[np.float32]] = loop(*arrays, function.constants)
    return result


@torch.no_grad()
def _rms_scale(gates: Gates) -> Tensor:
    """Return the root mean square () of the alive gates at the current ε."""
    alive = gates.x != 0
    values = gates.function.value_and_slope(gates.x, gates.epsilon)[0] / gates.norm
    squares = values.square().masked_fill(~alive, 0.0)
    return (squares.sum() / alive.sum().clamp(min=1)).sqrt()


@torch.no_grad()
def check(gates: Gates) -> None:
    """Raise the errors of the steps since the last check, each of them once (see ``Gates.check``)."""
    gates._unchecked = 0
    done, zero_step = int(gates.steps_done), int(gates.all_zero_step)
    if done >= min(CHECK_EVERY, gates.steps):
        check_all_used(gates)
    if zero_step:
        gates.all_zero_step.zero_()
        raise AllGatesZeroError(
            f"all gates are zero after {zero_step} steps: no field is left. Lower the penalty "
            f"(λ = {float(gates.control[0]):.3g}) or the gates' learning rate, or give keep=K instead"
        )
    skipped = None if gates._prox is None else gates._prox.state[gates.x].get("nonfinite_steps")
    if skipped is not None and bool(skipped):
        count = int(skipped)
        skipped.zero_()
        raise NonFiniteError(
            f"the gradient of the gates was not finite in {count} steps up to step {done}: these steps did not "
            "change the gates. Check for a loss of inf or nan, or lower the learning rate of the model"
        )
    if gates.keep is not None and done >= gates.steps and not gates._end_checked:
        gates._end_checked = True
        _check_end(gates, gates.keep)


@contextmanager
def search_steps(
    gates: Gates, optimizer: Optimizer | Sequence[Optimizer], keep: int | None, settings: dict[str, Any]
) -> Iterator[Callable[[Tensor], None]]:
    """See ``Gates.search``."""
    optimizers = [gates.optimizer(keep, **settings), *optimizer_list(optimizer)]  # the first checks its gradient

    def step(loss: Tensor) -> None:
        for current in optimizers:
            current.zero_grad()
        loss.backward()
        for current in optimizers:
            current.step()
        gates.step()

    yield step
    check_finished(gates)


def check_scale(gates: Gates) -> None:
    """Raise StateError if the gradient of x, from a loss in float16, still has the scale of a GradScaler."""
    gates._scale_checks, gates._float16 = gates._scale_checks - 1, False
    largest = 0.0 if gates.x.grad is None else float(gates.x.grad.abs().max())
    if MAX_GRADIENT < largest < math.inf:
        raise StateError(
            f"the gradient of the gates is {largest:.3g}, which is probably multiplied by the scale of a GradScaler: "
            "call scaler.step(prox) instead of prox.step(), or scaler.unscale_(prox) before it; attach the gates again"
        )


def count_update(gates: Gates) -> None:
    """Raise StateError if x is updated again and again without a call of ``Gates.step``; note a loss in float16."""
    x = gates.x
    version = x._version
    if gates._scale_checks:
        device = "cpu" if x.is_cpu else x.device.type
        float16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        if float16 != gates._float16:
            gates._float16 = float16
    if gates._prox is None or version == gates._x_version:
        return
    object.__setattr__(gates, "_updates", gates._updates + 1)  # see ComputeValues
    object.__setattr__(gates, "_x_version", version)
    if gates._updates > MAX_UPDATES:
        raise StateError(
            f"the gates were updated {gates._updates} times without gates.step(): call gates.step() after prox.step() "
            "in every training step"
        )


def check_finished(gates: Gates) -> None:
    """Raise SearchError if an optimizer was made for these gates and its search has not ended."""
    done = int(gates.steps_done)
    if (gates._prox is None and not gates._loaded) or done >= gates.steps:
        return
    alive = int(torch.count_nonzero(gates.x))
    count = f"{alive} of {len(gates.names)} gates are non-zero"
    count += "" if gates.keep is None else f" instead of {gates.keep.keep}"
    raise SearchError(
        f"the search is not finished: {done:,} of {gates.steps:,} steps, {count}. Continue it, with gates.step() after "
        "prox.step() in every step; or attach with the number of steps that you take; or pass partial=True to use "
        "this state"
    )


def _check_end(gates: Gates, keep: Keep) -> None:
    """Raise SearchError if a search ended with another number of fields than ``keep``."""
    alive = gates.values[gates.x != 0].abs()
    if alive.numel() != keep.keep or float(alive.min()) < keep.clear:
        result = f"{alive.numel()} fields are alive instead of {keep.keep}, the smallest"
        if alive.numel() == keep.keep:
            result = f"{keep.keep} fields are alive as requested, but not all are clear of zero: the smallest is"
        raise SearchError(
            f"after {gates.steps} steps {result} at |g| = {float(alive.min()):.2g}. Was prox.step() called in "
            "every step, with a gradient? Continue for some steps, or attach with more steps"
        )


def check_all_used(gates: Gates) -> None:
    """Raise FieldError if the module of a field, or the check of readers, has never run although the model has."""
    if gates.unverified and (gates.entered or any(hook.ran for hook in gates.hooks)):
        raise FieldError(UNVERIFIED)
    idle = {gates.names[number] for hook in gates.hooks if not hook.ran for number, _ in hook.at}
    if gates.entered and idle:
        raise FieldError(
            f"the modules given for {sorted(idle)} never ran, although the model did: a container, a table whose "
            "weight is used directly, or a part that is switched off? Give the module whose output is the embedding"
        )


def make_table(gates: Gates) -> Tensor:
    """Return the table of the schedules and of the control law for every step, on the device of x."""
    until = RMS_RESCALE_UNTIL * gates.steps
    table = control_table(gates.schedule, gates.keep, len(gates.names), gates.steps, until).to(gates.x.device)
    if gates.rescale == "epsilon":
        every = gates.schedule.refresh
        epsilon = table[every::every, COLUMN.epsilon].to(gates.x.dtype)
        scale = gates.function.value_and_slope(torch.ones_like(epsilon), epsilon)[0] / gates.norm[0]
        scales = scale.repeat_interleave(every)[: max(0, gates.steps + 1 - every)]
        table[every:, COLUMN.scale] = scales.double()
    return table


def draw_noise(gates: Gates) -> None:
    """Draw the noise on x for the next forward pass; it decreases to zero."""
    done = int(gates.steps_done)
    remaining = max(0.0, 1 - done / (NOISE_UNTIL * gates.steps))
    generator = torch.Generator("cpu").manual_seed(gates.seed * 1_000_003 + done)
    noise = torch.randn(len(gates.names), generator=generator, device="cpu")
    gates.noise.copy_(noise * (gates.function.noise * remaining)).masked_fill_(gates.dead, 0.0)


@cache
def triton_kernels() -> Any:
    """Return the module of Triton kernels; None without Triton."""
    try:
        from lpfs.gates import _triton
    except ImportError:
        return None
    return _triton
