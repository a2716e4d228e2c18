"""The loops of the numba engine, for float32 arrays; each can be done in ``n`` parts, on a thread each.

Which part does what never changes a number: a sum belongs to one field or one row, and is taken in the order of
the batch. Rows are fetched ahead of their use, because a table is larger than any cache.
"""

# mypy: disable-error-code="call-arg,call-overload,import-untyped,no-untyped-call,unused-ignore,untyped-decorator"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from lpfs.jit import Array, Loop, compiled

AHEAD = 16  # rows
EMPTY = -1


@intrinsic
def prefetch_row(context: Any, array: Any, row: Any) -> Any:
    """Ask for the first bytes of a row, without waiting for them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arrayobj.make_array(signature.args[0])
        what = kind(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, what.strides)[0]
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        at = builder.gep(builder.bitcast(what.data, address), [builder.mul(arguments[1], stride)])
        form = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        builder.call(
            cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0"),
            [at, number(0), number(3), number(1)],  # to read, keep it close, data
        )
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


# out[b, f] = g_f · W[start_f + id]; bad[k] counts the ids outside their field. An empty gate: no gates.
@compiled
def gather(k: int, n: int, weight: Array, starts: Array, ids: Array, gate: Array, out: Array, bad: Array) -> None:
    rows, fields = ids.shape
    width = weight.shape[1]
    end = (k + 1) * rows // n
    wrong = 0
    for b in range(k * rows // n, end):
        if b + 1 < end:
            for f in range(fields):
                prefetch_row(weight, starts[f] + ids[b + 1, f])
        for f in range(fields):
            if ids[b, f] < 0 or ids[b, f] >= starts[f + 1] - starts[f]:
                wrong += 1
                continue
            r = np.uint64(starts[f] + ids[b, f])
            if gate.shape[0]:
                g = gate[f]
                for d in range(width):
                    out[b, f, d] = weight[r, d] * g
            else:
                for d in range(width):
                    out[b, f, d] = weight[r, d]
    bad[k] = wrong


# where[f, b]: which of the different ids of its field an id is, in the order in which they first come; found[f, u]
# is that id, counts[f] their number. A small field is looked up directly in ``slots``, a large one by hash.
@compiled
def group_equal_ids(
    k: int, n: int, starts: Array, ids: Array, slots: Array, where: Array, found: Array, counts: Array
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
            while u != EMPTY and found[f, u] != x:
                at = (at + np.uint32(1)) & last
                u = slots[f, at]
            if u == EMPTY:
                u = count
                count += 1
                slots[f, at] = u
                found[f, u] = x
            where[f, b] = u
        counts[f] = count


# values[i] = g_f · sum of grad over the places that read row rows[i]; gate_grad[f] = sum of ⟨W_r, that sum⟩.
@compiled
def accumulate(
    k: int,
    n: int,
    weight: Array,
    starts: Array,
    gate: Array,
    grad: Array,
    where: Array,
    found: Array,
    first: Array,
    rows: Array,
    values: Array,
    gate_grad: Array,
) -> None:
    fields = grad.shape[1]
    width = grad.shape[2]
    begin, end = k * fields // n, (k + 1) * fields // n
    seen = np.zeros(fields, np.int64)
    for f in range(begin, end):
        for u in range(first[f + 1] - first[f]):
            rows[first[f] + u] = starts[f] + found[f, u]
    for b in range(grad.shape[0]):
        for f in range(begin, end):
            u = where[f, b]
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
    for f in range(begin, end):
        g = gate[f]
        sums[:] = 0
        for i in range(first[f], first[f + 1]):
            if i + AHEAD < first[f + 1]:
                prefetch_row(weight, rows[i + AHEAD])
            r = np.uint64(rows[i])
            for d in range(width):
                sums[d] += weight[r, d] * values[i, d]
                values[i, d] *= g
        gate_grad[f] = sums.sum()


# s += g², w -= lr · g / (√s + eps)
@compiled
def adagrad(
    k: int, n: int, weight: Array, total: Array, rows: Array, values: Array, lr: np.float32, eps: np.float32
) -> None:
    width = weight.shape[1]
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + AHEAD < end:
            prefetch_row(total, rows[i + AHEAD])
            prefetch_row(weight, rows[i + AHEAD])
        r = np.uint64(rows[i])
        for d in range(width):
            s = total[r, d] + values[i, d] * values[i, d]
            total[r, d] = s
            weight[r, d] -= lr * (values[i, d] / (np.sqrt(s) + eps))


# s += mean g², w -= lr · g / (√s + eps), with one s a row
@compiled
def rowwise_adagrad(
    k: int, n: int, weight: Array, total: Array, rows: Array, values: Array, lr: np.float32, eps: np.float32
) -> None:
    width = weight.shape[1]
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + AHEAD < end:
            prefetch_row(weight, rows[i + AHEAD])
        r = np.uint64(rows[i])
        squares = np.float32(0)
        for d in range(width):
            squares += values[i, d] * values[i, d]
        s = total[r] + squares / np.float32(width)
        total[r] = s
        root = np.sqrt(s) + eps
        for d in range(width):
            weight[r, d] -= lr * (values[i, d] / root)


# m += (g - m)(1 - β₁), v += (g² - v)(1 - β₂), w -= size · m / (√v + eps); fades: 1 - β₁ and 1 - β₂
@compiled
def adam(
    k: int,
    n: int,
    weight: Array,
    mean: Array,
    square: Array,
    rows: Array,
    values: Array,
    size: np.float32,
    fade: np.float32,
    fade_square: np.float32,
    eps: np.float32,
) -> None:
    width = weight.shape[1]
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + AHEAD < end:
            prefetch_row(mean, rows[i + AHEAD])
            prefetch_row(square, rows[i + AHEAD])
            prefetch_row(weight, rows[i + AHEAD])
        r = np.uint64(rows[i])
        for d in range(width):
            g = values[i, d]
            m = mean[r, d] + (g - mean[r, d]) * fade
            v = square[r, d] + (g * g - square[r, d]) * fade_square
            mean[r, d] = m
            square[r, d] = v
            weight[r, d] -= size * (m / (np.sqrt(v) + eps))


# w -= lr · g
@compiled
def sgd(k: int, n: int, weight: Array, rows: Array, values: Array, lr: np.float32) -> None:
    width = weight.shape[1]
    end = (k + 1) * rows.shape[0] // n
    for i in range(k * rows.shape[0] // n, end):
        if i + AHEAD < end:
            prefetch_row(weight, rows[i + AHEAD])
        r = np.uint64(rows[i])
        for d in range(width):
            weight[r, d] -= lr * values[i, d]


# All parts of a loop at once, each on a thread of its own. One function each, because numba keeps on disk only
# what it finds by name.


def spread(function: Loop) -> Loop:
    """Compile with threads."""
    return compiled(function, parallel=True)


@spread
def gather_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        gather(k, n, *arguments)


@spread
def find_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        group_equal_ids(k, n, *arguments)


@spread
def accumulate_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        accumulate(k, n, *arguments)


@spread
def adagrad_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        adagrad(k, n, *arguments)


@spread
def rowwise_adagrad_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        rowwise_adagrad(k, n, *arguments)


@spread
def adam_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        adam(k, n, *arguments)


@spread
def sgd_spread(n: int, *arguments: Any) -> None:
    for k in prange(n):
        sgd(k, n, *arguments)


PARALLEL = {
    gather: gather_spread,
    group_equal_ids: find_spread,
    accumulate: accumulate_spread,
    adagrad: adagrad_spread,
    rowwise_adagrad: rowwise_adagrad_spread,
    adam: adam_spread,
    sgd: sgd_spread,
}
