"""Crosses compiled for a CPU with numba: every row is read once, every product is written once.

Rows are processed in blocks of a fixed size, so that the gradient of a gate, a sum over blocks, does not depend on
the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs._imports import Array, compile_loop
from lpfs.models._kernels import CrossPlan

BLOCK = 64  # rows per block


def forward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write g_p · e_i or g_p · e_i ⊙ e_j of embeddings (B, N, D) into their slots of ``out`` (B, ≥ slots·D)."""
    kernel = _compiled()[0]
    arguments = (tokens.flatten(1).numpy(), plan.arrays, _gate_array(plan, gate), out.numpy())
    _run_in_threads(len(tokens), lambda block, start, stop: kernel(*arguments, start, stop))


def backward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of embeddings and gates (see ``torch_crosses.backward`` for the formula)."""
    kernel = _compiled()[1]
    rows, token_grad = tokens.flatten(1).numpy(), torch.zeros_like(tokens)
    blocks = -(-len(rows) // BLOCK)
    sums = np.zeros((blocks, 0 if gate is None else len(plan.parts) * plan.dim), np.float32)
    arguments = (rows, plan.arrays, _gate_array(plan, gate), grad.numpy(), token_grad.flatten(1).numpy())
    _run_in_threads(len(rows), lambda block, start, stop: kernel(*arguments, sums[block], start, stop))
    if gate is None:
        return token_grad, None
    total = sums.sum(0, dtype=np.float64).reshape(-1, plan.dim).sum(1)
    return token_grad, torch.from_numpy(total.astype(np.float32))


def _gate_array(plan: CrossPlan, gate: Tensor | None) -> Any:
    return np.ones(len(plan.parts), np.float32) if gate is None else gate.detach().numpy()


def _run_in_threads(rows: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(block, start, stop)`` for all blocks of rows, on as many threads as torch uses."""
    blocks = -(-rows // BLOCK)
    threads = min(torch.get_num_threads(), blocks)

    def run_blocks(first: int) -> None:
        for block in range(first, blocks, threads):
            work(block, block * BLOCK, min(rows, (block + 1) * BLOCK))

    futures = [_pool(os.getpid()).submit(run_blocks, first) for first in range(1, threads)]
    if blocks:
        run_blocks(0)
    for future in futures:
        future.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; a forked process gets a new one."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="lpfs-crosses")


@cache
def _compiled() -> tuple[Any, Any]:
    return compile_loop(_forward), compile_loop(_backward)


def _forward(rows: Array, plan: Any, gate: Array, out: Array, start: int, stop: int) -> None:
    first, second, slot, single, dim = plan
    for row in range(start, stop):
        values, target = rows[row], out[row]
        for part in range(len(first)):
            i, j, k, g = first[part] * dim, second[part] * dim, slot[part] * dim, gate[part]
            if single[part]:
                for d in range(dim):
                    target[k + d] = values[j + d] * g
            else:
                for d in range(dim):
                    target[k + d] = values[i + d] * values[j + d] * g


def _backward(
    rows: Array, plan: Any, gate: Array, grad: Array, token_grad: Array, sums: Array, start: int, stop: int
) -> None:
    first, second, slot, single, dim = plan
    gated = len(sums) > 0
    for row in range(start, stop):
        values, part_grad, target = rows[row], grad[row], token_grad[row]
        for part in range(len(first)):
            i, j, k, g = first[part] * dim, second[part] * dim, slot[part] * dim, gate[part]
            offset = np.uint64(part) * dim
            if single[part]:
                for d in range(dim):
                    target[j + d] += part_grad[k + d] * g
                if gated:
                    for d in range(dim):
                        sums[offset + d] += part_grad[k + d] * values[j + d]
            else:
                for d in range(dim):
                    slope = part_grad[k + d] * g
                    target[i + d] += slope * values[j + d]
                    target[j + d] += slope * values[i + d]
                if gated:
                    for d in range(dim):
                        sums[offset + d] += part_grad[k + d] * values[i + d] * values[j + d]
