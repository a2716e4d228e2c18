"""ProxSGD: momentum SGD on the loss, then the proximal step of the penalty, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_pre_hooks

from lpfs.errors import InputError, NonFiniteError
from lpfs.gates.prox import hard_threshold, positive_threshold, soft_threshold, soft_threshold_

# Hooks on every optimizer's step that do nothing for a ProxSGD.
PASSING_HOOKS: list[Any] = []

Prox = Literal["l1", "positive", "l0"]
PROXES = {"l1": soft_threshold, "positive": positive_threshold, "l0": hard_threshold}
Threshold = Literal["paper", "doubled", "momentum"]


class Stepper(Protocol):
    """Who takes the steps of a ProxSGD in its stead."""

    def move(self) -> bool:
        """Take one step, if the host must not be asked; return whether it was taken."""
        ...

    def mirror(self) -> None:
        """Write the settings of the moment into the optimizer's groups."""
        ...


class ProxSGD(torch.optim.Optimizer):
    r"""Proximal SGD with momentum for λ‖x‖₁ (or λ‖x‖₀).

    .. math::
        v \leftarrow \beta v + \nabla L(x), \qquad \tilde x = x - \eta v, \qquad
        x \leftarrow \mathrm{sign}(\tilde x) \, \max(|\tilde x| - \lambda\eta, 0)

    Parameters reach exactly 0.0 and stay there unless the gradient is larger than λ. With λ = 0 every step is
    that of ``torch.optim.SGD``, bit for bit. A step with a gradient that is not finite raises
    :class:`~lpfs.errors.NonFiniteError` and changes nothing.

    Args:
        params: parameters, or groups of them; each group may have its own settings.
        lr: η.
        momentum: β.
        penalty: λ, a number or a tensor shaped like the parameter (``inf`` holds an entry at zero).
        weights: a factor on λ for every entry, such as the cost of a field.
        prox: ``"l1"``, the soft threshold; ``"positive"``, the same with x >= 0, so that nobody who is penalised
            crosses zero; ``"l0"``, the hard threshold √(2λη), for the ablation.
        threshold: ``"paper"`` λη, its equation; ``"doubled"`` 2λη, its ablation's text; ``"momentum"``
            λη/(1-β), which penalises as the objective says in spite of the momentum.

    >>> x = torch.nn.Parameter(torch.tensor([1.0, 0.005]))
    >>> prox = ProxSGD([x], lr=0.1, penalty=0.1)
    >>> x.grad = torch.zeros(2)
    >>> prox.step()
    >>> x.data
    tensor([0.9900, 0.0000])

    """

    # Gates in a CUDA graph take the step themselves, without the host (see device.py)
    stepper: Stepper | None = None
    # Gates on a CPU move x by one compiled call, where it is for that (see compiled.py); a copy has none
    mover: Callable[[ProxSGD], bool] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.9,
        penalty: float | Tensor = 0.0,
        weights: Tensor | None = None,
        prox: Prox = "l1",
        threshold: Threshold = "paper",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "penalty": penalty,
            "weights": weights,
            "prox": prox,
            "threshold": threshold,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings."""
        unknown = sorted(set(param_group) - {"params", "param_names", *self.defaults})
        if unknown:
            known = ", ".join(sorted(self.defaults))
            raise InputError(f"unknown setting {unknown[0]!r} for ProxSGD; it knows {known}")
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, without torch's bookkeeping around it."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for x in group["params"]:
                x.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the settings of the moment."""
        if self.stepper is not None:
            self.stepper.mirror()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, wherever its tensors are: settings follow the parameters, as the state does."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            device = group["params"][0].device
            for name in ("penalty", "weights"):
                if isinstance(group[name], Tensor):
                    group[name] = group[name].to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "stepper": self.stepper}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; with a closure, evaluate the loss first and return it."""
        if not self._hooks_are_ours():
            return self._step_with_hooks(closure)
        if closure is None and self.stepper is None and self.mover is not None and self.mover(self):
            return None  # x of some gates alone: nothing that a guard would refuse
        for hook in _global_pre_hooks.values():
            if hook not in PASSING_HOOKS:
                hook(self, (), {})
        return self._step(closure)

    # torch wraps every step in a profiler's record and a walk over hooks, which takes longer than the step itself
    step.hooked = True  # type: ignore[attr-defined]

    def _hooks_are_ours(self) -> bool:
        """Whether nobody but lpfs, whose hooks pass a ProxSGD or guard tables, asked to be called at a step."""
        of_others = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _global_post_hooks
        return not of_others and all(
            hook in PASSING_HOOKS or hasattr(hook, "guards") for hook in _global_pre_hooks.values()
        )

    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.stepper is not None and self.stepper.move():
            return loss
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None or math.isfinite(x.grad.sum().item()):
                    continue
                where = (~torch.isfinite(x.grad)).flatten().nonzero().flatten().tolist()
                if where:
                    raise NonFiniteError(
                        f"the gradient of the gates is not finite at {where[:5]}; the step was refused and "
                        "nothing was moved. Look for a loss of inf or nan in this batch, or lower the "
                        "learning rate of the model"
                    )
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._move(x, group)
        return loss

    _step_with_hooks = torch.optim.Optimizer.profile_hook_step(_step)

    def _move(self, x: Tensor, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        direction = x.grad
        assert direction is not None
        if momentum:
            velocity = self.state[x].get("momentum_buffer")
            if velocity is None:
                velocity = self.state[x]["momentum_buffer"] = direction.clone()
            else:
                velocity.mul_(momentum).add_(direction)
            direction = velocity
        x.add_(direction, alpha=-group["lr"])
        threshold = threshold_of(group)
        if isinstance(threshold, Tensor) and threshold.device != x.device:
            threshold = threshold.to(x.device)
        if group["prox"] == "l1":
            soft_threshold_(x, threshold)
        else:
            x.copy_(prox_of(group)(x, threshold))


def prox_of(group: dict[str, Any]) -> Callable[[Tensor, Tensor | float], Tensor]:
    """Return the proximal step of a group; who is never penalised, its weight is 0, is free to cross zero."""
    found: Callable[[Tensor, Tensor | float], Tensor] = PROXES[group["prox"]]
    weights = group["weights"]
    if group["prox"] != "positive" or weights is None:
        return found

    def where_penalised(x: Tensor, threshold: Tensor | float) -> Tensor:
        return torch.where(weights == 0, x, found(x, threshold))

    return where_penalised


def factor_of(group: dict[str, Any]) -> float:
    """Return how many times λη one step of this group moves an entry towards zero."""
    factors: dict[str, float] = {"paper": 1.0, "doubled": 2.0, "momentum": 1 / (1 - group["momentum"])}
    return factors[group["threshold"]]


def threshold_of(group: dict[str, Any]) -> float | Tensor:
    """Return how far one step of this group moves an entry towards zero: λη, by default."""
    threshold: float | Tensor = group["penalty"] * (factor_of(group) * group["lr"])
    weights = group["weights"]
    if weights is None:
        return threshold
    if isinstance(threshold, Tensor) and threshold.device != weights.device:
        threshold = threshold.to(weights.device)
    return weights * threshold  # type: ignore[no-any-return]


def _check(group: dict[str, Any]) -> None:
    """Refuse settings that make no sense, before anything uses them."""
    lr, momentum, penalty, weights = (group[name] for name in ("lr", "momentum", "penalty", "weights"))
    if not (lr >= 0 and math.isfinite(lr)):
        raise InputError(f"lr must be >= 0, found {lr!r}")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum must be in [0, 1), found {momentum!r}")
    if group["prox"] not in PROXES:
        raise InputError(f"prox must be 'l1', 'positive' or 'l0', found {group['prox']!r}")
    if group["threshold"] not in ("paper", "doubled", "momentum"):
        raise InputError(f"threshold must be 'paper', 'doubled' or 'momentum', found {group['threshold']!r}")
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
