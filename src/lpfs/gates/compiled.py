"""The gates of a step on a CPU by one compiled call each: forward, ``ProxSGD.step``, ``Gates.step``.

A dozen numbers take no time; the Python between them does, all the more so within a training step, which leaves
nothing of it in any cache. So the loops of :mod:`~lpfs.gates.loops` do everything at once, on arrays that stand
ready over the memory of the buffers. For LPFS and LPFS++ without noise; everything else goes the way of numpy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.gates import loops
from lpfs.gates.loops import ALL_ZERO, ASK, ENDED
from lpfs.gates.optimizer import ProxSGD, factor_of
from lpfs.gates.schedule import Decay

if TYPE_CHECKING:
    from lpfs.gates.module import Gates

MOST = 4096  # gates; more are worth the vectors of torch
RESCALES = {"off": 0, "epsilon": 1, "rms": 2}
LOWEST = {"l1": -math.inf, "positive": 0.0}  # where x ends at the least
NONE = np.empty(0, np.float32)
BUFFERS = ("before", "dead", "control", "steps_done", "epsilon", "scale", "norm")


def takes(gates: Gates) -> bool:
    """Whether the loops can do what these gates want."""
    x, function, schedule = gates.x, gates.function, gates.schedule
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.numel() <= MOST
        and function.name in ("lpfs", "lpfs++")
        and not function.noise
        and type(schedule.epsilon) is type(schedule.lr) is Decay
    )


class Values(torch.autograd.Function):
    """The gate values (N,); the slope comes from the same loop."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: NDArray[np.float32], slope: NDArray[np.float32]) -> Tensor:
        """Return the values as a tensor."""
        ctx.slope = slope
        return torch.from_numpy(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of x."""
        return grad * torch.from_numpy(ctx.slope), None, None


def at_start(gates: Gates) -> Tensor:
    """Return g(1) at the ε of the start (N,), by the loop that will be divided by it."""
    one = np.ones(gates.x.numel(), np.float32)
    epsilon = np.array([gates.schedule.epsilon(0)], np.float32)
    both = np.empty((2, len(one)), np.float32)
    loops.values(one, epsilon, one, one[:1], numbers_of(gates), both)
    return torch.from_numpy(both[0])


def numbers_of(gates: Gates) -> NDArray[np.float64]:
    """Return all that a search does not change, where ``loops`` looks for it."""
    numbers = np.zeros(loops.NUMBERS)
    function, schedule, keep = gates.function, gates.schedule, gates.keep
    numbers[loops.ALPHA], numbers[loops.POWER] = function.alpha or 0.0, 1 / (function.tau or 1.0)
    numbers[loops.ODD], numbers[loops.STEPS] = function.odd, gates.steps
    numbers[loops.RESCALE], numbers[loops.REFRESH] = RESCALES[gates.rescale], schedule.refresh
    numbers[loops.RESCALED_UNTIL] = gates.rescaled_until
    for at, decay in ((loops.EPSILON, schedule.epsilon), (loops.LR, schedule.lr)):
        numbers[at : at + 4] = decay.start, math.log(decay.rate), decay.every, decay.floor
    if keep is not None:
        numbers[loops.STEERED] = 1
        numbers[loops.KEEP : loops.LAG + 1] = (
            keep.keep, keep.begin, keep.end, keep.freeze, keep.hurry, keep.gain, keep.width, keep.least, keep.most,
            keep.cut, keep.fade, keep.clear, gates.base_penalty, keep.ahead, keep.lag,
        )  # fmt: skip
    return numbers


class Ready:
    """The arrays and numbers of some gates, ready for the loops while their tensors stay where they are."""

    def __init__(self, gates: Gates) -> None:
        self.x: Any = gates.x
        self.at = self.x.data_ptr()
        self.x_array = _array(self.x)
        buffers: list[tuple[str, Any]] = [(name, gates._buffers[name]) for name in BUFFERS]
        self.tensors = [(name, tensor, tensor.data_ptr()) for name, tensor in buffers]
        self.arrays = tuple(_array(tensor) for _, tensor, _ in self.tensors)
        self.keep, self.schedule = gates.keep, gates.schedule
        self.numbers = numbers_of(gates)
        epsilon, scale, norm = self.arrays[-3:]
        self.for_values = epsilon, norm, scale, self.numbers
        self.velocity: Tensor | None = None
        self.velocity_array = NONE
        self.weights: Tensor | None = None
        self.weights_array = NONE

    def fits(self, gates: Gates) -> bool:
        """Whether all of the gates is still where it was."""
        x: Any = gates._parameters["x"]
        if x is not self.x or x.data_ptr() != self.at or gates.keep is not self.keep:
            return False
        buffers: Any = gates._buffers
        for name, tensor, at in self.tensors:
            if buffers[name] is not tensor or tensor.data_ptr() != at:
                return False
        return gates.schedule is self.schedule

    def values(self) -> Tensor:
        """Return the gate values (N,), with their gradient."""
        both = np.empty((2, len(self.x_array)), np.float32)
        loops.values(self.x_array, *self.for_values, both)
        result: Tensor = Values.apply(self.x, both[0], both[1])  # type: ignore[no-untyped-call]
        return result

    def values_of(self, x: Tensor) -> Tensor:
        """Return the gate values (N,) at some x, without gradient."""
        both = np.empty((2, len(self.x_array)), np.float32)
        loops.values(np.ascontiguousarray(x.detach().numpy()), *self.for_values, both)
        return torch.from_numpy(both[0])

    def move(self, prox: ProxSGD) -> bool:
        """Take the step of the optimizer; return False, with nothing moved, where that is not for this loop."""
        x, group = self.x, prox.param_groups[0]
        grad, momentum, params = x.grad, group["momentum"], group["params"]
        if grad is None or not momentum or not _plain(grad) or x.data_ptr() != self.at:
            return False
        if params[0] is not x or len(params) + len(prox.param_groups) > 2 or group["prox"] not in LOWEST:
            return False
        lr, penalty, levels = group["lr"], group["penalty"], NONE
        if isinstance(lr, Tensor) or not self._weigh(group["weights"]) or not self._follow(prox):
            return False
        reach = factor_of(group) * lr
        if not isinstance(penalty, Tensor):
            reach = penalty * reach
        elif penalty.ndim and _plain(penalty):
            levels = penalty.numpy()
        else:
            return False
        given = self.x_array, grad.numpy(), self.velocity_array, self.weights_array, levels
        return bool(loops.move(*given, float(lr), float(momentum), float(reach), LOWEST[group["prox"]]))

    def advance(self, gates: Gates, prox: ProxSGD) -> bool:
        """Take the step of the gates; return False, with nothing moved, where that is not for this loop."""
        if not self._follow(prox):
            return False
        prox.mover = self.move
        given = (self.x_array, self.velocity_array, *self.arrays, self.numbers)
        advance: Any = loops.advance
        found, lr, penalty, frozen = advance(*given, False)
        if found == ASK:
            gates.refuse_idle()
            found, lr, penalty, frozen = advance(*given, True)
        group = prox.param_groups[0]
        if self.keep is not None:
            group["penalty"] = self._held(penalty) if frozen else penalty
        if found == ALL_ZERO:
            raise gates._all_zero(int(self.arrays[3][0]) + 1)
        group["lr"] = lr
        if found == ENDED and self.keep is not None:
            gates._check_end(self.keep)
        return True

    def _held(self, penalty: float) -> Tensor:
        """Return λ for every gate (N,): infinite where it is dead."""
        held = np.full(len(self.x_array), penalty, np.float32)
        held[self.arrays[1]] = math.inf
        return torch.from_numpy(held)

    def _follow(self, prox: ProxSGD) -> bool:
        """Look where the momentum is; False where there is none (yet)."""
        velocity = prox.state[self.x].get("momentum_buffer")
        if velocity is None or velocity is not self.velocity:
            if velocity is None or not _plain(velocity):
                return False
            self.velocity, self.velocity_array = velocity, velocity.numpy()
        return True

    def _weigh(self, weights: Tensor | None) -> bool:
        if weights is not self.weights:
            if weights is not None and not _plain(weights):
                return False
            self.weights, self.weights_array = weights, NONE if weights is None else weights.numpy()
        return True


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor (N,) can go into a loop as it is."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.is_cpu and not tensor.requires_grad


def _array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a tensor; a number as an array of one."""
    array: NDArray[Any] = tensor.detach().numpy()
    return array if array.ndim else array.reshape(1)
