"""The loops of the numba backend, for float32 arrays.

Each loop does part ``k`` of ``n``; the ``*_parallel`` functions run all parts, one per thread. The number of parts
does not change the result: every sum belongs to one field or one row and is taken in the order of the batch. Rows
are prefetched, because a table is larger than the caches of a CPU.
"""

# mypy: disable-error-code="call-arg,call-overload,import-untyped,no-untyped-call,unused-ignore,untyped-decorator"
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from lpfs._imports import Array, compile_loop

PREFETCH_ROWS = 16  # rows between a prefetch and the use of the row
EMPTY = -1  # a slot of the hash table that is not used


@intrinsic
def prefetch_row(context: Any, array: Any, row: Any) -> Any:
    """Start loading the first bytes of a row into the cache."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct = arrayobj.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, struct.strides)[0]
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        at = builder.gep(builder.bitcast(struct.data, address), [builder.mul(arguments[1], stride)])
        form = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        builder.call(prefetch, [at, number(0), number(3), number(1)])  # read, high temporal locality, data cache
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


# out[b, f] = g_f · W[start_f + id]; invalid[k] counts the ids outside their field. An empty gate: no gates.
@compile_loop
def gather(k: int, n: int, weight: Array, starts: Array, ids: Array, gate: Array, out: Array, invalid: Array) -> None:
    rows, fields = ids.shape
    width = weight.shape[1]
    end = (k + 1) * rows // n
    count = 0
    for b in range(k * rows // n, end):
        if b + 1 < end:
            for f in range(fields):
                prefetch_row(weight, starts[f] + ids[b + 1, f])
        for f in range(fields):
            if ids[b, f] < 0 or ids[b, f] >= starts[f + 1] - starts[f]:
                count += 1
                continue
            r = np.uint64(starts[f] + ids[b, f])
            if gate.shape[0]:
                g = gate[f]
                for d in range(width):
                    out[b, f, d] = weight[r, d] * g
            else:
                for d in range(width):
                    out[b, f, d] = weight[r, d]
    invalid[k] = count


# unique_ids[f, u]: the distinct ids of a field in order of first occurrence; counts[f]: their number;
# positions[f, b]: the index u of the id of row b. A small field indexes ``slots`` directly, a large one by hash.
@compile_loop
def group_equal_ids(
    k: int, n: int, starts: Array, ids: Array, slots: Array, positions: Array, unique_ids: Array, counts: Array
) -> None:
    rows, fields = ids.shape
    last = np.uint32(slots.shape[1] - 1)
    for f in range(k, fields, n):
        size = starts[f + 1] - starts[f]
        direct = size <= slots.shape[1]
        for i in range(size if direct else slots.shape[1]):
            slots[f, i] = EMPTY
        count = 0
        for b in range(rows):
            x = ids[b, f]
            at = np.uint32(x)
            if not direct:
                at = ((at * np.uint32(2654435769)) >> np.uint32(7)) & last
            u = slots[f, at]
            while u != EMPTY and unique_ids[f, u] != x:
                at = (at + np.uint32(1)) & last
                u = slots[f, at]
            if u == EMPTY:
                u = count
                count += 1
                slots[f, at] = u
                unique_ids[f, u] = x
            positions[f, b] = u
        counts[f] = count


# values[i] = g_f · sum of grad over the lookups of row rows[i]; gate_grad[f] = sum of ⟨W_r, that sum⟩.
@compile_loop
def accumulate(k: int, n: int, weight: Array, starts: Array, gate: Array, grad: Array, positions: Array,
               unique_ids: Array, first: Array, rows: Array, values: Array, gate_grad: Array) -> None:  # fmt: skip
    fields, width = grad.shape[1:]
    start, end = k * fields // n, (k + 1) * fields // n
    seen = np.zeros(fields, np.int64)
    for f in range(start, end):
        for u in range(first[f + 1] - first[f]):
            rows[first[f] + u] = starts[f] + unique_ids[f, u]
    for b in range(grad.shape[0]):
        for f in range(start, end):
            u = positions[f, b]
            i = np.uint64(first[f] + u)
            if u == seen[f]:
                seen[f] += 1
                for d in range(width):
                    values[i, d] = grad[b, f, d]
            else:
                for d in range(width):
                    values[i, d] += grad[b, f, d]
    if not gate.shape[0]:
        return
    sums = np.empty(width, np.float32)
    for f in range(start, end):
        g = gate[f]
        sums[:] = 0
        for i in range(first[f], first[f + 1]):
            if i + PREFETCH_ROWS < first[f + 1]:
                prefetch_row(weight, rows[i + PREFETCH_ROWS])
            r = np.uint64(rows[i])
            for d in range(width):
                sums[d] += weight[r, d] * values[i, d]
                values[i, d] *= g
        gate_grad[f] = sums.sum()


# s += g², w -= lr · g / (√s + eps)
@compile_loop
def adagrad(
    k: int, n: int, weight: Array, total: Array, rows: Array, values: Array, lr: np.float32, eps: np.float32
) -> None:
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + PREFETCH_ROWS < end:
            prefetch_row(total, rows[i + PREFETCH_ROWS])
            prefetch_row(weight, rows[i + PREFETCH_ROWS])
        r = np.uint64(rows[i])
        for d in range(weight.shape[1]):
            s = total[r, d] + values[i, d] * values[i, d]
            total[r, d] = s
            weight[r, d] -= lr * (values[i, d] / (np.sqrt(s) + eps))


# s += mean g², w -= lr · g / (√s + eps), with one s per row
@compile_loop
def rowwise_adagrad(
    k: int, n: int, weight: Array, total: Array, rows: Array, values: Array, lr: np.float32, eps: np.float32
) -> None:
    width = weight.shape[1]
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + PREFETCH_ROWS < end:
            prefetch_row(weight, rows[i + PREFETCH_ROWS])
        r = np.uint64(rows[i])
        squares = np.float32(0)
        for d in range(width):
            squares += values[i, d] * values[i, d]
        s = total[r] + squares / np.float32(width)
        total[r] = s
        root = np.sqrt(s) + eps
        for d in range(width):
            weight[r, d] -= lr * (values[i, d] / root)


# m += (g - m)(1 - β₁), v += (g² - v)(1 - β₂), w -= size · m / (√v + eps); decay: 1 - β₁, decay_square: 1 - β₂
@compile_loop
def adam(k: int, n: int, weight: Array, mean: Array, square: Array, rows: Array, values: Array, size: np.float32,
         decay: np.float32, decay_square: np.float32, eps: np.float32) -> None:  # fmt: skip
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + PREFETCH_ROWS < end:
            prefetch_row(mean, rows[i + PREFETCH_ROWS])
            prefetch_row(square, rows[i + PREFETCH_ROWS])
            prefetch_row(weight, rows[i + PREFETCH_ROWS])
        r = np.uint64(rows[i])
        for d in range(weight.shape[1]):
            g = values[i, d]
            m = mean[r, d] + (g - mean[r, d]) * decay
            v = square[r, d] + (g * g - square[r, d]) * decay_square
            mean[r, d] = m
            square[r, d] = v
            weight[r, d] -= size * (m / (np.sqrt(v) + eps))


# w -= lr · g
@compile_loop
def sgd(k: int, n: int, weight: Array, rows: Array, values: Array, lr: np.float32) -> None:
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + PREFETCH_ROWS < end:
            prefetch_row(weight, rows[i + PREFETCH_ROWS])
        r = np.uint64(rows[i])
        for d in range(weight.shape[1]):
            weight[r, d] -= lr * values[i, d]


# All parts of a loop, one per thread. These are separate functions because numba caches on disk by function name.
parallel = partial(compile_loop, parallel=True)


@parallel
def gather_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        gather(k, n, *arguments)


@parallel
def group_equal_ids_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        group_equal_ids(k, n, *arguments)


@parallel
def accumulate_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        accumulate(k, n, *arguments)


@parallel
def adagrad_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        adagrad(k, n, *arguments)


@parallel
def rowwise_adagrad_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        rowwise_adagrad(k, n, *arguments)


@parallel
def adam_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        adam(k, n, *arguments)


@parallel
def sgd_parallel(n: int, *arguments: Any) -> None:
    for k in prange(n):
        sgd(k, n, *arguments)
