"""Crosses on an NVIDIA GPU: Triton kernels that read or write the large buffer once per direction."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpfs.models._kernels import CrossPlan

PARTS = 64  # parts of one program
ROWS = 64  # rows over which one program sums the gradient of the gates


@triton.jit
def _forward(tokens, first, second, slots, gate, out, parts, count, stride, D: tl.constexpr, W: tl.constexpr,
          GATED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    in_range = part < parts
    column = tl.arange(0, W)
    valid_2d = in_range[:, None] & (column < D)[None, :]
    one = tl.load(first + part, in_range, -1)
    two = tl.load(second + part, in_range, 0)
    slot = tl.load(slots + part, in_range, 0)
    base = tokens + row * count * D + column[None, :]
    values = tl.load(base + two[:, None] * D, valid_2d, 0.0)
    values = values * tl.load(base + one[:, None] * D, valid_2d & (one >= 0)[:, None], 1.0)
    if GATED:
        values = values * tl.load(gate + part, in_range, 0.0)[:, None]
    tl.store(out + row * stride + slot[:, None] * D + column[None, :], values, valid_2d)


@triton.jit
def _grad_tokens(grad, tokens, token_parts, others, slots, gate, result, count, stride, D: tl.constexpr,
               W: tl.constexpr, GATED: tl.constexpr, MAX_PARTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    number = token * MAX_PARTS + tl.arange(0, MAX_PARTS)
    part = tl.load(token_parts + number)
    used = part >= 0
    other = tl.load(others + number)
    slot = tl.load(slots + part, used, 0)
    column = tl.arange(0, W)
    columns_valid = (column < D)[None, :]
    grads = tl.load(grad + row * stride + slot[:, None] * D + column[None, :], used[:, None] & columns_valid, 0.0)
    base = tokens + row * count * D + column[None, :]
    grads = grads * tl.load(base + other[:, None] * D, (other >= 0)[:, None] & columns_valid, 1.0)
    if GATED:
        grads = grads * tl.load(gate + part, used, 0.0)[:, None]
    tl.store(result + (row * count + token) * D + column, tl.sum(grads, 0), column < D)


@triton.jit
def _grad_gates(grad, tokens, first, second, slots, sums, rows, parts, count, stride, D: tl.constexpr,
              W: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    in_range = part < parts
    column = tl.arange(0, W)
    valid_2d = in_range[:, None] & (column < D)[None, :]
    one = tl.load(first + part, in_range, -1)
    two = tl.load(second + part, in_range, 0)
    slot = tl.load(slots + part, in_range, 0)
    total = tl.zeros((SIZE,), tl.float32)
    for number in range(MANY):
        row = block * MANY + number
        valid = valid_2d & (row < rows)
        base = tokens + row * count * D + column[None, :]
        value = tl.load(base + two[:, None] * D, valid, 0.0).to(tl.float32)
        value = value * tl.load(base + one[:, None] * D, valid & (one >= 0)[:, None], 1.0)
        value = value * tl.load(grad + row * stride + slot[:, None] * D + column[None, :], valid, 0.0)
        total += tl.sum(value, 1)
    tl.store(sums + block * parts + part, total, in_range)


def forward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write every part, multiplied by its gate, to its slot in ``out`` (B, …)."""
    batch, count, width = tokens.shape
    parts = len(plan.parts)
    if batch and parts:
        first, second, slots, _, _ = _tables(plan, count, tokens.device)
        _forward[(batch, triton.cdiv(parts, PARTS))](
            tokens, first, second, slots, tokens if gate is None else gate, out, parts, count, out.stride(0),
            D=width, W=triton.next_power_of_2(width), GATED=gate is not None, SIZE=PARTS,
        )  # fmt: skip


def backward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the embeddings (B, N, D) and of the gates (P,)."""
    batch, count, width = tokens.shape
    parts = len(plan.parts)
    token_grad = torch.zeros_like(tokens)
    if not batch or not parts:
        return token_grad, None if gate is None else torch.zeros_like(gate)
    first, second, slots, token_parts, others = _tables(plan, count, tokens.device)
    sizes: dict[str, Any] = {"D": width, "W": triton.next_power_of_2(width)}
    _grad_tokens[(batch, count)](
        grad, tokens, token_parts, others, slots, tokens if gate is None else gate, token_grad, count,
        grad.stride(0), GATED=gate is not None, MAX_PARTS=token_parts.shape[1], **sizes,
    )  # fmt: skip
    if gate is None:
        return token_grad, None
    blocks = triton.cdiv(batch, ROWS)
    sums = torch.empty(blocks, parts, dtype=torch.float32, device=tokens.device)
    _grad_gates[(blocks, triton.cdiv(parts, PARTS))](
        grad, tokens, first, second, slots, sums, batch, parts, count, grad.stride(0),
        SIZE=PARTS, MANY=ROWS, **sizes,
    )  # fmt: skip
    return token_grad, sums.sum(0).to(gate.dtype)


@cache
def _tables(plan: CrossPlan, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the plan on a GPU: factors and slots of the parts; per embedding its parts and the other factors."""
    first = [-1 if len(part) == 1 else part[0] for part in plan.parts]
    second = [part[-1] for part in plan.parts]
    uses: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # (part, other factor) of each embedding
    for part, (one, two) in enumerate(zip(first, second, strict=True)):
        uses[two].append((part, one))
        if one >= 0:
            uses[one].append((part, two))
    width = triton.next_power_of_2(max(1, *map(len, uses)))
    token_parts = [[part for part, _ in pairs] + [-1] * (width - len(pairs)) for pairs in uses]
    others = [[other for _, other in pairs] + [-1] * (width - len(pairs)) for pairs in uses]
    tables = (first, second, plan.places, token_parts, others)
    return tuple(torch.tensor(table, dtype=torch.int32, device=device) for table in tables)
