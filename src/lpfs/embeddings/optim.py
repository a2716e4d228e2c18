"""Optimizers with row updates for embedding tables; other parameters are updated as by ``torch.optim``.

A row without a gradient does not change, and no tensor of the size of a table is computed. Schedulers, parameter
groups, hooks and state dicts work as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lpfs.embeddings._backends import backend_for
from lpfs.embeddings.row_grad import RowGrad, RowParameter, merged_row_grads, row_parameters
from lpfs.errors import InputError

# options of torch's optimizers that row updates do not have, with the only value that a table accepts
UNSUPPORTED_OPTIONS: dict[str, Any] = {
    "lr_decay": 0,
    "weight_decay": 0,
    "initial_accumulator_value": 0,
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
}


class _RowOptimizer(torch.optim.Optimizer):
    """Base class: take the step of torch's optimizer, update the rows, then clear their gradients."""

    knows_rows = True
    dense_optimizer: type[torch.optim.Optimizer]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings."""
        kind = type(self).__name__
        known = {*self.defaults, "params", "param_names", "initial_lr"}
        for key in param_group:
            if key not in known:
                raise InputError(f"unknown setting {key!r} for {kind}; known settings: {', '.join(sorted(known))}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [key for key, off in UNSUPPORTED_OPTIONS.items() if group.get(key, off) != off]
        if wrong and row_parameters(group["params"]):
            self.param_groups.pop()
            raise InputError(
                f"{kind} does not support {wrong[0]}={group[wrong[0]]!r} for tables; leave it out, or put "
                "the other parameters into a separate group"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including those by rows."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for weight in row_parameters(group["params"]):
                weight.row_grads.clear()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; return the loss of the closure, if there is one."""
        if closure is None and rates_on_device(self):
            loss = None
            with torch.no_grad():
                for group in self.param_groups:
                    self._update_dense(group, [weight for weight in group["params"] if weight.grad is not None])
        else:
            loss = _unhooked(self.dense_optimizer.step)(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in row_parameters(group["params"]):
                    pieces = merged_row_grads(weight)
                    if pieces:
                        self._update_rows(weight, group, pieces)
                        weight.row_grads.clear()
        return loss

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        """Update the rows of all pieces; no row is in two pieces."""
        raise NotImplementedError

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Update the other parameters with a learning rate on the device, as a captured graph requires."""
        raise NotImplementedError


def rates_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the learning rates are on a GPU, where a captured graph reads them in every replay."""
    lr = optimizer.param_groups[0]["lr"]
    return isinstance(lr, Tensor) and lr.is_cuda


def move_rates_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move learning rates and step counts to a GPU, so that a step needs no host synchronization."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def move_rates_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Move learning rates and step counts back to the host."""
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].cpu()


def _grads(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _unhooked(step: Any) -> Any:
    """Return torch's step without the hooks that torch wraps around it; ours has them already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class Adagrad(_RowOptimizer, torch.optim.Adagrad):
    r"""``torch.optim.Adagrad``, with the same result for the rows of tables.

    .. math:: s \leftarrow s + g^2, \qquad w \leftarrow w - \eta \, g / (\sqrt s + \epsilon)
    """

    dense_optimizer = torch.optim.Adagrad

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.01, eps: float = 1e-10, fused: bool | None = None
    ) -> None:
        # torch's constructor checks the settings, but would allocate an accumulator as large as each table
        settings = torch.optim.Adagrad([torch.zeros(1)], lr=lr, eps=eps, fused=fused).defaults
        torch.optim.Optimizer.__init__(self, params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and their accumulators."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for weight in group["params"]:
            step = torch.zeros((), device=weight.device if group["fused"] else None)
            total = self._new_accumulator(weight) if isinstance(weight, RowParameter) else torch.zeros_like(weight)
            self.state[weight] = {"step": step, "sum": total.fill_(group["initial_accumulator_value"])}

    def _new_accumulator(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        state = self.state[weight]
        state["step"] += 1
        for piece in pieces:
            self._update(weight, state["sum"], piece, group["lr"], group["eps"])

    def _update(self, weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
        backend_for(weight).adagrad(weight, total, grad, lr, eps)

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        grads = _grads(weights)
        totals = [self.state[weight]["sum"] for weight in weights]
        torch._foreach_add_([self.state[weight]["step"] for weight in weights], 1.0)
        torch._foreach_addcmul_(totals, grads, grads, 1.0)
        roots = torch._foreach_sqrt(totals)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(grads, roots)
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(weights, updates)


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one accumulator per row of a table, of its mean squared gradient; Adagrad for the rest.

    .. math::
        s_r \leftarrow s_r + \tfrac1D \|g_r\|^2, \qquad
        w_r \leftarrow w_r - \eta \, g_r / (\sqrt{s_r} + \epsilon)

    The state of a table is 1/D of Adagrad's.
    """

    def _new_accumulator(self, weight: Tensor) -> Tensor:
        return weight.new_zeros(len(weight))

    def _update(self, weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
        backend_for(weight).rowwise_adagrad(weight, total, grad, lr, eps)


class Adam(_RowOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``; for tables ``torch.optim.SparseAdam``: moments of a row decay only when it is used."""

    dense_optimizer = torch.optim.Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        torch.optim.Adam.__init__(self, params, lr=lr, betas=betas, eps=eps, fused=fused)

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        state = self.state[weight]
        if not state:
            state.update(self._zeros(weight, group))
        state["step"] += 1
        moments = state["exp_avg"], state["exp_avg_sq"]
        steps = state["step"] if state["step"].is_cuda else int(state["step"])
        settings = group["lr"], group["betas"], group["eps"], steps
        for piece in pieces:
            backend_for(weight).adam(weight, *moments, piece, *settings)

    def _zeros(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        lr = group["lr"]
        step = torch.zeros((), device=lr.device if isinstance(lr, Tensor) else None)
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        for weight in weights:
            if not self.state[weight]:
                self.state[weight].update(self._zeros(weight, group))
        grads = _grads(weights)
        means, squares, steps = (
            [self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        first, second = group["betas"]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second)
        steps_done = steps[0].double()  # equal for all parameters
        size = group["lr"] / (1 - first**steps_done)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, ((1 - second**steps_done).sqrt()).float())
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_mul_(updates, size.float())
        torch._foreach_sub_(weights, updates)


class SGD(_RowOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``; tables need momentum 0, because momentum would update every row in every step."""

    dense_optimizer = torch.optim.SGD

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.01, momentum: float = 0.0, fused: bool | None = None
    ) -> None:
        torch.optim.SGD.__init__(self, params, lr=lr, momentum=momentum, fused=fused)

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        for piece in pieces:
            backend_for(weight).sgd(weight, piece, group["lr"])

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if group["momentum"]:
            raise InputError("a captured graph supports SGD only without momentum; set momentum to 0 or graph=False")
        if weights:
            updates = torch._foreach_mul(_grads(weights), group["lr"])
            torch._foreach_sub_(weights, updates)
