"""The backend for float32 tables on a CPU: numba loops that touch every row once, on torch's number of threads.

The functions are those of ``_torch``; the tensors they return own their memory.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba.np.ufunc.parallel import get_thread_count, threading_layer
from torch import Tensor

from lpfs.embeddings import _numba_loops
from lpfs.embeddings._torch import Betas, Gradients, adam_step_size, check_ids
from lpfs.embeddings.row_grad import RowGrad

NO_GATE = np.empty(0, np.float32)
MIN_PARALLEL_SIZE = 1 << 15  # number of elements from which several threads are faster
MAX_THREADS = get_thread_count()  # size of numba's thread pool


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    _check_starts(starts, ids)
    out = torch.empty(*ids.shape, weight.shape[1])
    threads = thread_count(out.numel())
    bad = np.zeros(threads, np.int64)  # number of invalid ids, by thread
    arrays = _writable_array(weight), _array(starts), _array(ids), _gate(gate), out.numpy()
    _run(threads, _numba_loops.gather, *arrays, bad)
    if bad.any():
        check_ids(starts, ids)
    return out


def reduce(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor) -> Gradients:
    _check_starts(starts, ids)
    first_rows, id_array = _array(starts), _array(ids)
    _buffers.fit(*id_array.shape)
    positions, unique_ids, counts = _buffers.positions, _buffers.unique_ids, _buffers.counts
    threads = min(thread_count(grad.numel()), max(1, len(counts)))
    _run(threads, _numba_loops.group_equal_ids, first_rows, id_array, _buffers.slots, positions, unique_ids, counts)
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    rows = torch.empty(int(first[-1]), dtype=torch.int64)
    values = torch.empty(len(rows), weight.shape[1])
    gate_grad = None if gate is None else torch.empty_like(gate)
    inputs = (_writable_array(weight), first_rows, _gate(gate), _array(grad), positions, unique_ids, first)
    _run(threads, _numba_loops.accumulate, *inputs, rows.numpy(), values.numpy(), _gate(gate_grad))
    return RowGrad(rows, values), gate_grad


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    _update(_numba_loops.adagrad, (weight, total), grad, (lr, eps))


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float, eps: float) -> None:
    _update(_numba_loops.rowwise_adagrad, (weight, total), grad, (lr, eps))


def adam(
    weight: Tensor, mean: Tensor, square: Tensor, grad: RowGrad, lr: float, betas: Betas, eps: float, step: int
) -> None:
    scalars = (adam_step_size(lr, betas, step), 1 - betas[0], 1 - betas[1], eps)
    _update(_numba_loops.adam, (weight, mean, square), grad, scalars)


def sgd(weight: Tensor, grad: RowGrad, lr: float) -> None:
    _update(_numba_loops.sgd, (weight,), grad, (lr,))


def _update(loop: Callable[..., None], tensors: tuple[Tensor, ...], grad: RowGrad, scalars: tuple[float, ...]) -> None:
    inputs = (grad.rows.numpy(), grad.values.numpy(), *(np.float32(scalar) for scalar in scalars))
    _run(thread_count(grad.values.numel()), loop, *(_writable_array(tensor) for tensor in tensors), *inputs)


def _check_starts(starts: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless there is a first row for each field and one after the last: loops check no bounds."""
    if len(starts) != ids.shape[1] + 1:
        raise ValueError(f"{ids.shape[1]} fields need {ids.shape[1] + 1} starts, found {len(starts)}")


def _writable_array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _gate(gate: Tensor | None) -> Any:
    return NO_GATE if gate is None else _array(gate)


class _ThreadBuffers(threading.local):
    """Buffers for the search for equal ids, one set per Python thread, reused in every step."""

    shape = (-1, -1)

    def fit(self, rows: int, fields: int) -> None:
        """Allocate buffers for a batch; at least half of the slots of a field stay empty."""
        if self.shape == (rows, fields):
            return
        self.shape = (rows, fields)
        self.slots = np.empty((fields, 1 << max(3, (2 * rows - 1).bit_length())), np.int32)
        self.positions = np.empty((fields, rows), np.int32)
        self.unique_ids = np.empty((fields, rows), np.int64)
        self.counts = np.empty(fields, np.int64)


_buffers = _ThreadBuffers()
_threads_safe: list[bool] = []  # empty until it is known
os.register_at_fork(after_in_child=lambda: _threads_safe.__setitem__(slice(None), [False]))


def check_works() -> None:
    """Compile and run the smallest loop; a broken numba raises here."""
    sgd(torch.zeros(1, 1), RowGrad(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1)), 0.0)


def thread_count(size: int) -> int:
    """Return the number of threads for ``size`` elements: torch's, or 1 if few elements or not thread-safe.

    Numba's own thread pool ("workqueue") aborts the process when two Python threads use it at the same time, and
    GNU OpenMP aborts a process that was forked after its first use.
    """
    threads = min(torch.get_num_threads(), MAX_THREADS)
    if threads < 2 or size < MIN_PARALLEL_SIZE:
        return 1
    if not _threads_safe:
        scalar = np.zeros((1, 1), np.float32)
        _numba_loops.sgd_parallel(1, scalar, np.zeros(1, np.int64), scalar, np.float32(0))
        _threads_safe.append(threading_layer() in ("omp", "tbb"))
    return threads if _threads_safe[0] else 1


def _run(threads: int, loop: Callable[..., None], *arguments: Any) -> None:
    if threads == 1:
        loop(0, 1, *arguments)
        return
    previous = numba.get_num_threads()
    numba.set_num_threads(threads)
    getattr(_numba_loops, f"{loop.__name__}_parallel")(threads, *arguments)
    numba.set_num_threads(previous)
