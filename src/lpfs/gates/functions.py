"""The gate functions: pure mathematics, no state.

A gate function maps the learnable x of a field to the factor its embedding is multiplied with. Every function
here takes ``(x, epsilon)``, the ++ family also ``(alpha, tau)``, and returns the pair (value, slope), so that
a function and its derivative stand side by side. ``FUNCTIONS`` is the registry: to add a gate function, write
one such function and add one line to it; the tests in ``tests/gates/test_functions.py`` pick it up.

The functions of the paper take numpy arrays as well as tensors, with the same result to the last bit: a dozen or
a hundred numbers on the CPU cost numpy a third of the time.

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
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.errors import InputError

Pair = tuple[Tensor, Tensor]
Arrays = tuple[NDArray[np.float32], NDArray[np.float32]]

# Beyond this every function is flat to the last bit, and its square still fits into float32 and bfloat16.
_FLAT = 1e15


def lpfs(x: Tensor, epsilon: Tensor) -> Pair:
    """Return x²/(x²+ε) and 2xε/(x²+ε)²."""
    return _lpfs(_clamp(x), epsilon)


def _lpfs(x: Tensor, epsilon: Tensor) -> Pair:
    square = x * x
    below = square + epsilon
    return square / below, 2 * (x / below) * (epsilon / below)


def gaussian(x: Tensor, epsilon: Tensor) -> Pair:
    """Return 1 - exp(-x²/2ε²) and (x/ε²)·exp(-x²/2ε²)."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    power = -0.5 * q * q
    return -torch.expm1(power), q / epsilon * torch.exp(power)


def sin_arctan(x: Tensor, epsilon: Tensor) -> Pair:
    """Return sin(arctan(|x|/ε)) = |q|/√(1+q²), q = x/ε, and sign(x)/(ε·(1+q²)^1.5); 0 at its kink in 0."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    root = torch.sqrt(1 + q * q)
    return q.abs() / root, torch.sign(q) / epsilon / root / root / root


def tanh(x: Tensor, epsilon: Tensor) -> Pair:
    """Return tanh(x²/2ε²) and (x/ε²)·(1 - tanh²)."""
    q = (x / epsilon).clamp(-_FLAT, _FLAT)
    value = torch.tanh(0.5 * q * q)
    return value, q / epsilon * ((1 - value) * (1 + value))


def rational(x: Tensor, epsilon: Tensor) -> Pair:
    """Return x²/(x²+ε²) and its slope: LPFS with ε on the scale of x."""
    return lpfs(x, epsilon * epsilon)


def _arctan(x: Tensor) -> Pair:
    return _by_torch(torch.arctan, x), 1 / (1 + x * x)


def _tanh(x: Tensor) -> Pair:
    value = _by_torch(torch.tanh, x)
    return value, (1 - value) * (1 + value)


def _softsign(x: Tensor) -> Pair:
    below = 1 + abs(x)
    return x / below, 1 / below / below


def plusplus(odd: Callable[[Tensor], Pair], x: Tensor, epsilon: Tensor, alpha: float, tau: float) -> Pair:
    """Return sign(x)·x²/(x²+ε) + α·ε^(1/τ)·odd(x) and its slope, for an odd function with odd'(0) = 1."""
    x = _clamp(x)
    polar, steep = _lpfs(x, epsilon)
    curve, rise = odd(x)
    weight = alpha * _root(epsilon, tau)
    return _sign(x) * polar + weight * curve, abs(steep) + weight * rise


# Tensor or array: the few operations that the two do not spell alike. What is not exactly rounded (arctan, tanh,
# powers) is torch's for both.


def _clamp(x: Tensor) -> Tensor:
    if isinstance(x, np.ndarray):
        return np.minimum(np.maximum(x, -_FLAT), _FLAT)
    return x.clamp(-_FLAT, _FLAT)


def _sign(x: Tensor) -> Tensor:
    return np.sign(x) if isinstance(x, np.ndarray) else torch.sign(x)


def _root(x: Tensor, tau: float) -> Tensor:
    return _root_of_number(float(x[0]), tau) if isinstance(x, np.ndarray) else x ** (1 / tau)


@lru_cache(maxsize=64)
def _root_of_number(x: float, tau: float) -> Any:
    """Return the root that torch gives in float32: its power of one half is not always the exact root."""
    return (torch.tensor(x) ** (1 / tau)).reshape(1).numpy()


def _by_torch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if isinstance(x, np.ndarray):
        return function(torch.from_numpy(x)).numpy()
    return function(x)


