"""Optimizers that know rows: torch's own for every other parameter, row updates for tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lpfs.tables.engines.choice import engine_for
from lpfs.tables.rows import RowGrad, RowParameter, collected, row_parameters


class _Rows(torch.optim.Optimizer):
    """What the optimizers here share: take torch's step, then that of the rows, then forget their gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, those by rows too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for each in row_parameters(group["params"]):
                each.row_grads.clear()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step."""
        loss = super().step(closure)
        with torch.no_grad():
            for weight, group, grad in self._touched():
                self._move(weight, group, grad)
                weight.row_grads.clear()
        return loss

    def _touched(self) -> Iterator[tuple[RowParameter, dict[str, Any], RowGrad]]:
        for group in self.param_groups:
            for weight in row_parameters(group["params"]):
                grad = collected(weight)
                if grad is not None:
                    yield weight, group, grad

    def _move(self, weight: RowParameter, group: dict[str, Any], grad: RowGrad) -> None:
        raise NotImplementedError


class Adagrad(_Rows, torch.optim.Adagrad):
    """``torch.optim.Adagrad``, exact for the rows of tables too: a row without gradient does not move."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, eps: float = 1e-10) -> None:
        torch.optim.Adagrad.__init__(self, params, lr=lr, eps=eps)

    def _move(self, weight: RowParameter, group: dict[str, Any], grad: RowGrad) -> None:
        total: Tensor = self.state[weight]["sum"]
        engine_for(weight).adagrad(weight, total, grad, group["lr"], group["eps"])
