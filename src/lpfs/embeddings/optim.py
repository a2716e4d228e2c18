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

# options of torch's optimizers that row updates do not have: they must be 0 or False for a table
UNSUPPORTED_OPTIONS = {"lr_decay", "weight_decay", "initial_accumulator_value", "momentum", "dampening", "nesterov"}
UNSUPPORTED_OPTIONS |= {"amsgrad", "maximize", "differentiable"}


class _RowOptimizer(torch.optim.Optimizer):
    """Base class: take the step of torch's optimizer, update the rows, then clear their gradients."""

    knows_rows = True
    dense_optimizer: type[torch.optim.Optimizer]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        kind = type(self).__name__
        known = {*self.defaults, "params", "param_names", "initial_lr"}
        for key in param_group:
            if key not in known:
                raise InputError(f"unknown setting {key!r} for {kind}; known settings: {', '.join(sorted(known))}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [key for key, value in group.items() if key in UNSUPPORTED_OPTIONS and value]
        if wrong and row_parameters(group["params"]):
            self.param_groups.pop()
            raise InputError(
                f"{kind} does not support {wrong[0]}={group[wrong[0]]!r} for tables; leave it out, or put "
                "the other parameters into a separate group"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for weight in row_parameters(group["params"]):
                weight.row_grads.clear()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; return the loss of the closure, if there is one."""
        loss, on_device = None, closure is None and rates_on_device(self)
        if not on_device:
            step: Any = self.dense_optimizer.step  # torch wraps hooks around it, which this method has already
            loss = (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                weights = [weight for weight in group["params"] if weight.grad is not None] if on_device else []
                if weights:
                    self._update_dense(group, weights, [weight.grad for weight in weights])
                for weight in row_parameters(group["params"]):
                    pieces = merged_row_grads(weight)
                    if pieces:
                        self._update_rows(weight, group, pieces)
                        weight.row_grads.clear()
        return loss

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        """Update the rows of all pieces; no row is in two pieces."""
        raise NotImplementedError

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        """Update the other parameters with a learning rate on the device, as a captured graph requires."""
        raise NotImplementedError


def rates_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the learning rates are on a GPU, where a captured graph reads them in every replay."""
    lr = optimizer.param_groups[0]["lr"]
    return isinstance(lr, Tensor) and lr.is_cuda


def move_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move learning rates and step counts to a GPU, where a step needs no host synchronization, or to the host."""
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        group["lr"] = lr if device.type == "cpu" else torch.tensor(lr, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


class Adagrad(_RowOptimizer, torch.optim.Adagrad):
    r"""``torch.optim.Adagrad``, with the same result for the rows of tables.

    .. math:: s \leftarrow s + g^2, \qquad w \leftarrow w - \eta \, g / (\sqrt s + \epsilon)
    """

    dense_optimizer = torch.optim.Adagrad
    row_update = "adagrad"  # function of the backend

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.01, eps: float = 1e-10, fused: bool | None = None
    ) -> None:
        # torch's constructor checks the settings, but would allocate an accumulator as large as each table
        settings = torch.optim.Adagrad([torch.zeros(1)], lr=lr, eps=eps, fused=fused).defaults
        torch.optim.Optimizer.__init__(self, params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for weight in group["params"]:
            step = torch.zeros((), device=weight.device if group["fused"] else None)
            per_row = self.row_update == "rowwise_adagrad" and isinstance(weight, RowParameter)
            total = weight.new_zeros(len(weight)) if per_row else torch.zeros_like(weight)
            self.state[weight] = {"step": step, "sum": total.fill_(group["initial_accumulator_value"])}

    def _update_rows(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        state = self.state[weight]
        state["step"] += 1
        update = getattr(backend_for(weight), self.row_update)
        for piece in pieces:
            update(weight, state["sum"], piece, group["lr"], group["eps"])

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        totals = [self.state[weight]["sum"] for weight in weights]
        torch._foreach_add_([self.state[weight]["step"] for weight in weights], 1.0)
        update = getattr(backend_for(weights[0]), "dense_adagrad", None)
        tensors = (*weights, *totals, *grads)
        if update is not None and all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors):
            update(weights, totals, grads, group["lr"], group["eps"])
            return
        torch._foreach_addcmul_(totals, grads, grads, 1.0)
        roots = torch._foreach_sqrt(totals)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(grads, roots), group["lr"]))


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one accumulator per row of a table, of its mean squared gradient; Adagrad for the rest.

    .. math::
        s_r \leftarrow s_r + \tfrac1D \|g_r\|^2, \qquad w_r \leftarrow w_r - \eta \, g_r / (\sqrt{s_r} + \epsilon)

    The state of a table is 1/D of Adagrad's.
    """

    row_update = "rowwise_adagrad"


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
        state = self._state_of(weight, group)
        state["step"] += 1
        step = state["step"] if state["step"].is_cuda else int(state["step"])
        settings = group["lr"], group["betas"], group["eps"], step
        for piece in pieces:
            backend_for(weight).adam(weight, state["exp_avg"], state["exp_avg_sq"], piece, *settings)

    def _state_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            step = torch.zeros((), device=group["lr"].device if isinstance(group["lr"], Tensor) else None)
            state.update(step=step, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        return state

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        states = [self._state_of(weight, group) for weight in weights]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        first, second = group["betas"]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second)
        done = steps[0].double()  # equal for all parameters
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - second**done).sqrt().float())
        torch._foreach_add_(roots, group["eps"])
        size = (group["lr"] / (1 - first**done)).float()
        torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(means, roots), size))


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

    def _update_dense(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        if group["momentum"]:
            raise InputError("a captured graph supports SGD only without momentum; set momentum to 0 or graph=False")
        torch._foreach_sub_(weights, torch._foreach_mul(grads, group["lr"]))
