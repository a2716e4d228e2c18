"""Optimizers that know rows: torch's own for every other parameter, row updates for tables.

A row without gradient does not move, and nothing of the size of a table is computed. Schedulers, groups, hooks
and state dicts work as with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lpfs.embeddings._torch import backend_for
from lpfs.embeddings.row_grad import RowGrad, RowParameter, merged_row_grads, row_parameters
from lpfs.errors import InputError

# settings that torch's optimizers have and row updates do not: only off will do for a table
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
    """What the optimizers here share: take torch's step, then that of the rows, then forget their gradient."""

    knows_rows = True
    torchs: type[torch.optim.Optimizer]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings."""
        kind = type(self).__name__
        known = {*self.defaults, "params", "param_names", "initial_lr"}
        for key in param_group:
            if key not in known:
                raise InputError(f"unknown setting {key!r} for {kind}; it knows {', '.join(sorted(known))}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [key for key, off in UNSUPPORTED_OPTIONS.items() if group.get(key, off) != off]
        if wrong and row_parameters(group["params"]):
            self.param_groups.pop()
            raise InputError(
                f"{kind} has no {wrong[0]}={group[wrong[0]]!r} for tables; leave it out, or put the other "
                "parameters, with it, in a group of their own"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, those by rows too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for each in row_parameters(group["params"]):
                each.row_grads.clear()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step."""
        if closure is None and rates_on_device(self):
            loss = None
            with torch.no_grad():
                for group in self.param_groups:
                    self._dense(group, [each for each in group["params"] if each.grad is not None])
        else:
            loss = _unhooked(self.torchs.step)(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in row_parameters(group["params"]):
                    pieces = merged_row_grads(weight)
                    if pieces:
                        self._move(weight, group, pieces)
                        weight.row_grads.clear()
        return loss

    def _move(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        """Move the rows of all pieces; they have none in common."""
        raise NotImplementedError

    def _dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Move the other parameters by a rate that is on the device, as a captured graph has to."""
        raise NotImplementedError


def rates_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the rates of an optimizer are on a GPU, where a captured graph reads them anew on every replay."""
    lr = optimizer.param_groups[0]["lr"]
    return isinstance(lr, Tensor) and lr.is_cuda


def move_rates_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put rates and step counts on a GPU; from then on steps never ask the host for a number."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def move_rates_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Take them back."""
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].cpu()


def _grads(weights: list[Tensor]) -> list[Tensor]:
    return [each.grad for each in weights if each.grad is not None]


def _unhooked(step: Any) -> Any:
    """Return torch's step without the hooks that torch puts around it: they belong around ours, once."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class Adagrad(_RowOptimizer, torch.optim.Adagrad):
    r"""``torch.optim.Adagrad``, exact for the rows of tables too.

    .. math:: s \leftarrow s + g^2, \qquad w \leftarrow w - \eta \, g / (\sqrt s + \epsilon)
    """

    torchs = torch.optim.Adagrad

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.01, eps: float = 1e-10, fused: bool | None = None
    ) -> None:
        # torch's constructor checks the settings, but would make a sum as large as each table
        settings = torch.optim.Adagrad([torch.zeros(1)], lr=lr, eps=eps, fused=fused).defaults
        torch.optim.Optimizer.__init__(self, params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and their sums."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for each in group["params"]:
            step = torch.zeros((), device=each.device if group["fused"] else None)
            total = self._fresh(each) if isinstance(each, RowParameter) else torch.zeros_like(each)
            self.state[each] = {"step": step, "sum": total.fill_(group["initial_accumulator_value"])}

    def _fresh(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    def _move(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        state = self.state[weight]
        state["step"] += 1
        for each in pieces:
            self._update(weight, state["sum"], each, group["lr"], group["eps"])

    def _update(self, weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
        backend_for(weight).adagrad(weight, total, grad, lr, eps)

    def _dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        grads = _grads(weights)
        totals = [self.state[each]["sum"] for each in weights]
        torch._foreach_add_([self.state[each]["step"] for each in weights], 1.0)
        torch._foreach_addcmul_(totals, grads, grads, 1.0)
        roots = torch._foreach_sqrt(totals)
        torch._foreach_add_(roots, group["eps"])
        moves = torch._foreach_div(grads, roots)
        torch._foreach_mul_(moves, group["lr"])
        torch._foreach_sub_(weights, moves)


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one sum a row of a table, of the mean square of its gradient; plain Adagrad for the rest.

    .. math::
        s_r \leftarrow s_r + \tfrac1D \|g_r\|^2, \qquad
        w_r \leftarrow w_r - \eta \, g_r / (\sqrt{s_r} + \epsilon)

    Its state is 1/D of Adagrad's.
    """

    def _fresh(self, weight: Tensor) -> Tensor:
        return weight.new_zeros(len(weight))

    def _update(self, weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
        backend_for(weight).rowwise_adagrad(weight, total, grad, lr, eps)


class Adam(_RowOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``; for tables ``torch.optim.SparseAdam``: the moments of a row fade when it is seen."""

    torchs = torch.optim.Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        torch.optim.Adam.__init__(self, params, lr=lr, betas=betas, eps=eps, fused=fused)

    def _move(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        state = self.state[weight]
        if not state:
            state.update(self._zeros(weight, group))
        state["step"] += 1
        moments = state["exp_avg"], state["exp_avg_sq"]
        done = state["step"] if state["step"].is_cuda else int(state["step"])
        settings = group["lr"], group["betas"], group["eps"], done
        for each in pieces:
            backend_for(weight).adam(weight, *moments, each, *settings)

    def _zeros(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        lr = group["lr"]
        step = torch.zeros((), device=lr.device if isinstance(lr, Tensor) else None)
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        for each in weights:
            if not self.state[each]:
                self.state[each].update(self._zeros(each, group))
        grads = _grads(weights)
        means, squares, steps = (
            [self.state[each][name] for each in weights] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        first, second = group["betas"]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second)
        done = steps[0].double()  # all have taken the same steps
        size = group["lr"] / (1 - first**done)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, ((1 - second**done).sqrt()).float())
        torch._foreach_add_(roots, group["eps"])
        moves = torch._foreach_div(means, roots)
        torch._foreach_mul_(moves, size.float())
        torch._foreach_sub_(weights, moves)


class SGD(_RowOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``; without momentum for tables, where it would move every row at every step."""

    torchs = torch.optim.SGD

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.01, momentum: float = 0.0, fused: bool | None = None
    ) -> None:
        torch.optim.SGD.__init__(self, params, lr=lr, momentum=momentum, fused=fused)

    def _move(self, weight: RowParameter, group: dict[str, Any], pieces: list[RowGrad]) -> None:
        for each in pieces:
            backend_for(weight).sgd(weight, each, group["lr"])

    def _dense(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if group["momentum"]:
            raise InputError("a captured graph takes SGD without momentum only; train with graph=False")
        if weights:
            moves = torch._foreach_mul(_grads(weights), group["lr"])
            torch._foreach_sub_(weights, moves)
