"""Proximal operators in closed form, and ProxSGD: momentum SGD on the loss, then the proximal step of the penalty.

The proximal operator of a penalty p is argmin over z of ½(z - x)² + p(z), where x is the result of the momentum step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, get_args, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks as _global_post_hooks,
    _global_optimizer_pre_hooks as _global_pre_hooks,
)

from lpfs.errors import InputError, NonFiniteError
from lpfs.gates import host

Prox = Literal["l1", "positive", "l0"]
Threshold = Literal["paper", "doubled", "momentum"]

# Settings of a group that may be tensors, and settings that belong to the device, not to the state.
TENSOR_SETTINGS = ("lr", "penalty", "weights")
DEVICE_SETTINGS = ("capturable", "fused")


def soft_threshold(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Return argmin_z ½(z - x)² + t·|z|: x moved by t towards zero, and exactly zero where it would cross.

    A threshold of 0 returns x to the last bit, one of ``inf`` returns zeros.

    >>> soft_threshold(torch.tensor([1.0, -0.25, -1.0]), 0.5)
    tensor([ 0.5000,  0.0000, -0.5000])
    """
    return x - torch.clamp(x, -threshold, threshold)  # type: ignore[arg-type]


def positive_threshold(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Return argmin over z >= 0 of ½(z - x)² + t·z: max(x - t, 0).

    >>> positive_threshold(torch.tensor([1.0, 0.25, -1.0]), 0.5)
    tensor([0.5000, 0.0000, 0.0000])
    """
    return torch.clamp(x - threshold, 0.0, math.inf)


def hard_threshold(x: Tensor, penalty: Tensor | float) -> Tensor:
    """Return argmin_z ½(z - x)² + p·[z ≠ 0]: x where |x| > √(2p), otherwise exactly zero.

    >>> hard_threshold(torch.tensor([1.0, -0.25]), 0.125)
    tensor([1., 0.])
    """
    return torch.where(torch.abs(x) > torch.sqrt(torch.full_like(x, 2.0) * penalty), x, torch.full_like(x, 0.0))


PROXES = get_args(Prox)
POSITIVE, L0 = PROXES.index("positive"), PROXES.index("l0")  # numbers, which numba receives faster than names


def apply_prox(x: Tensor, threshold: Tensor, weights: Tensor, prox: int) -> Tensor:
    """Apply a proximal operator; with ``positive``, entries of weight 0 are not penalized and may cross zero."""
    if prox == POSITIVE:
        return torch.where(weights == 0, x, positive_threshold(x, threshold))
    if prox == L0:
        return hard_threshold(x, threshold)
    return soft_threshold(x, threshold)


def proximal_step(
    x: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    weights: Tensor,
    penalty: Tensor | float,
    lr: Tensor,
    momentum: float,
    factor: float,
    prox: int,
) -> tuple[Tensor, Tensor]:
    """Return x and the velocity after a step."""
    direction = velocity * momentum + gradient
    # in float64, to round once, as x.add_(direction, alpha=-lr) does
    moved = (x.double() - lr.to(x).double() * direction.double()).to(x)
    threshold = weights * (penalty * (factor * lr)).to(x)
    return apply_prox(moved, threshold, weights, prox), direction


def proximal_loop(
    x: Any, gradient: Any, velocity: Any, weights: Any, penalty: Any, lr: Any, momentum: Any, factor: Any, prox: Any
) -> bool:
    """Take the step on arrays, in place, if the gradient is finite; return whether it is."""
    for n in range(len(x)):
        if not math.isfinite(gradient[n]):
            return False
    for n in range(len(x)):
        x[n], velocity[n] = proximal_step(
            x[n], gradient[n], velocity[n], weights[n], penalty[n], lr[()], momentum, factor, prox
        )
    return True


class ProxSGD(torch.optim.Optimizer):
    r"""Proximal SGD with momentum for λ‖x‖₁ (or λ‖x‖₀).

    .. math::
        v \leftarrow \beta v + \nabla L(x), \qquad \tilde x = x - \eta v, \qquad
        x \leftarrow \mathrm{sign}(\tilde x) \, \max(|\tilde x| - \lambda\eta, 0)

    Entries reach exactly 0.0 and stay there unless the gradient is larger than λ. With λ = 0 every step equals
    that of ``torch.optim.SGD``, bit for bit. A step with a gradient that is not finite raises
    :class:`~lpfs.errors.NonFiniteError` and changes nothing.

    Args:
        params: parameters, or groups of them; each group may have its own settings.
        lr: η, a number or a tensor ().
        momentum: β.
        penalty: λ, a number or a tensor shaped like the parameter (``inf`` keeps an entry at zero).
        weights: a factor on λ for every entry, such as the cost of a field.
        prox: ``"l1"``, the soft threshold; ``"positive"``, the same with x >= 0, so that no penalized entry
            crosses zero; ``"l0"``, the hard threshold √(2λη), for the ablation.
        threshold: ``"paper"`` λη, its equation; ``"doubled"`` 2λη, its ablation's text; ``"momentum"``
            λη/(1-β), which penalizes as the objective says in spite of the momentum.
        capturable: take steps without host synchronization, so that they can be captured in a CUDA graph. A
            gradient that is not finite changes nothing and is counted in ``state[x]["nonfinite_steps"]``.
        fused: take the step in one Triton kernel; needs ``capturable``, a GPU, tensors for lr and penalty, and a
            prox other than ``"l0"``.

    >>> x = torch.nn.Parameter(torch.tensor([1.0, 0.005]))
    >>> prox = ProxSGD([x], lr=0.1, penalty=0.1)
    >>> x.grad = torch.zeros(2)
    >>> prox.step()
    >>> x.data
    tensor([0.9900, 0.0000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        penalty: float | Tensor = 0.0,
        weights: Tensor | None = None,
        prox: Prox = "l1",
        threshold: Threshold = "paper",
        *,
        capturable: bool = False,
        fused: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "penalty": penalty,
            "weights": weights,
            "prox": prox,
            "threshold": threshold,
            "capturable": capturable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings."""
        unknown = sorted(set(param_group) - {"params", "param_names", *self.defaults})
        if unknown:
            known = ", ".join(sorted(self.defaults))
            raise InputError(f"unknown setting {unknown[0]!r} for ProxSGD; its settings are {known}")
        super().add_param_group(param_group)
        try:
            _check_settings(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; tensor settings are copied in place, because their owner and captured graphs read them."""
        present = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, present, strict=True):
            group.update({name: before[name] for name in DEVICE_SETTINGS})
            for name in TENSOR_SETTINGS:
                if isinstance(before[name], Tensor) and group[name] is not None:
                    group[name] = before[name].copy_(torch.as_tensor(group[name]))
                elif isinstance(group[name], Tensor):
                    group[name] = group[name].to(group["params"][0].device)

    _arrays: host.Arrays | None = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; with a closure, evaluate the loss first and return it."""
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _global_post_hooks:
            return self._step_with_hooks(closure)
        for hook in tuple(_global_pre_hooks.values()):
            hook(self, (), {})
        return self._step(closure)

    # torch would wrap the step in a record of its profiler, which takes longer than the step of a few gates
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [(x, group) for group in self.param_groups for x in group["params"] if x.grad is not None]
        if len(updates) == 1 and self._update_compiled(*updates[0]):
            return loss
        with torch.no_grad():
            for x, group in updates:
                if not group["capturable"]:
                    _check_finite(x.grad)
            for x, group in updates:
                self._update(x, group)
        return loss

    _step_with_hooks = torch.optim.Optimizer.profile_hook_step(_step)

    def _update_compiled(self, x: Tensor, group: dict[str, Any]) -> bool:
        """Take the step on a CPU with the settings of gates; return False, without a change, in any other case."""
        gradient, velocity, momentum = x.grad, self.state[x].get("momentum_buffer"), group["momentum"]
        lr, penalty, weights = group["lr"], group["penalty"], group["weights"]
        if group["capturable"] or velocity is None or weights is None or not momentum or not host.is_plain(x):
            return False
        if not (isinstance(lr, Tensor) and lr.ndim == 0 and isinstance(penalty, Tensor) and penalty.ndim == 1):
            return False
        loop = host.compiled(proximal_loop)
        if loop is None or gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
            return False
        self._arrays = self._arrays or host.Arrays()
        x_array, *arrays = self._arrays(x, velocity, weights, penalty, lr)
        settings = _compiled_settings(float(momentum), group["threshold"], group["prox"])
        if not loop(x_array, gradient.numpy(), *arrays, *settings):
            _check_finite(gradient)
        torch.autograd.graph.increment_version(x)
        return True

    def _update(self, x: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = x.grad, self.state[x], group["momentum"]
        assert gradient is not None
        if momentum and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(x)
        velocity = state.get("momentum_buffer")
        lr, penalty, prox, factor = group["lr"], group["penalty"], PROXES.index(group["prox"]), threshold_factor(group)
        weights = torch.ones_like(x) if group["weights"] is None else group["weights"]
        if not group["capturable"]:
            if momentum:
                gradient = velocity.mul_(momentum).add_(gradient)
            x.add_(gradient, alpha=-float(lr))
            threshold = weights * torch.as_tensor(penalty * (factor * float(lr))).to(x)
            x.copy_(apply_prox(x, threshold, weights, prox))
            return
        if "nonfinite_steps" not in state:
            state["nonfinite_steps"] = torch.zeros((), device=x.device)
        if group["fused"]:
            from lpfs.gates import _triton

            _triton.prox_step(x, gradient, velocity, state["nonfinite_steps"], group, factor)
            return
        velocity, lr = torch.zeros_like(x) if velocity is None else velocity, torch.as_tensor(lr, device=x.device)
        moved, direction = proximal_step(x, gradient, velocity, weights, penalty, lr, momentum, factor, prox)
        finite = torch.isfinite(gradient).all()
        state["nonfinite_steps"] += ~finite
        velocity.copy_(torch.where(finite, direction, velocity))
        x.copy_(torch.where(finite, moved, x))


def threshold_factor(group: dict[str, Any]) -> float:
    """Return the distance that one step moves an entry towards zero, in units of λη."""
    factors: dict[str, float] = {"paper": 1.0, "doubled": 2.0, "momentum": 1 / (1 - group["momentum"])}
    return factors[group["threshold"]]


@cache
def _compiled_settings(momentum: float, threshold: Threshold, prox: Prox) -> tuple[np.float32, float, int]:
    """Return the last arguments of ``proximal_loop``."""
    factor = threshold_factor({"momentum": momentum, "threshold": threshold})
    return np.float32(momentum), factor, PROXES.index(prox)


def _check_finite(gradient: Tensor) -> None:
    """Raise NonFiniteError if a gradient has an entry that is not finite."""
    if not math.isfinite(gradient.sum().item()):  # the sum may overflow although all entries are finite
        positions = (~torch.isfinite(gradient)).flatten().nonzero().flatten().tolist()
        if positions:
            raise NonFiniteError(
                f"the gradient of the gates is not finite at {positions[:5]}; nothing was changed. Check this "
                "batch for a loss of inf or nan, or lower the learning rate of the model"
            )


def _check_settings(group: dict[str, Any]) -> None:
    """Raise InputError if a setting of a group is invalid."""
    lr, momentum, penalty, weights = (group[name] for name in ("lr", "momentum", "penalty", "weights"))
    if not (lr >= 0 and math.isfinite(lr)):
        raise InputError(f"lr must be >= 0, found {lr!r}")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum must be in [0, 1), found {momentum!r}")
    if group["prox"] not in PROXES:
        raise InputError(f"prox must be 'l1', 'positive' or 'l0', found {group['prox']!r}")
    if group["threshold"] not in ("paper", "doubled", "momentum"):
        raise InputError(f"threshold must be 'paper', 'doubled' or 'momentum', found {group['threshold']!r}")
    if group["fused"] and not group["capturable"]:
        raise InputError("fused=True needs capturable=True")
    for name, value in (("penalty", penalty), ("weights", weights)):
        if value is None:
            continue
        if not bool((torch.as_tensor(value) >= 0).all()):
            raise InputError(f"{name} must be >= 0, found {value!r}")
        if isinstance(value, Tensor) and value.ndim:
            for x in group["params"]:
                if value.shape != x.shape:
                    raise InputError(
                        f"{name} must have one entry for each of the {x.numel()} gates, "
                        f"found shape {tuple(value.shape)}"
                    )
