"""Dense layers and the loss of a training step in few Triton kernels.

On a GPU a step of a small batch is a chain of short kernels, and one of a large batch reads and writes the same
activations again and again. These kernels join what torch does in several: bias and ReLU; the gradient of ReLU and
that of the bias; the loss and its gradient. No atomic addition is used, so the order of every sum is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 64  # of the tile of one program
LOSS_SIZE = 1024  # logits of one program


@triton.jit
def _bias_relu(out, bias, rows, columns, RELU: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    replica = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (replica * rows + row)[:, None] * columns + column[None, :]
    value = tl.load(out + at, inside, 0.0) + tl.load(bias + replica * columns + column, column < columns, 0.0)[None, :]
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # nan stays nan
    tl.store(out + at, value, inside)


@triton.jit
def _relu_grad(grad, out, result, parts, rows, columns, blocks, RELU: tl.constexpr, M: tl.constexpr,
               N: tl.constexpr):  # fmt: skip
    replica = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (replica * rows + row)[:, None] * columns + column[None, :]
    value = tl.load(grad + at, inside, 0.0)
    if RELU:
        value = tl.where(tl.load(out + at, inside, 0.0) <= 0, 0.0, value)
        tl.store(result + at, value, inside)
    part = parts + (replica * blocks + tl.program_id(0)) * columns + column
    tl.store(part, tl.sum(value, 0), column < columns)


@triton.jit
def _bce(logits, labels, grads, parts, total, factor, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    z, y = tl.load(logits + at, inside, 0.0), tl.load(labels + at, inside, 0.0)
    small = tl.exp(-tl.abs(z))
    below = 1 + small
    # log(1 + e), exact for a small e too
    log = tl.where(below == 1, small, tl.log(below) * (small / tl.where(below == 1, 1.0, below - 1)))
    positive, negative = tl.where(z >= 0, 1.0, small) / below, tl.where(z >= 0, small, 1.0) / below
    # the probability minus the label, without cancellation
    tl.store(grads + at, ((1 - y) * positive - y * negative) * factor, inside)
    loss = tl.where(inside, tl.maximum(z, 0.0) - z * y + log, 0.0)
    tl.store(parts + tl.program_id(0), tl.sum(loss) * factor)


def add_bias(out: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
    """Add the biases (R, O) to the outputs (R, B, O), in place, and apply ReLU."""
    replicas, rows, columns = out.shape
    if out.numel():
        _bias_relu[_grid(replicas, rows, columns)](out, bias, rows, columns, RELU=relu, **_tile(columns))
    return out


def relu_grad(grad: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient (R, B, O) before the ReLU with these outputs, if any, and that (R, O) of the bias."""
    replicas, rows, columns = grad.shape
    grad = grad.contiguous()
    grid = _grid(replicas, rows, columns)
    result = grad if out is None else torch.empty_like(grad)
    parts = grad.new_empty(replicas, grid[0], columns)
    if grad.numel():
        saved = grad if out is None else out
        _relu_grad[grid](grad, saved, result, parts, rows, columns, grid[0], RELU=out is not None, **_tile(columns))
    return result, parts[:, 0] if grid[0] == 1 else parts.sum(1)


class BinaryCrossEntropy(torch.autograd.Function):
    """Sum over the columns of the mean over the rows of the binary cross entropy of logits (B, T)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; its gradient comes from the same kernel."""
        values, labels = logits.contiguous(), labels.contiguous()
        total, blocks = logits.numel(), triton.cdiv(logits.numel(), LOSS_SIZE)
        grads, parts = torch.empty_like(values), logits.new_empty(blocks)
        _bce[(blocks,)](values, labels, grads, parts, total, 1 / len(logits), SIZE=LOSS_SIZE)
        ctx.save_for_backward(grads, logits, labels)
        return parts[0] if blocks == 1 else parts.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the logits."""
        grads, logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: functions of torch, which can be differentiated again
            return (logits.sigmoid() - labels) * (grad / len(logits)), None
        return grads * grad, None


def _grid(replicas: int, rows: int, columns: int) -> tuple[int, int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(columns, _tile(columns)["N"]), replicas


def _tile(columns: int) -> dict[str, int]:
    return {"M": ROWS, "N": min(COLUMNS, max(16, triton.next_power_of_2(columns)))}
