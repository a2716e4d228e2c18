"""Crosses: gated element-wise products of embeddings, written directly into one buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpfs._imports import has_numba
from lpfs.errors import InputError
from lpfs.gates.sites import PartWeight
from lpfs.models._kernels import CrossPlan, numba_crosses, torch_crosses

MIN_NUMBA_SIZE = 1 << 18  # elements of the result from which the numba kernel is faster
MAX_OVERSIZE = 8  # a buffer is reused if it is at most this many times larger than needed


class Crosses(nn.Module):
    r"""A concatenation of embeddings and of products of two embeddings: part p is

    .. math:: g_p\, e_i \quad\text{or}\quad g_p\, e_i \odot e_j

    The module applies the gates itself, one per part. It has no weights: a gate is absorbed by the Linear layer
    that takes the result.

    Args:
        parts: for each part the index of its embedding, or of the two that are multiplied.
        dim: width of an embedding.
        places: slot of each part in the result, increasing; the other slots are zero.
        slots: number of slots.
        kernel: ``numba`` (float32 on a CPU), ``torch``, or ``auto``: numba where it is installed and faster. The
            forward results are bitwise identical; in the gradient the order of sums differs.

    >>> crosses = Crosses([(0,), (1,), (0, 1)], dim=2)
    >>> crosses(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[1., 2., 3., 4., 3., 8.]])
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, ...]],
        dim: int,
        *,
        places: Sequence[int] | None = None,
        slots: int | None = None,
        kernel: Literal["auto", "numba", "torch"] = "auto",
    ) -> None:
        super().__init__()
        if kernel not in ("auto", "numba", "torch"):
            raise InputError(f"kernel must be auto, numba or torch, found {kernel!r}")
        self.gate: Callable[[], Tensor | None] | None = None
        self.parts, self.dim, self.kernel = len(parts), dim, kernel
        part_slots = list(range(len(parts))) if places is None else list(places)
        self.slots = len(parts) if slots is None else slots
        self.plan = CrossPlan.build(parts, part_slots, dim, self.slots)
        self._buffer = ReusableBuffer()

    def forward(self, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return (B, slots·D + E) for embeddings (B, N, D) and columns (B, E) to append."""
        gate = None if self.gate is None else self.gate()
        if gate is not None:
            gate = gate.to(tokens.dtype)
        arguments = tokens, gate, beside, self.plan, self._buffer, self._kernel_for(tokens)
        out: Tensor = CrossFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        return out

    def _kernel_for(self, tokens: Tensor) -> Any:
        if self.kernel == "auto" and tokens.is_cuda:
            return _gpu_kernel()
        if self.kernel == "torch" or tokens.device.type != "cpu" or tokens.dtype != torch.float32:
            return torch_crosses
        is_small = self.kernel == "auto" and tokens.shape[0] * self.parts * self.dim < MIN_NUMBA_SIZE
        return torch_crosses if is_small or not has_numba() else numba_crosses

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return an empty list: no weight of this module multiplies a part."""
        return []

    def extra_repr(self) -> str:
        return f"{self.parts} parts in {self.slots} slots, dim={self.dim}"


@cache
def _gpu_kernel() -> Any:
    try:
        from lpfs.models._kernels import triton_crosses
    except ImportError:
        return torch_crosses
    return triton_crosses


class CrossFunction(torch.autograd.Function):
    """The parts of a plan, in memory that is reused when no tensor refers to it any more."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        gate: Tensor | None,
        beside: Tensor | None,
        plan: CrossPlan,
        buffer: ReusableBuffer,
        kernel: Any,
    ) -> Tensor:
        tokens = tokens.contiguous()
        extra = 0 if beside is None else beside.shape[1]
        out = buffer.take(tokens, len(tokens), plan.slots * plan.dim + extra)
        if len(plan.parts) < plan.slots:
            out[:, : plan.slots * plan.dim].zero_()
        kernel.forward(plan, tokens, gate, out)
        if beside is not None:
            out[:, plan.slots * plan.dim :] = beside
        ctx.save_for_backward(tokens, gate)
        ctx.plan, ctx.kernel, ctx.beside = plan, kernel, beside is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tokens, gate = ctx.saved_tensors
        grad = grad.contiguous()
        token_grad, gate_grad = ctx.kernel.backward(ctx.plan, tokens, gate, grad)
        beside = grad[:, ctx.plan.slots * ctx.plan.dim :] if ctx.beside else None
        return token_grad, gate_grad, beside, None, None, None


class ReusableBuffer:
    """CPU memory that is reused when no tensor refers to it; on a GPU the allocator of torch does this."""

    def __init__(self) -> None:
        self._cached: list[torch.UntypedStorage] = []

    def take(self, like: Tensor, rows: int, width: int) -> Tensor:
        """Return an uninitialized tensor (rows, width)."""
        size = rows * width * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(rows, width)
        try:
            storage = self._cached.pop()  # taken out, so that no other thread can use it
        except IndexError:
            storage = None
        # a use count above 1: a tensor, or a value saved by autograd, refers to the memory
        if (
            storage is None
            or not size <= storage.nbytes() <= MAX_OVERSIZE * size
            or torch._C._storage_Use_Count(storage._cdata) != 1
        ):
            storage = torch.UntypedStorage(size)
        out = torch.empty(0, dtype=like.dtype).set_(storage, 0, (rows, width), (width, 1))
        self._cached[:] = [storage]
        return out

    def __reduce__(self) -> Any:
        return ReusableBuffer, ()  # copies and pickles are empty
