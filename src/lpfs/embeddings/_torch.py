"""The engine that runs everywhere: torch operations alone.

Which engine runs: the fastest that the machine has, or the one that is asked for.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from lpfs.embeddings.row_grad import RowGrad
from lpfs.errors import InputError, MissingPackageError

name = "torch"


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    """Return g_f · W[start_f + id] as (B, F, D), for ids (B, F) and first rows ``starts`` (F + 1,)."""
    check_ids(starts, ids)
    out = weight.detach().index_select(0, (ids + starts[:-1]).reshape(-1)).view(*ids.shape, weight.shape[1])
    return out if gate is None else out * gate[:, None]


def reduce(
    weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor
) -> tuple[RowGrad, Tensor | None]:
    r"""Return the gradient by rows and that of the gates, from the gradient (B, F, D) of the gated embeddings.

    With a_r the sum of ``grad`` over all places that read row r of field f,

    .. math:: \partial L/\partial W_r = g_f a_r, \qquad \partial L/\partial g_f = \sum_r \langle W_r, a_r\rangle

    The second does not vanish at g = 0, so that a dead gate can come back.
    """
    rows, where = torch.unique((ids + starts[:-1]).reshape(-1), return_inverse=True)
    summed = grad.new_zeros(len(rows), weight.shape[1])
    summed.index_add_(0, where, grad.reshape(-1, weight.shape[1]))
    if gate is None:
        return RowGrad(rows, summed), None
    field = torch.searchsorted(starts, rows, right=True) - 1
    products = (weight.detach().index_select(0, rows) * summed).sum(1)
    gate_grad = torch.zeros_like(gate).index_add_(0, field, products)
    return RowGrad(rows, summed * gate.index_select(0, field)[:, None]), gate_grad


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """Take the Adagrad step of the rows: s += g², w -= lr · g / (√s + eps)."""
    rows, values = grad.rows, grad.values
    sums = total.index_select(0, rows).addcmul_(values, values)
    total.index_copy_(0, rows, sums)
    weight.index_add_(0, rows, values / (sums.sqrt_() + eps), alpha=-float(lr))


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """Take the Adagrad step with one number a row: s += mean g², w -= lr · g / (√s + eps); ``total`` is (R,)."""
    rows, values = grad.rows, grad.values
    sums = total.index_select(0, rows).add_(values.square().mean(1))
    total.index_copy_(0, rows, sums)
    weight.index_add_(0, rows, values / (sums.sqrt_() + eps)[:, None], alpha=-float(lr))


def adam(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    grad: RowGrad,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Take the lazy Adam step, that of ``torch.optim.SparseAdam``: moments of other rows do not fade."""
    rows, values = grad.rows, grad.values
    first = mean.index_select(0, rows)
    first.add_((values - first).mul_(1 - betas[0]))
    second = square.index_select(0, rows)
    second.add_(values.square().sub_(second).mul_(1 - betas[1]))
    mean.index_copy_(0, rows, first)
    square.index_copy_(0, rows, second)
    weight.index_add_(0, rows, first.div_(second.sqrt_().add_(eps)), alpha=-adam_step_size(lr, betas, step))


def adam_step_size(lr: float, betas: tuple[float, float], step: int) -> float:
    """Return lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ)."""
    return float(lr) * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def sgd(weight: Tensor, grad: RowGrad, lr: float) -> None:
    """Take the plain gradient step of the rows."""
    weight.index_add_(0, grad.rows, grad.values, alpha=-float(lr))


def check_ids(starts: Tensor, ids: Tensor) -> None:
    """Refuse an id outside its field: it would read, and train, another field's rows."""
    if not ids.numel():
        return
    sizes = starts[1:] - starts[:-1]
    if not bool(((ids >= 0) & (ids < sizes)).all()):
        raise_id_error(starts, ids)


def raise_id_error(starts: Tensor, ids: Tensor) -> None:
    """Say which id is out of range."""
    sizes = starts[1:] - starts[:-1]
    row, column = (~((ids >= 0) & (ids < sizes))).nonzero()[0].tolist()
    raise InputError(
        f"id {int(ids[row, column])} in row {row}, column {column} is outside its field, which has "
        f"{int(sizes[column])} ids; was the batch made with another schema than the model?"
    )


# name -> the module, which imports a package of the same name. An engine has the functions of ``plain``, takes
# what they take and gives the same numbers; ``ready()``, where there is one, is called once, before the first use.
BACKENDS = {"torch": "_torch", "numba": "_numba", "triton": "_triton"}

_forced: list[ModuleType] = []


class BackendWarning(UserWarning):
    """A fast engine is installed but does not work; the plain one is used."""


def backend_for(weight: Tensor) -> ModuleType:
    """Return the engine for a weight."""
    if weight.dtype != torch.float32:
        return sys.modules[__name__]
    if _forced:
        return _forced[-1]
    if weight.is_cpu:
        return _fastest("numba")
    return _fastest("triton") if weight.is_cuda else sys.modules[__name__]


def supports_cuda_graph(device: torch.device) -> bool:
    """Return whether tables on this GPU do without the host, so that a step with them can be captured."""
    return backend_for(torch.empty(0, device=device)) is not sys.modules[__name__]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within this block float32 tables use the engine of this name: ``torch``, ``numba`` or ``triton``."""
    if name not in BACKENDS:
        raise InputError(f"there is no engine {name!r}; known are {', '.join(BACKENDS)}")
    try:
        engine = _loaded(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"the engine {name!r} needs a package: pip install {name} ({error})") from error
    _forced.append(engine)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _loaded(name: str) -> ModuleType:
    engine = import_module(f"lpfs.embeddings.{BACKENDS[name]}")
    if hasattr(engine, "check_works"):
        engine.check_works()
    return engine


@cache
def _fastest(name: str) -> ModuleType:
    try:
        return _loaded(name)
    except ModuleNotFoundError:
        return sys.modules[__name__]
    except Exception as error:  # a broken installation fails in many ways, and none of them may stop training
        warnings.warn(
            f"{name} is installed but does not work here, so tables use plain torch, which is slower: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            BackendWarning,
            stacklevel=2,
        )
        return sys.modules[__name__]
