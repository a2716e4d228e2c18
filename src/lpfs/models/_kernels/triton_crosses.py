"""Products on an NVIDIA GPU: Triton kernels that go through the big buffer once each way, once for the gates."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpfs.models._kernels import CrossPlan

PARTS = 64  # products a program looks at
ROWS = 64  # rows a program adds the gates' gradient over


@triton.jit
def _fill(tokens, first, second, places, gate, out, parts, count, stride, D: tl.constexpr, W: tl.constexpr,
          GATED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = part < parts
    column = tl.arange(0, W)
    wide = inside[:, None] & (column < D)[None, :]
    one = tl.load(first + part, inside, -1)
    two = tl.load(second + part, inside, 0)
    place = tl.load(places + part, inside, 0)
    base = tokens + row * count * D + column[None, :]
    values = tl.load(base + two[:, None] * D, wide, 0.0)
    values = values * tl.load(base + one[:, None] * D, wide & (one >= 0)[:, None], 1.0)
    if GATED:
        values = values * tl.load(gate + part, inside, 0.0)[:, None]
    tl.store(out + row * stride + place[:, None] * D + column[None, :], values, wide)


@triton.jit
def _grad_tokens(grad, tokens, mine, others, places, gate, result, count, stride, D: tl.constexpr, W: tl.constexpr,
               GATED: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    number = token * MOST + tl.arange(0, MOST)
    part = tl.load(mine + number)
    used = part >= 0
    other = tl.load(others + number)
    place = tl.load(places + part, used, 0)
    column = tl.arange(0, W)
    narrow = (column < D)[None, :]
    each = tl.load(grad + row * stride + place[:, None] * D + column[None, :], used[:, None] & narrow, 0.0)
    base = tokens + row * count * D + column[None, :]
    each = each * tl.load(base + other[:, None] * D, (other >= 0)[:, None] & narrow, 1.0)
    if GATED:
        each = each * tl.load(gate + part, used, 0.0)[:, None]
    tl.store(result + (row * count + token) * D + column, tl.sum(each, 0), column < D)


@triton.jit
def _grad_gates(grad, tokens, first, second, places, sums, rows, parts, count, stride, D: tl.constexpr,
              W: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = part < parts
    column = tl.arange(0, W)
    wide = inside[:, None] & (column < D)[None, :]
    one = tl.load(first + part, inside, -1)
    two = tl.load(second + part, inside, 0)
    place = tl.load(places + part, inside, 0)
    total = tl.zeros((SIZE,), tl.float32)
    for number in range(MANY):
        row = block * MANY + number
        here = wide & (row < rows)
        base = tokens + row * count * D + column[None, :]
        value = tl.load(base + two[:, None] * D, here, 0.0).to(tl.float32)
        value = value * tl.load(base + one[:, None] * D, here & (one >= 0)[:, None], 1.0)
        value = value * tl.load(grad + row * stride + place[:, None] * D + column[None, :], here, 0.0)
        total += tl.sum(value, 1)
    tl.store(sums + block * parts + part, total, inside)


def fill(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write every part, times its gate, to its place in ``out`` (B, …)."""
    batch, count, width = tokens.shape
    parts = len(plan.parts)
    if batch and parts:
        first, second, places, _, _ = _tables(plan, count, tokens.device)
        _fill[(batch, triton.cdiv(parts, PARTS))](
            tokens, first, second, places, tokens if gate is None else gate, out, parts, count, out.stride(0),
            D=width, W=triton.next_power_of_2(width), GATED=gate is not None, SIZE=PARTS,
        )  # fmt: skip


def reduce(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the embeddings (B, N, D) and of the gates (P,)."""
    batch, count, width = tokens.shape
    parts = len(plan.parts)
    own = torch.zeros_like(tokens)
    if not batch or not parts:
        return own, None if gate is None else torch.zeros_like(gate)
    first, second, places, mine, others = _tables(plan, count, tokens.device)
    sizes: dict[str, Any] = {"D": width, "W": triton.next_power_of_2(width)}
    _grad_tokens[(batch, count)](
        grad, tokens, mine, others, places, tokens if gate is None else gate, own, count, grad.stride(0),
        GATED=gate is not None, MOST=mine.shape[1], **sizes,
    )  # fmt: skip
    if gate is None:
        return own, None
    blocks = triton.cdiv(batch, ROWS)
    sums = torch.empty(blocks, parts, dtype=torch.float32, device=tokens.device)
    _grad_gates[(blocks, triton.cdiv(parts, PARTS))](
        grad,
        tokens,
        first,
        second,
        places,
        sums,
        batch,
        parts,
        count,
        grad.stride(0),
        SIZE=PARTS,
        MANY=ROWS,
        **sizes,
    )
    return own, sums.sum(0).to(gate.dtype)


@cache
def _tables(plan: CrossPlan, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the plan on a GPU: factors and places of each part; of each embedding its parts and their others."""
    first = [-1 if len(part) == 1 else part[0] for part in plan.parts]
    second = [part[-1] for part in plan.parts]
    lists: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        lists[two].append((number, one))
        if one >= 0:
            lists[one].append((number, two))
    most = triton.next_power_of_2(max(1, *map(len, lists)))
    mine = [[each[0] for each in known] + [-1] * (most - len(known)) for known in lists]
    others = [[each[1] for each in known] + [-1] * (most - len(known)) for known in lists]
    return tuple(torch.tensor(each, dtype=torch.int32, device=device)
                 for each in (first, second, plan.places, mine, others))  # fmt: skip
