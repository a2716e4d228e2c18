"""The backend for NVIDIA GPUs: deterministic Triton kernels without host synchronization.

The gradient by rows is a sort and a sum. Keys ``start_f + id`` are sorted as 32-bit numbers; since every field has
exactly B of them, the sorted positions f·B to (f+1)·B belong to field f. For a small batch one program sorts a field
(:func:`_sort_field`). Each chunk of ``CHUNK`` positions sums its runs of equal keys (:func:`_sum_runs`); a run over
several chunks is completed by the chunk in which it starts (:func:`_finalize_runs`), which also computes the gradient
of the gate. No atomic addition is used, so the order of every sum is fixed.

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
MAX_SORT = 1024  # positions of a field that one program can sort
BLOCK = 128  # lookups, or rows, of one program
DENSE_TENSORS = 6  # parameters of one launch
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
def _sort_field(ids, starts, keys, order, batch, stride_b, stride_f, WIDE: tl.constexpr, SIZE: tl.constexpr):
    field = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SIZE)
    in_range = row < batch
    id = tl.load(ids + row.to(tl.int64) * stride_b + field * stride_f, in_range, 0).to(tl.int64)
    first = tl.load(starts + field)
    size = tl.load(starts + field + 1) - first
    id = tl.minimum(tl.maximum(id, 0), size - 1)  # as in _make_keys
    # ids and positions as one number: equal ids stay in the order of the batch; unused positions are last
    if WIDE:
        both = tl.sort(tl.where(in_range, id * SIZE + row, 0x7FFFFFFFFFFFFFFF))
    else:
        both = tl.sort(tl.where(in_range, id.to(tl.int32) * SIZE + row, 0x7FFFFFFF))
    key = first + (both // SIZE).to(tl.int64)
    tl.store(keys + field * batch + row, key.to(keys.dtype.element_ty), in_range)
    tl.store(order + field * batch + row, (both % SIZE).to(tl.int32), in_range)


@triton.jit
def _combine_runs(end_a, sum_a, end_b, sum_b):
    return end_a | end_b, tl.where(end_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _sum_runs(keys, order, grad, rows, values, heads, batch, chunks, stride_b, stride_f, D: tl.constexpr,
              W: tl.constexpr, LOCAL: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    chunk, field = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = chunk * SIZE + tl.arange(0, SIZE)
    in_range = local < batch
    position = field * batch + local
    key = tl.load(keys + position, in_range, -1)
    starts_run = in_range & (key != tl.load(keys + position - 1, in_range & (local > 0), -2))
    ends_run = key != tl.load(keys + position + 1, local + 1 < batch, -2)
    row = tl.load(order + position, in_range, 0).to(tl.int64)
    if not LOCAL:
        row -= field * batch
    column = tl.arange(0, W)
    valid_2d = in_range[:, None] & (column < D)[None, :]
    grads = tl.load(grad + (row * stride_b + field * stride_f)[:, None] + column[None, :], valid_2d, 0.0)
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
    grad = grad if width == 1 or grad.stride(2) == 1 else grad.contiguous()
    keys = weight.new_empty(fields, batch, dtype=torch.int32 if len(weight) < 2**31 else torch.int64)
    rows, values = torch.empty_like(keys).view(-1), weight.new_empty(total, width)
    parts = None if gate is None else weight.new_empty(fields, chunks)
    if total:
        keys, order, local = _sort_keys(weight, starts, ids, keys)
        heads = weight.new_empty(fields * chunks, width)
        sizes: dict[str, Any] = {"D": width, "W": triton.next_power_of_2(width), "SIZE": CHUNK}
        strides = grad.stride(0), grad.stride(1)
        _sum_runs[(chunks, fields)](
            keys, order, grad, rows, values, heads, batch, chunks, *strides, LOCAL=local, **sizes
        )
        _finalize_runs[(chunks, fields)](
            weight, keys, rows, values, heads, weight if gate is None else gate, heads if parts is None else parts,
            batch, chunks, GATED=gate is not None, MANY=HEADS, **sizes,
        )  # fmt: skip
    return RowGrad(rows, values), None if parts is None else parts.sum(1)


def _sort_keys(weight: Tensor, starts: Tensor, ids: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return the sorted keys, their positions before, and whether these count from 0 in every field."""
    fields, batch = keys.shape
    arguments = batch, ids.stride(0), ids.stride(1)
    if batch <= MAX_SORT:
        order = torch.empty_like(keys, dtype=torch.int32)
        size = max(16, triton.next_power_of_2(batch))
        wide = len(weight) * size >= 2**31
        _sort_field[(fields,)](ids, starts, keys, order, *arguments, WIDE=wide, SIZE=size)
        return keys, order, True
    _make_keys[(triton.cdiv(batch, 256), fields)](ids, starts, keys, *arguments, SIZE=256)
    return *torch.sort(keys.view(-1), stable=True), False


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


@triton.jit
def _adagrad_block(weight, sums, grad, total, lr, eps, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    g = tl.load(grad + at, inside, 0.0)
    new = tl.load(sums + at, inside, 1.0) + g * g
    tl.store(sums + at, new, inside)
    moved = tl.load(weight + at, inside, 0.0) - lr * tl.div_rn(g, tl.sqrt_rn(new) + eps)
    tl.store(weight + at, moved, inside)


@triton.jit
def _dense_adagrad(w0, s0, g0, n0, w1, s1, g1, n1, w2, s2, g2, n2, w3, s3, g3, n3, w4, s4, g4, n4, w5, s5, g5, n5,
                   rate, eps, SIZE: tl.constexpr):  # fmt: skip
    lr, number = tl.load(rate), tl.program_id(1)
    if number == 0:
        _adagrad_block(w0, s0, g0, n0, lr, eps, SIZE)
    elif number == 1:
        _adagrad_block(w1, s1, g1, n1, lr, eps, SIZE)
    elif number == 2:
        _adagrad_block(w2, s2, g2, n2, lr, eps, SIZE)
    elif number == 3:
        _adagrad_block(w3, s3, g3, n3, lr, eps, SIZE)
    elif number == 4:
        _adagrad_block(w4, s4, g4, n4, lr, eps, SIZE)
    else:
        _adagrad_block(w5, s5, g5, n5, lr, eps, SIZE)


def dense_adagrad(weights: list[Tensor], totals: list[Tensor], grads: list[Tensor], lr: Tensor, eps: float) -> None:
    """Update whole parameters with Adagrad, six in a launch; all tensors are contiguous."""
    for first in range(0, len(weights), DENSE_TENSORS):
        part = slice(first, first + DENSE_TENSORS)
        groups = [
            (weight, total, grad, weight.numel())
            for weight, total, grad in zip(weights[part], totals[part], grads[part], strict=True)
        ]
        largest = max(group[3] for group in groups)
        size, warps = (2048, 8) if largest > 1 << 18 else (512, 4)
        count = len(groups)
        groups += [groups[0]] * (DENSE_TENSORS - count)
        flat = [argument for group in groups for argument in group]
        _dense_adagrad[(triton.cdiv(largest, size), count)](*flat, lr, eps, SIZE=size, num_warps=warps)


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
