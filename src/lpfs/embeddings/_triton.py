"""The engine for NVIDIA GPUs: Triton kernels, the same result on every run, nothing that waits for the host.

The gradient by rows is a sort and a sum. Keys ``start_f + id`` are sorted as 32-bit numbers; since every field has
exactly B of them, field f owns the sorted places f·B to (f+1)·B. Chunks of ``CHUNK`` places add up their runs of
equal keys (:func:`_sum_runs`); a run that goes on over chunks is completed by the chunk in which it begins
(:func:`_finish`), which also takes the gate's gradient. No atomic addition, so no order left to chance.

Lengths depend on the shape of the batch alone (a place that begins no run has row -1 and zeros), so that a whole
training step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpfs.embeddings.row_grad import RowGrad

name = "triton"

CHUNK = 64  # sorted places a program adds up
BLOCK = 128  # lookups, or rows, a program moves
HEADS = 32  # chunks looked at together while a long run is completed


@triton.jit
def _gather(weight, starts, ids, gate, out, total, fields, stride_b, stride_f, D: tl.constexpr, W: tl.constexpr,
            GATED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < total
    row, field = place // fields, place % fields
    id = tl.load(ids + row * stride_b + field * stride_f, inside, 0).to(tl.int64)
    first = tl.load(starts + field, inside, 0)
    size = tl.load(starts + field + 1, inside, 1) - first
    valid = (id >= 0) & (id < size)
    column = tl.arange(0, W)
    wide = inside[:, None] & (column < D)[None, :]
    values = tl.load(weight + (first + id)[:, None] * D + column[None, :], wide & valid[:, None], float("nan"))
    if GATED:
        values = values * tl.load(gate + field, inside, 0.0)[:, None]
    tl.store(out + place[:, None] * D + column[None, :], values, wide)


@triton.jit
def _make_keys(ids, starts, keys, batch, stride_b, stride_f, SIZE: tl.constexpr):
    field = tl.program_id(1)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = row < batch
    id = tl.load(ids + row.to(tl.int64) * stride_b + field * stride_f, inside, 0).to(tl.int64)
    first = tl.load(starts + field)
    size = tl.load(starts + field + 1) - first
    id = tl.minimum(tl.maximum(id, 0), size - 1)  # one out of range reads as nan: its gradient is nan too
    tl.store(keys + field.to(tl.int64) * batch + row, (first + id).to(keys.dtype.element_ty), inside)


@triton.jit
def _combine_runs(end_a, sum_a, end_b, sum_b):
    return end_a | end_b, tl.where(end_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def _sum_runs(keys, order, grad, rows, values, heads, batch, fields, chunks, D: tl.constexpr, W: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    chunk, field = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = chunk * SIZE + tl.arange(0, SIZE)
    inside = local < batch
    place = field * batch + local
    key = tl.load(keys + place, inside, -1)
    begins = inside & (key != tl.load(keys + place - 1, inside & (local > 0), -2))
    ends = key != tl.load(keys + place + 1, local + 1 < batch, -2)
    row = tl.load(order + place, inside, 0) - field * batch
    column = tl.arange(0, W)
    wide = inside[:, None] & (column < D)[None, :]
    each = tl.load(grad + (row * fields + field)[:, None] * D + column[None, :], wide, 0.0)
    flags = ends.to(tl.int32)[:, None] + tl.zeros((SIZE, W), tl.int32)
    _, sums = tl.associative_scan(
        (flags, each), 0, _combine_runs, reverse=True
    )  # at a place: from there to its run's end
    tl.store(rows + place, tl.where(begins, key, -1), inside)
    tl.store(values + place[:, None] * D + column[None, :], tl.where(begins[:, None], sums, 0.0), wide)
    top = (tl.arange(0, SIZE) == 0)[:, None] & (column < D)[None, :]
    tl.store(heads + (field * chunks + chunk) * D + column[None, :] + tl.zeros((SIZE, W), tl.int64), sums, top)


@triton.jit
def _finalize_runs(weight, keys, rows, values, heads, gate, parts, batch, chunks, D: tl.constexpr, W: tl.constexpr,
            GATED: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    chunk, field = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = chunk * SIZE + tl.arange(0, SIZE)
    inside = local < batch
    place = field * batch + local
    row = tl.load(rows + place, inside, -1).to(tl.int64)
    begins = row >= 0
    last = tl.max(tl.where(begins, local, -1))  # where the last run of this chunk begins
    column = tl.arange(0, W)
    narrow = (column < D)[None, :]
    wide = begins[:, None] & narrow
    extra = tl.zeros((W,), tl.float32)
    after = (chunk + 1) * SIZE
    goes_on = (last >= 0) & (after < batch)
    if goes_on:
        key = tl.load(keys + field * batch + after - 1)
        there = chunk + 1
        while goes_on:
            chunk_there = there + tl.arange(0, MANY)
            known = chunk_there < chunks
            first = tl.load(keys + field * batch + chunk_there * SIZE, known, -2)
            same = known & (first == key)
            head = heads + (field * chunks + chunk_there)[:, None] * D + column[None, :]
            extra += tl.sum(tl.load(head, same[:, None] & narrow, 0.0), 0)
            there += MANY
            goes_on = tl.min(same.to(tl.int32)) == 1
    at = values + place[:, None] * D + column[None, :]
    sums = tl.load(at, wide, 0.0) + tl.where((local == last)[:, None], extra[None, :], 0.0)
    if GATED:
        mine = tl.load(weight + row[:, None] * D + column[None, :], wide, 0.0)
        tl.store(parts + field * chunks + chunk, tl.sum(tl.sum(mine * sums, 1), 0))
        sums = sums * tl.load(gate + field)
    tl.store(at, sums, wide)


def gather(weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
    """Return g_f · W[start_f + id] as (B, F, D); an id outside its field gives nan."""
    batch, fields = ids.shape
    width = weight.shape[1]
    out = torch.empty(batch, fields, width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        total = batch * fields
        _gather[(triton.cdiv(total, BLOCK),)](
            weight, starts, ids, weight if gate is None else gate, out, total, fields, *ids.stride(),
            D=width, W=triton.next_power_of_2(width), GATED=gate is not None, SIZE=BLOCK,
        )  # fmt: skip
    return out


def reduce(
    weight: Tensor, starts: Tensor, ids: Tensor, gate: Tensor | None, grad: Tensor
) -> tuple[RowGrad, Tensor | None]:
    """Return the gradient by rows and that of the gates (see the plain engine for the formula)."""
    batch, fields = ids.shape
    width, device = weight.shape[1], weight.device
    total = batch * fields
    grad = grad.contiguous()
    kind = torch.int32 if weight.shape[0] < 2**31 else torch.int64
    keys = torch.empty(total, dtype=kind, device=device)
    rows = torch.empty(total, dtype=kind, device=device)
    values = torch.empty(total, width, dtype=weight.dtype, device=device)
    chunks = triton.cdiv(batch, CHUNK)
    parts = None if gate is None else torch.empty(fields, chunks, dtype=weight.dtype, device=device)
    if total:
        heads = torch.empty(fields * chunks, width, dtype=weight.dtype, device=device)
        sizes: dict[str, Any] = {"D": width, "W": triton.next_power_of_2(width)}
        _make_keys[(triton.cdiv(batch, 256), fields)](
            ids, starts, keys, batch, ids.stride(0), ids.stride(1), SIZE=256
        )
        keys, order = torch.sort(keys, stable=True)
        _sum_runs[(chunks, fields)](
            keys, order, grad, rows, values, heads, batch, fields, chunks, SIZE=CHUNK, **sizes
        )
        _finalize_runs[(chunks, fields)](
            weight, keys, rows, values, heads, weight if gate is None else gate, heads if parts is None else parts,
            batch, chunks, GATED=gate is not None, SIZE=CHUNK, MANY=HEADS, **sizes,
        )  # fmt: skip
    return RowGrad(rows, values), None if parts is None else parts.sum(1)


# ------------------------------------------------------------------------------------- row updates
# lr is a number, or a tensor of one number on the device, which a captured graph reads anew on every replay.


@triton.jit
def _rows_at(rows, total, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return place, tl.load(rows + place, place < total, -1).to(tl.int64)


@triton.jit
def _number(value, IS_TENSOR: tl.constexpr):
    if IS_TENSOR:
        return tl.load(value)
    else:
        return value


@triton.jit
def _adagrad(weight, sums, rows, values, total, lr, eps, D: tl.constexpr, W: tl.constexpr, ROWWISE: tl.constexpr,
             TENSOR: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    place, row = _rows_at(rows, total, SIZE)
    column = tl.arange(0, W)
    wide = (row >= 0)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    grad = tl.load(values + place[:, None] * D + column[None, :], wide, 0.0)
    if ROWWISE:
        new = tl.load(sums + row, row >= 0, 0.0) + tl.sum(grad * grad, 1) / D
        tl.store(sums + row, new, row >= 0)
        root = tl.sqrt_rn(new)[:, None]
    else:
        new_all = tl.load(sums + at, wide, 1.0) + grad * grad
        tl.store(sums + at, new_all, wide)
        root = tl.sqrt_rn(new_all)
    moved = tl.load(weight + at, wide, 0.0) - _number(lr, TENSOR) * tl.div_rn(grad, root + eps)
    tl.store(weight + at, moved, wide)


@triton.jit
def _adam(weight, means, squares, rows, values, total, size, fresh1, fresh2, eps, D: tl.constexpr, W: tl.constexpr,
          TENSOR: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    place, row = _rows_at(rows, total, SIZE)
    column = tl.arange(0, W)
    wide = (row >= 0)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    grad = tl.load(values + place[:, None] * D + column[None, :], wide, 0.0)
    mean = tl.load(means + at, wide, 0.0)
    mean = mean + fresh1 * (grad - mean)
    square = tl.load(squares + at, wide, 0.0)
    square = square + fresh2 * (grad * grad - square)
    tl.store(means + at, mean, wide)
    tl.store(squares + at, square, wide)
    moved = tl.load(weight + at, wide, 0.0) - _number(size, TENSOR) * tl.div_rn(mean, tl.sqrt_rn(square) + eps)
    tl.store(weight + at, moved, wide)


@triton.jit
def _sgd(weight, rows, values, total, lr, D: tl.constexpr, W: tl.constexpr, TENSOR: tl.constexpr,
         SIZE: tl.constexpr):  # fmt: skip
    place, row = _rows_at(rows, total, SIZE)
    column = tl.arange(0, W)
    wide = (row >= 0)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    grad = tl.load(values + place[:, None] * D + column[None, :], wide, 0.0)
    tl.store(weight + at, tl.load(weight + at, wide, 0.0) - _number(lr, TENSOR) * grad, wide)


def adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float | Tensor, eps: float) -> None:
    """Take the Adagrad step of the rows."""
    _launch(_adagrad, weight, (total,), grad, lr, eps, ROWWISE=False)


def rowwise_adagrad(weight: Tensor, total: Tensor, grad: RowGrad, lr: float | Tensor, eps: float) -> None:
    """Take the Adagrad step with one number a row."""
    _launch(_adagrad, weight, (total,), grad, lr, eps, ROWWISE=True)


def adam(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    grad: RowGrad,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
) -> None:
    """Take the lazy Adam step."""
    done = step.double() if isinstance(step, Tensor) else step
    size = lr * (1 - betas[1] ** done) ** 0.5 / (1 - betas[0] ** done)
    _launch(_adam, weight, (mean, square), grad, size, 1 - betas[0], 1 - betas[1], eps)


def sgd(weight: Tensor, grad: RowGrad, lr: float | Tensor) -> None:
    """Take the plain gradient step of the rows."""
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
