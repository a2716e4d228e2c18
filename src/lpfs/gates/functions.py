"""Gate functions: pure mathematics, no state.

A gate function maps the learnable x of a field to the factor that multiplies the field's embedding. Every function
takes ``(x, epsilon)``, the ++ family also ``(alpha, tau)``, and returns the pair (value, slope), so that a
function and its derivative are defined together. ``FUNCTIONS`` is the registry: to add a gate function, write one
such function and add one line to the registry; the tests in ``tests/gates/test_functions.py`` then include it.

The functions of the paper accept numpy arrays as well as tensors, with the same result to the last bit: for the
few numbers of a CPU step numpy takes a third of the time.

References:
    LPFS and LPFS++: Guo et al., "LPFS: Learnable Polarizing Feature Selection for CTR Prediction", 2022.
    Gaussian: Mohimani et al., 2008. sin-arctan: Wang et al., 2019. tanh: Zhao et al., 2012.
    rational: Xiang et al., 2019.

"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs.errors import InputError

ValueAndSlope = tuple[Tensor, Tensor]

# Above this |x| every function is constant to the last bit, and x² still fits into float32 and bfloat16.
_FLAT = 1e15


def lpfs(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return x²/(x²+ε) and 2xε/(x²+ε)²."""
    return _polar(x.clip(-_FLAT, _FLAT), epsilon)


