"""The engine for float32 tables on a CPU: numba loops that touch every row once, on torch's number of threads."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numba.np.ufunc.parallel import get_thread_count, threading_layer
from torch import Tensor

from lpfs.embeddings import _numba_loops
from lpfs.embeddings._torch import adam_step_size, raise_id_error
from lpfs.embeddings.row_grad import RowGrad

name = "numba"

NONE = np.empty(0, np.float32)
WORTH_A_THREAD = 1 << 15  # numbers
POOL = get_thread_count()

Loop: TypeAlias = Callable[..., None]


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    """See ``plain.gather``."""
    out = torch.empty(*ids.shape, weight.shape[1])
    number = thread_count(out.numel())
    bad = np.zeros(number, np.int64)
    _run(
        number,
        _numba_loops.gather,
        _writable_array(weight),
        _array(starts),
        _array(ids),
        _gate(gate),
        out.numpy(),
        bad,
    )
    if bad.any():
        raise_id_error(starts, ids)
    return out


def reduce(
    weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor
) -> tuple[RowGrad, Tensor | None]:
    """See ``plain.reduce``.

    What is handed out is memory of its own and lives as long as somebody holds it; only the search for equal
    ids works in memory that the next call uses again.
    """
    first_rows, places = _array(starts), _array(ids)
    _scratch.fit(*places.shape)
    where, found, counts = _scratch.where, _scratch.found, _scratch.counts
    number = min(thread_count(grad.numel()), max(1, len(counts)))
    _run(number, _numba_loops.group_equal_ids, first_rows, places, _scratch.slots, where, found, counts)
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    rows = torch.empty(int(first[-1]), dtype=torch.int64)
    values = torch.empty(len(rows), weight.shape[1])
    gate_grad = None if gate is None else torch.empty_like(gate)
    given = (_writable_array(weight), first_rows, _gate(gate), _array(grad), where, found, first)
    _run(number, _numba_loops.accumulate, *given, rows.numpy(), values.numpy(), _gate(gate_grad))
    return RowGrad(rows, values), gate_grad


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """See ``plain.adagrad``."""
    _move(_numba_loops.adagrad, (weight, total), grad, (lr, eps))


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    """See ``plain.rowwise_adagrad``."""
    _move(_numba_loops.rowwise_adagrad, (weight, total), grad, (lr, eps))


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
    """See ``plain.adam``."""
    numbers = (adam_step_size(lr, betas, step), 1 - betas[0], 1 - betas[1], eps)
    _move(_numba_loops.adam, (weight, mean, square), grad, numbers)


def sgd(weight: Tensor, grad: RowGrad, lr: float) -> None:
    """See ``plain.sgd``."""
    _move(_numba_loops.sgd, (weight,), grad, (lr,))


def _move(loop: Loop, moved: tuple[Tensor, ...], grad: RowGrad, numbers: tuple[float, ...]) -> None:
    given = (grad.rows.numpy(), grad.values.numpy(), *(np.float32(each) for each in numbers))
    _run(thread_count(grad.values.numel()), loop, *(_writable_array(each) for each in moved), *given)


# ---------------------------------------------------------------------------------------------- arrays


def _writable_array(tensor: Tensor) -> Any:
    """Return the memory of a tensor itself, to be written to."""
    return tensor.detach().numpy()


def _array(tensor: Tensor) -> Any:
    """Return the numbers of a tensor one after another, to be read."""
    return tensor.detach().contiguous().numpy()


def _gate(gate: Tensor | None) -> Any:
    return NONE if gate is None else _array(gate)


class _ThreadBuffers(threading.local):
    """Memory for the search for equal ids: used again from step to step, never handed out; one a thread."""

    shape = (-1, -1)

    def fit(self, rows: int, fields: int) -> None:
        """Make room for a batch; at least half of the slots of a field stay empty."""
        if self.shape == (rows, fields):
            return
        self.shape = (rows, fields)
        self.slots = np.empty((fields, 1 << max(3, (2 * rows - 1).bit_length())), np.int32)
        self.where = np.empty((fields, rows), np.int32)
        self.found = np.empty((fields, rows), np.int64)
        self.counts = np.empty(fields, np.int64)


_scratch = _ThreadBuffers()

# --------------------------------------------------------------------------------------------- threads

_safe: list[bool] = []
os.register_at_fork(after_in_child=lambda: _safe.__setitem__(slice(None), [False]))


def check_works() -> None:
    """Compile and run the smallest loop, so that a numba that cannot is found out."""
    _move(
        _numba_loops.sgd,
        (torch.zeros(1, 1),),
        RowGrad(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1)),
        (0.0,),
    )


def thread_count(numbers: int) -> int:
    """Return how many threads to use for so many numbers: torch's, or 1 for a few or where more are not safe.

    Numba's own pool of threads ("workqueue") ends the process when two Python threads use it at once, and GNU
    OpenMP ends one that was forked after its first use.
    """
    wanted = min(torch.get_num_threads(), POOL)
    if wanted < 2 or numbers < WORTH_A_THREAD:
        return 1
    if not _safe:
        one = np.zeros((1, 1), np.float32)
        _numba_loops.sgd_spread(1, one, np.zeros(1, np.int64), one, np.float32(0))
        _safe.append(threading_layer() in ("omp", "tbb"))
    return wanted if _safe[0] else 1


def _run(number: int, loop: Loop, *arguments: Any) -> None:
    if number == 1:
        loop(0, 1, *arguments)
        return
    before = numba.get_num_threads()
    numba.set_num_threads(number)
    _numba_loops.PARALLEL[loop](number, *arguments)
    numba.set_num_threads(before)
