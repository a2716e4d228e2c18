"""The backend for NVIDIA GPUs: deterministic Triton kernels without host synchronization.

The gradient by rows is a sort and a sum. Keys ``start_f + id`` are sorted as 32-bit numbers; since every field has
exactly B of them, the sorted positions f·B to (f+1)·B belong to field f. Each chunk of ``CHUNK`` positions sums
its runs of equal keys (:func:`_sum_runs`); a run over several chunks is completed by the chunk in which it starts
(:func:`_finalize_runs`), which also computes the gradient of the gate. No atomic addition is used, so the order of
every sum is fixed.

The functions are those of ``_torch``, but an id outside its field gives nan. The lengths depend only on the shape of
the batch (a position that starts no run has row -1 and zeros), so that a CUDA graph can capture a whole training step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpfs.embeddings._torch import Betas, Gradients
from lpfs.embeddings.row_grad import RowGrad

CHUNK = 64  # sorted positions that one program sums
BLOCK = 128  # lookups, or rows, of one program
HEADS = 32  # chunks read together while a long run is completed


@triton.jit
def _gather(weight, starts, ids, gate, out, total, fields, stride_b, stride_f, D: tl.constexpr, W: tl.constexpr,
            GATED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    in_range = position < total
    row, field = position // fields, position % fields
    id = tl.load(ids + row * stride_b + field * stride_f, in_range, 0).to(tl.int64)
    first = tl.load(starts + field, in_range, 0)
    size = tl.load(starts + field + 1, in_range, 1) - first
    valid = (id >= 0) & (id < size)
    column = tl.arange(0, W)
    valid_2d = in_range[:, None] & (column < D)[None, :]
    values = tl.load(weight + (first + id)[:, None] * D + column[None, :], valid_2d & valid[:, None], float("nan"))
    if GATED:
        values = values * tl.load(gate + field, in_range, 0.0)[:, None]
    tl.store(out + position[:, None] * D + column[None, :], values, valid_2d)


@triton.jit
def _make_keys(ids, starts, keys, batch, stride_b, stride_f, SIZE: tl.constexpr):
    field = tl.program_id(1)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    in_range = row < batch
    id = tl.load(ids + row.to(tl.int64) * stride_b + field * stride_f, in_range, 0).to(tl.int64)
    first = tl.load(starts + field)
    size = tl.load(starts + field + 1) - first
    id = tl.minimum(tl.maximum(id, 0), size - 1)  # an id out of range gives nan, and so does its gradient
    tl.store(keys + field.to(tl.int64) * batch + row, (first + id).to(keys.dtype.element_ty), in_range)


@triton.jit
def _combine_runs(end_a, sum_a, end_b, sum_b):
    return end_a | end_b, tl.where(end_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _sum_runs(keys, order, grad, rows, values, heads, batch, fields, chunks, D: tl.constexpr, W: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    chunk, field = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = chunk * SIZE + tl.arange(0, SIZE)
    in_range = local < batch
    position = field * batch + local
    key = tl.load(keys + position, in_range, -1)
    starts_run = in_range & (key != tl.load(keys + position - 1, in_range & (local > 0), -2))
    ends_run = key != tl.load(keys + position + 1, local + 1 < batch, -2)
    row = tl.load(order + position, in_range, 0) - field * batch
    column = tl.arange(0, W)
    valid_2d = in_range[:, None] & (column < D)[None, :]
    grads = tl.load(grad + (row * fields + field)[:, None] * D + column[None, :], valid_2d, 0.0)
    flags = ends_run.to(tl.int32)[:, None] + tl.zeros((SIZE, W), tl.int32)
    # at each position, the sum from there to the end of its run
    _, sums = tl.associative_scan((flags, grads), 0, _combine_runs, reverse=True)
    tl.store(rows + position, tl.where(starts_run, key, -1), in_range)
    tl.store(values + position[:, None] * D + column[None, :], tl.where(starts_run[:, None], sums, 0.0), valid_2d)
    top = (tl.arange(0, SIZE) == 0)[:, None] & (column < D)[None, :]
    tl.store(heads + (field * chunks + chunk) * D + column[None, :] + tl.zeros((SIZE, W), tl.int64), sums, top)


@triton.jit
def _finalize_runs(weight, keys, rows, values, heads, gate, parts, batch, chunks, D: tl.constexpr, W: tl.constexpr,
            GATED: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    chunk, field = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = chunk * SIZE + tl.arange(0, SIZE)
    in_range = local < batch
    position = field * batch + local
    row = tl.load(rows + position, in_range, -1).to(tl.int64)
    starts_run = row >= 0
    last = tl.max(tl.where(starts_run, local, -1))  # position at which the last run of this chunk starts
    column = tl.arange(0, W)
    columns_valid = (column < D)[None, :]
    valid_2d = starts_run[:, None] & columns_valid
    extra = tl.zeros((W,), tl.float32)
    after = (chunk + 1) * SIZE
    continues = (last >= 0) & (after < batch)
    if continues:
        key = tl.load(keys + field * batch + after - 1)
        next_chunk = chunk + 1
        while continues:
            chunk_ids = next_chunk + tl.arange(0, MANY)
            valid_chunk = chunk_ids < chunks
            first = tl.load(keys + field * batch + chunk_ids * SIZE, valid_chunk, -2)
            same = valid_chunk & (first == key)
            head = heads + (field * chunks + chunk_ids)[:, None] * D + column[None, :]
            extra += tl.sum(tl.load(head, same[:, None] & columns_valid, 0.0), 0)
            next_chunk += MANY
            continues = tl.min(same.to(tl.int32)) == 1
    at = values + position[:, None] * D + column[None, :]
    sums = tl.load(at, valid_2d, 0.0) + tl.where((local == last)[:, None], extra[None, :], 0.0)
    if GATED:
        weights = tl.load(weight + row[:, None] * D + column[None, :], valid_2d, 0.0)
        tl.store(parts + field * chunks + chunk, tl.sum(tl.sum(weights * sums, 1), 0))
        sums = sums * tl.load(gate + field)
    tl.store(at, sums, valid_2d)


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    batch, fields = ids.shape
    width = weight.shape[1]
    out = weight.new_empty(batch, fields, width)
    if out.numel():
        total = batch * fields
        _gather[(triton.cdiv(total, BLOCK),)](
            weight, starts, ids, weight if gate is None else gate, out, total, fields, *ids.stride(),
            D=width, W=triton.next_power_of_2(width), GATED=gate is not None, SIZE=BLOCK,
        )  # fmt: skip
    return out


def reduce(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor) -> Gradients:
    batch, fields = ids.shape
    width, total, chunks = weight.shape[1], batch * fields, triton.cdiv(batch, CHUNK)
    grad = grad.contiguous()
    keys = weight.new_empty(total, dtype=torch.int32 if len(weight) < 2**31 else torch.int64)
    rows, values = torch.empty_like(keys), weight.new_empty(total, width)
    parts = None if gate is None else weight.new_empty(fields, chunks)
    if total:
        heads = weight.new_empty(fields * chunks, width)
        sizes: dict[str, Any] = {"D": width, "W": triton.next_power_of_2(width)}
        _make_keys[(triton.cdiv(batch, 256), fields)](ids, starts, keys, batch, ids.stride(0), ids.stride(1), SIZE=256)
        keys, order = torch.sort(keys, stable=True)
        _sum_runs[(chunks, fields)](keys, order, grad, rows, values, heads, batch, fields, chunks, SIZE=CHUNK, **sizes)
        _finalize_runs[(chunks, fields)](
            weight, keys, rows, values, heads, weight if gate is None else gate, heads if parts is None else parts,
            batch, chunks, GATED=gate is not None, SIZE=CHUNK, MANY=HEADS, **sizes,
        )  # fmt: skip
    return RowGrad(rows, values), None if parts is None else parts.sum(1)


# Row updates: lr is a number, or a scalar tensor on the device, which a captured graph reads again in every replay.


@triton.jit
def _load_rows(rows, values, total, D: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr):
    """Return rows and gradients of this program, the offsets of their elements in the weight, and which are valid."""
    position = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + position, position < total, -1).to(tl.int64)
    column = tl.arange(0, W)
    valid = (row >= 0)[:, None] & (column < D)[None, :]
    grad = tl.load(values + position[:, None] * D + column[None, :], valid, 0.0)
    return row, grad, row[:, None] * D + column[None, :], valid


@triton.jit
def _number(value, IS_TENSOR: tl.constexpr):
    if IS_TENSOR:
        return tl.load(value)
    else:
        return value


@triton.jit
def _adagrad(weight, sums, rows, values, total, lr, eps, D: tl.constexpr, W: tl.constexpr, ROWWISE: tl.constexpr,
             TENSOR: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    row, grad, at, valid = _load_rows(rows, values, total, D, W, SIZE)
    if ROWWISE:
        new = tl.load(sums + row, row >= 0, 0.0) + tl.sum(grad * grad, 1) / D
        tl.store(sums + row, new, row >= 0)
        root = tl.sqrt_rn(new)[:, None]
    else:
        new_all = tl.load(sums + at, valid, 1.0) + grad * grad
        tl.store(sums + at, new_all, valid)
        root = tl.sqrt_rn(new_all)
    moved = tl.load(weight + at, valid, 0.0) - _number(lr, TENSOR) * tl.div_rn(grad, root + eps)
    tl.store(weight + at, moved, valid)


@triton.jit
def _adam(weight, means, squares, rows, values, total, size, rate1, rate2, eps, D: tl.constexpr, W: tl.constexpr,
          TENSOR: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    _, grad, at, valid = _load_rows(rows, values, total, D, W, SIZE)
    mean = tl.load(means + at, valid, 0.0)
    mean = mean + rate1 * (grad - mean)
    square = tl.load(squares + at, valid, 0.0)
    square = square + rate2 * (grad * grad - square)
    tl.store(means + at, mean, valid)
    tl.store(squares + at, square, valid)
    moved = tl.load(weight + at, valid, 0.0) - _number(size, TENSOR) * tl.div_rn(mean, tl.sqrt_rn(square) + eps)
    tl.store(weight + at, moved, valid)


@triton.jit
def _sgd(weight, rows, values, total, lr, D: tl.constexpr, W: tl.constexpr, TENSOR: tl.constexpr,
         SIZE: tl.constexpr):  # fmt: skip
    _, grad, at, valid = _load_rows(rows, values, total, D, W, SIZE)
    tl.store(weight + at, tl.load(weight + at, valid, 0.0) - _number(lr, TENSOR) * grad, valid)


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float | Tensor, eps: float) -> None:
    _launch(_adagrad, weight, (total,), grad, lr, eps, ROWWISE=False)


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float | Tensor, eps: float) -> None:
    _launch(_adagrad, weight, (total,), grad, lr, eps, ROWWISE=True)


def adam(weight: Tensor, mean: Tensor, square: Tensor, grad: RowGrad, lr: float | Tensor, betas: Betas, eps: float,
         step: int | Tensor) -> None:  # fmt: skip
    done = step.double() if isinstance(step, Tensor) else step
    size = lr * (1 - betas[1] ** done) ** 0.5 / (1 - betas[0] ** done)
    _launch(_adam, weight, (mean, square), grad, size, 1 - betas[0], 1 - betas[1], eps)


def sgd(weight: Tensor, grad: RowGrad, lr: float | Tensor) -> None:
    _launch(_sgd, weight, (), grad, lr)


def _launch(
    kernel: Any, weight: Tensor, state: tuple[Tensor, ...], grad: RowGrad, lr: Any, *rest: float, **options: Any
) -> None:
    total, width = grad.values.shape
    if total:
        kernel[(triton.cdiv(total, BLOCK),)](
            weight, *state, grad.rows, grad.values, total, lr, *rest,
            D=width, W=triton.next_power_of_2(width), TENSOR=isinstance(lr, Tensor), SIZE=BLOCK, **options,
        )  # fmt: skip
