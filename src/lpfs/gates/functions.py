"""Gate functions: pure mathematics, no state.

A gate function maps the learnable x of a field to the factor that multiplies the field's embedding. Every function
takes ``(x, epsilon)``, the ++ family also ``(alpha, tau)``, and returns the pair (value, slope), so that a
function and its derivative are defined together. ``FUNCTIONS`` is the registry: to add a gate function, write one
such function and add one line to the registry; the tests in ``tests/gates/test_functions.py`` then include it.

The functions of the paper are also compiled by :mod:`~lpfs.gates.host` for the few numbers of a step on a CPU, with
the same result: arctan, tanh and the root of ε are computed in float64, so that their rounding to float32 is the same
everywhere.

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
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.errors import InputError
from lpfs.gates import host

ValueAndSlope = tuple[Tensor, Tensor]

# Above this |x| every function is constant to the last bit, and x² still fits into float32 and bfloat16.
_FLAT = 1e15


def lpfs(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    """Return x²/(x²+ε) and 2xε/(x²+ε)²."""
    return _polar(torch.clamp(x, -_FLAT, _FLAT), epsilon)


def _polar(x: Tensor, epsilon: Tensor) -> ValueAndSlope:
    square = x * x
    below = square + epsilon
    return square / below, (x + x) / below * (epsilon / below)


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


def arctan_plus(x: Tensor, epsilon: Tensor, alpha: float, tau: float) -> ValueAndSlope:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·arctan(x) and its slope."""
    x, one = torch.clamp(x, -_FLAT, _FLAT), torch.full_like(epsilon, 1.0)
    return _plus(x, epsilon, alpha, tau, torch.arctan(x.double()).to(x), one / (one + x * x))


def tanh_plus(x: Tensor, epsilon: Tensor, alpha: float, tau: float) -> ValueAndSlope:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·tanh(x) and its slope."""
    x, one = torch.clamp(x, -_FLAT, _FLAT), torch.full_like(epsilon, 1.0)
    curve = torch.tanh(x.double()).to(x)
    return _plus(x, epsilon, alpha, tau, curve, (one - curve) * (one + curve))


def softsign_plus(x: Tensor, epsilon: Tensor, alpha: float, tau: float) -> ValueAndSlope:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·x/(1+|x|) and its slope."""
    x, one = torch.clamp(x, -_FLAT, _FLAT), torch.full_like(epsilon, 1.0)
    below = one + torch.abs(x)
    return _plus(x, epsilon, alpha, tau, x / below, one / below / below)


def _plus(x: Tensor, epsilon: Tensor, alpha: float, tau: float, curve: Tensor, curve_slope: Tensor) -> ValueAndSlope:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·curve and its slope, for an odd curve with slope 1 at 0."""
    polar, polar_slope = _polar(x, epsilon)
    weight = (alpha * epsilon.double() ** (1 / tau)).to(x)
    return torch.sign(x) * polar + weight * curve, torch.abs(polar_slope) + weight * curve_slope


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
        compiles: whether :mod:`~lpfs.gates.host` can compile ``both``.

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
    compiles: bool = False

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

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """α and τ, if there are any: the last arguments of ``both``."""
        return () if self.alpha is None or self.tau is None else (float(self.alpha), float(self.tau))

    def value_and_slope(self, x: Tensor, epsilon: Tensor, divisor: Tensor | None = None) -> ValueAndSlope:
        """Return g(x) and g'(x), shaped like x; both divided by ``divisor`` if there is one."""
        loop = self.loop if epsilon.ndim == 0 and not torch.is_grad_enabled() and host.is_plain(x) else None
        if loop is not None:
            ones = np.ones(len(x), np.float32)
            below = ones if divisor is None else divisor.numpy()
            arrays = loop(x.detach().numpy(), epsilon.numpy(), below, np.ones((), np.float32), self.constants)
            return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        value, slope = self.both(x, epsilon, *self.constants)
        return (value, slope) if divisor is None else (value / divisor, slope / divisor)

    @property
    def loop(self) -> Callable[..., Any] | None:
        """``both`` for arrays; None if it cannot be compiled."""
        return _compiled_loop(self.both) if self.compiles else None

    def value(self, x: Tensor, epsilon: Tensor, divisor: Tensor | None = None) -> Tensor:
        """Return g(x), or g(x) / divisor; its gradient is the slope in closed form."""
        result: Tensor = _ClosedFormGrad.apply(x, epsilon, divisor, self)  # type: ignore[no-untyped-call]
        return result

    def slope(self, x: Tensor, epsilon: Tensor) -> Tensor:
        """Return g'(x)."""
        return self.value_and_slope(x, epsilon)[1]


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


class HostValue(torch.autograd.Function):
    """A value and its slope that were computed as arrays."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: NDArray[np.float32], slope: NDArray[np.float32]) -> Tensor:
        """Return the value as a tensor."""
        ctx.slope = slope
        return torch.from_numpy(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x."""
        return grad * torch.from_numpy(ctx.slope), None, None


@cache
def _compiled_loop(both: Callable[..., ValueAndSlope]) -> Callable[..., Any] | None:
    """Return (x, ε, norm, scale, constants) -> arrays of value and slope, divided by norm · scale."""

    def loop(x: Any, epsilon: Any, norm: Any, scale: Any, constants: Any) -> Any:
        return fill_values(both, x, epsilon[()], norm, scale[()], constants)

    return host.compiled(loop)


def fill_values(both: Any, x: Any, epsilon: Any, norm: Any, scale: Any, constants: Any) -> Any:
    """Return arrays of value and slope, divided by norm · scale; called by compiled functions."""
    value, slope = np.empty_like(x), np.empty_like(x)
    for n in range(len(x)):
        g, g_slope = both(x[n], epsilon, *constants)
        value[n], slope[n] = g / (norm[n] * scale), g_slope / (norm[n] * scale)
    return value, slope


_PLUS = {"odd": True, "lr": 0.01, "alpha": 10.0, "tau": 2.0, "compiles": True}

FUNCTIONS: dict[str, GateFunction] = {
    function.name: function
    for function in (
        GateFunction("lpfs", lpfs, compiles=True),
        GateFunction("lpfs++", arctan_plus, **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++tanh", tanh_plus, **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++softsign", softsign_plus, **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs-noise", lpfs, noise=0.1, compiles=True),
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