@dataclass(frozen=True)
class GateFunction:
    """A gate function with its constants.

    Args:
        name: how it is called in the registry.
        both: the mathematics: (x, ε[, α, τ]) -> (value, slope).
        epsilon: ε at the start of a search.
        lr: the learning rate of the gates at the start of a search.
        odd: whether g(-x) = -g(x) (the ++ family); else g is even.
        square: whether ε is on the scale of x² (else of x); says how it follows a schedule.
        alpha: weight of the odd term, which lets a dead field come back (++ family only).
        tau: the odd term fades as ε^(1/τ) (++ family only).
        noise: standard deviation, at the start, of fading noise on x (0 for none).
        arrays: whether ``both`` takes numpy arrays as well as tensors.

    >>> round(gate_function("lpfs").value(torch.ones(()), torch.tensor(0.1)).item(), 5)
    0.90909

    """

    name: str
    both: Callable[..., Pair]
    epsilon: float = 0.1
    lr: float = 0.005
    odd: bool = False
    square: bool = True
    alpha: float | None = None
    tau: float | None = None
    noise: float = 0.0
    arrays: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"gate {self.name!r}: epsilon must be > 0, found {self.epsilon!r}")
        if (self.alpha is None) != (self.tau is None):
            raise InputError(f"gate {self.name!r}: alpha and tau go together")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise InputError(f"gate {self.name!r}: alpha must be >= 0, found {self.alpha!r}")
        if self.tau is not None and not (math.isfinite(self.tau) and self.tau > 0):
            raise InputError(f"gate {self.name!r}: tau must be > 0, found {self.tau!r}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise InputError(f"gate {self.name!r}: noise must be >= 0, found {self.noise!r}")

    @property
    def revives(self) -> bool:
        """Whether a gate at zero can come back: by the slope at zero, or by noise."""
        return bool(self.alpha) or self.noise > 0

    def value_and_slope(self, x: Tensor, epsilon: Tensor) -> Pair:
        """Return g(x) and g'(x), shaped like x."""
        constants = () if self.alpha is None else (self.alpha, self.tau)
        return self.both(x, epsilon, *constants)

    def value(self, x: Tensor, epsilon: Tensor) -> Tensor:
        """Return g(x); its gradient is the slope in closed form."""
        result: Tensor = _Value.apply(x, epsilon, self)  # type: ignore[no-untyped-call]
        return result

    def on_arrays(self, x: NDArray[np.float32], epsilon: NDArray[np.float32]) -> Arrays:
        """Return g(x) and g'(x) of a numpy array (N,), for an ε of shape (1,)."""
        constants = () if self.alpha is None else (self.alpha, self.tau)
        result: Arrays = self.both(x, epsilon, *constants)  # type: ignore[assignment]
        return result

    def slope(self, x: Tensor, epsilon: Tensor) -> Tensor:
        """Return g'(x)."""
        return self.value_and_slope(x, epsilon)[1]


class _Value(torch.autograd.Function):
    """g(x) whose backward is the closed-form slope: cheaper than the chain rule, and finite for every x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: Tensor, function: GateFunction) -> Tensor:
        value, slope = function.value_and_slope(x, epsilon)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


class ByNumpy(torch.autograd.Function):
    """value / below whose gradient is slope / below, all of them numpy arrays (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: NDArray[np.float32],
        slope: NDArray[np.float32],
        below: NDArray[np.float32],
    ) -> Tensor:
        """Return value / below."""
        ctx.arrays = (slope, below)
        return torch.from_numpy(value / below)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return grad / below · slope."""
        slope, below = ctx.arrays
        return torch.from_numpy(grad.numpy() / below * slope), None, None, None


_PLUS = {"odd": True, "lr": 0.01, "alpha": 10.0, "tau": 2.0, "arrays": True}

FUNCTIONS: dict[str, GateFunction] = {
    each.name: each
    for each in (
        GateFunction("lpfs", lpfs, arrays=True),
        GateFunction("lpfs++", partial(plusplus, _arctan), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++tanh", partial(plusplus, _tanh), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs++softsign", partial(plusplus, _softsign), **_PLUS),  # type: ignore[arg-type]
        GateFunction("lpfs-noise", lpfs, noise=0.1, arrays=True),
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
    """Look a gate function up by name, with constants of one's own where they are given.

    >>> gate_function("lpfs++", alpha=50).alpha
    50
    """
    if isinstance(gate, str):
        if gate not in FUNCTIONS:
            close = difflib.get_close_matches(gate, FUNCTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"no gate function {gate!r}; there are {', '.join(FUNCTIONS)}{hint}")
        gate = FUNCTIONS[gate]
    given = {"alpha": alpha, "tau": tau, "epsilon": epsilon, "noise": noise}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in ("alpha", "tau"):
        if name in changes and gate.alpha is None:
            raise InputError(f"gate {gate.name!r} has no {name}; the lpfs++ family has")
    return replace(gate, **changes)  # type: ignore[arg-type]
