"""The crosses compiled for a CPU: every row is read once, every product written once.

Rows are worked on in blocks of a fixed size, so that the gradient of a gate, a sum over blocks, does not depend on
how many threads share them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs.models._kernels import CrossPlan

BLOCK = 64  # rows


@cache
def available() -> bool:
    """Whether numba is there and can be imported."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


def fill(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write g_p · e_i or g_p · e_i ⊙ e_j of embeddings (B, N, D) into their places of ``out`` (B, ≥ slots·D)."""
    kernel, numbers = _compiled()[0], plan.arrays
    rows, into = tokens.flatten(1).numpy(), out.numpy()
    factors = _factors(plan, gate)
    _run_in_threads(len(rows), lambda block, start, stop: kernel(rows, *numbers, factors, into, start, stop))


def reduce(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of embeddings and gates (see the torch kernel for the formula)."""
    kernel, numbers = _compiled()[1], plan.arrays
    rows, given = tokens.flatten(1).numpy(), grad.numpy()
    own = torch.zeros_like(tokens)
    into = own.flatten(1).numpy()
    blocks = -(-len(rows) // BLOCK)
    sums = np.zeros((blocks, 0 if gate is None else len(plan.parts) * plan.dim), np.float32)
    factors = _factors(plan, gate)
    _run_in_threads(
        len(rows),
        lambda block, start, stop: kernel(rows, *numbers, factors, given, into, sums[block], start, stop),
    )
    if gate is None:
        return own, None
    total = sums.sum(0, dtype=np.float64).reshape(-1, plan.dim).sum(1)
    return own, torch.from_numpy(total.astype(np.float32))


def _factors(plan: CrossPlan, gate: Tensor | None) -> Any:
    return np.ones(len(plan.parts), np.float32) if gate is None else gate.detach().numpy()


def _run_in_threads(rows: int, work: Callable[[int, int, int], None]) -> None:
    """Work through the rows in blocks, on as many threads as torch uses."""
    blocks = -(-rows // BLOCK)
    threads = min(torch.get_num_threads(), blocks)

    def some(first: int) -> None:
        for block in range(first, blocks, threads):
            work(block, block * BLOCK, min(rows, (block + 1) * BLOCK))

    others = [_pool(os.getpid()).submit(some, number) for number in range(1, threads)]
    if blocks:
        some(0)
    for each in others:
        each.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process; after a fork, a process has its own."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="lpfs-crosses")


@cache
def _compiled() -> tuple[Any, Any]:
    njit = importlib.import_module("numba").njit
    try:
        both = [njit(each, nogil=True, error_model="numpy", cache=True) for each in (_fill, _reduce)]
    except RuntimeError:  # no folder to keep what was compiled: it is compiled again in every process
        both = [njit(each, nogil=True, error_model="numpy") for each in (_fill, _reduce)]
    return both[0], both[1]


def _fill(
    rows: Any,
    first: Any,
    second: Any,
    place: Any,
    alone: Any,
    dim: Any,
    gate: Any,
    out: Any,
    start: int,
    stop: int,
) -> None:
    for row in range(start, stop):
        values, target = rows[row], out[row]
        for part in range(len(first)):
            i, j, k, g = first[part] * dim, second[part] * dim, place[part] * dim, gate[part]
            if alone[part]:
                for d in range(dim):
                    target[k + d] = values[j + d] * g
            else:
                for d in range(dim):
                    target[k + d] = values[i + d] * values[j + d] * g


def _reduce(
    rows: Any,
    first: Any,
    second: Any,
    place: Any,
    alone: Any,
    dim: Any,
    gate: Any,
    grad: Any,
    own: Any,
    sums: Any,
    start: int,
    stop: int,
) -> None:
    gated = len(sums) > 0
    for row in range(start, stop):
        values, given, target = rows[row], grad[row], own[row]
        for part in range(len(first)):
            i, j, k, g = first[part] * dim, second[part] * dim, place[part] * dim, gate[part]
            at = np.uint64(part) * dim
            if alone[part]:
                for d in range(dim):
                    target[j + d] += given[k + d] * g
                if gated:
                    for d in range(dim):
                        sums[at + d] += given[k + d] * values[j + d]
            else:
                for d in range(dim):
                    slope = given[k + d] * g
                    target[i + d] += slope * values[j + d]
                    target[j + d] += slope * values[i + d]
                if gated:
                    for d in range(dim):
                        sums[at + d] += given[k + d] * values[i + d] * values[j + d]