def _polar(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    square = x * x
    below = square + epsilon
    return square / below, 2 * (x / below) * (epsilon / below)


def gaussian(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return 1 - exp(-x²/2ε²) and (x/ε²)·exp(-x²/2ε²)."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    power = -0.5 * q * q
    return -torch.expm1(power), q / epsilon * torch.exp(power)


def sin_arctan(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return sin(arctan(|x|/ε)) = |q|/√(1+q²), q = x/ε, and sign(x)/(ε·(1+q²)^1.5); the slope at 0 is 0."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    root = torch.sqrt(1 + q * q)
    return q.abs() / root, torch.sign(q) / epsilon / root / root / root


def tanh(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return tanh(x²/2ε²) and (x/ε²)·(1 - tanh²)."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    value = torch.tanh(0.5 * q * q)
    return value, q / epsilon * ((1 - value) * (1 + value))


def rational(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return x²/(x²+ε²) and its slope: LPFS with ε on the scale of x."""
    return lpfs(x, epsilon * epsilon)


def _arctan(x: Tensor) -> ValueAndSlope:
    return _by_torch(torch.arctan, x), 1 / (1 + x * x)


def _tanh(x: Tensor) -> ValueAndSlope:
    value = _by_torch(torch.tanh, x)
    return value, (1 - value) * (1 + value)


def _softsign(x: Tensor) -> ValueAndSlope:
    below = 1 + abs(x)
    return x / below, 1 / below / below


def plusplus(
    odd: Callable[[Tensor], ValueAndSlope], x: Tensor, epsilon: Tensor, alpha: float, tau: float
) -> ValueAndSlope:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·odd(x) and its slope, for an odd function with odd'(0) = 1."""
    x = x.clip(-_FLAT, _FLAT)
    polar, polar_slope = _polar(x, epsilon)
    curve, curve_slope = odd(x)
    weight = alpha * _root(epsilon, tau)
    sign = np.sign(x) if isinstance(x, np.ndarray) else torch.sign(x)
    return sign * polar + weight * curve, abs(polar_slope) + weight * curve_slope


# Operations that are not rounded exactly are torch's for arrays too.


def _by_torch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(torch.as_tensor(x)).numpy() if isinstance(x, np.ndarray) else function(x)


def _root(epsilon: Tensor, tau: float) -> Tensor:
    return _by_torch(lambda tensor: tensor ** (1 / tau), epsilon)


@dataclass(frozen=True)
class GateFunction:
    """A gate function with its constants.

    Args:
        name: its name in the registry.
        both: the mathematics: (x, ε[, α, τ]) -> (value, slope).
        epsilon: ε at the start of a search.
        lr: the learning rate of the gates at the start of a search.
        odd: whether g(-x) = -g(x) (the ++ family); otherwise g is even.
        square: whether ε is on the scale of x² (otherwise of x); decides how ε follows a schedule.
        alpha: weight of the odd term, which lets a dead gate revive (++ family only).
        tau: the odd term decreases as ε^(1/τ) (++ family only).
        noise: standard deviation, at the start, of decreasing noise on x (0 for none).
        has_numpy: whether ``both`` accepts numpy arrays as well as tensors.

    >>> round(gate_function("lpfs").value(torch.ones(()), torch.tensor(0.1)).item(), 5)
    0.90909
    """

    name: str
    both: Callable[..., ValueAndSlope]
    epsilon: float = 0.1
    lr: float = 0.005
    odd: bool = False
    square: bool = True
    alpha: float | None = None
    tau: float | None = None
    noise: float = 0.0
    has_numpy: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"gate {self.name!r}: epsilon must be > 0, found {self.epsilon!r}")
        if (self.alpha is None) != (self.tau is None):
            raise InputError(f"gate {self.name!r}: set both alpha and tau, or neither")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise InputError(f"gate {self.name!r}: alpha must be >= 0, found {self.alpha!r}")
        if self.tau is not None and not (math.isfinite(self.tau) and self.tau > 0):
            raise InputError(f"gate {self.name!r}: tau must be > 0, found {self.tau!r}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise InputError(f"gate {self.name!r}: noise must be >= 0, found {self.noise!r}")

    @property
    def revives(self) -> bool:
        """Whether a dead gate can revive: by the slope at zero, or by noise."""
        return bool(self.alpha) or self.noise > 0

    def value_and_slope(self, x: Tensor, epsilon: Tensor, divisor: Tensor | None = None) -> ValueAndSlope:
        """Return g(x) and g'(x), shaped like x; both divided by ``divisor`` if there is one."""
        constants = () if self.alpha is None else (self.alpha, self.tau)
        if self.has_numpy and _is_plain(x) and epsilon.ndim == 0:
            arrays: Any = self.both(x.detach().numpy(), epsilon.numpy(), *constants)
            if divisor is not None:
                arrays = [array / divisor.numpy() for array in arrays]
            return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        value, slope = self.both(x, epsilon, *constants)
        return (value, slope) if divisor is None else (value / divisor, slope / divisor)

    def value(self, x: Tensor, epsilon: Tensor, divisor: Tensor | None = None) -> Tensor:
        """Return g(x), or g(x) / divisor; its gradient is the slope in closed form."""
        result: Tensor = _ClosedFormGrad.apply(x, epsilon, divisor, self)  # type: ignore[no-untyped-call]
        return result

    def slope(self, x: Tensor, epsilon: Tensor) -> Tensor:
        """Return g'(x)."""
        return self.value_and_slope(x, epsilon)[1]


def _is_plain(x: Tensor) -> bool:
    """Return whether x can be read as a numpy array: on the CPU, without autograd, not while torch is tracing."""
    return (
        x.is_cpu
        and x.ndim == 1
        and x.dtype == torch.float32
        and type(x) in (Tensor, torch.nn.Parameter)
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
    )


class _ClosedFormGrad(torch.autograd.Function):
    """g(x) / divisor; backward uses the closed-form slope, which is cheaper and finite for every x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: Tensor, divisor: Tensor | None, function: GateFunction) -> Tensor:
        value, slope = function.value_and_slope(x, epsilon, divisor)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None, None


_PLUS = {"odd": True, "lr": 0.01, "alpha": 10.0, "tau": 2.0, "has_numpy": True}

FUNCTIONS: dict[str, GateFunction] = {
    function.name: function
    for function in (
        GateFunction("lpfs", lpfs, has_numpy=True),
        GateFunction("lpfs++", partial(plusplus, _arctan), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++tanh", partial(plusplus, _tanh), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++softsign", partial(plusplus, _softsign), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs-noise", lpfs, noise=0.1, has_numpy=True),
        GateFunction("gaussian", gaussian, epsilon=0.45, square=False),
        GateFunction("sin-arctan", sin_arctan, epsilon=0.45, square=False),
        GateFunction("tanh", tanh, epsilon=0.6, square=False),
        GateFunction("rational", rational, epsilon=0.1**0.5, square=False),
    )
}


def gate_function(
    gate: str | GateFunction = "lpfs++",
    *,
    alpha: float | None = None,
    tau: float | None = None,
    epsilon: float | None = None,
    noise: float | None = None,
) -> GateFunction:
    """Return a gate function by name, with the given constants instead of its defaults.

    >>> gate_function("lpfs++", alpha=50).alpha
    50
    """
    if isinstance(gate, str):
        if gate not in FUNCTIONS:
            close = difflib.get_close_matches(gate, FUNCTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"unknown gate function {gate!r}; the gate functions are {', '.join(FUNCTIONS)}{hint}")
        gate = FUNCTIONS[gate]
    constants = {"alpha": alpha, "tau": tau, "epsilon": epsilon, "noise": noise}
    changes = {name: value for name, value in constants.items() if value is not None}
    for name in ("alpha", "tau"):
        if name in changes and gate.alpha is None:
            raise InputError(f"gate {gate.name!r} has no {name}; the gates of the lpfs++ family have one")
    return replace(gate, **changes)  # type: ignore[arg-type]
