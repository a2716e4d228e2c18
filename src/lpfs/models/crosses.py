"""Crosses: element-wise products of embeddings, written with their gates straight into one buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpfs.errors import InputError
from lpfs.gates.parts import PartWeight
from lpfs.models._kernels import CrossPlan, numba_crosses, torch_crosses

MIN_REUSE = 1 << 18  # products from which on the faster kernel is worth its start
MAX_BUFFERS = (
    8  # times more memory than needed that is still used again: a short last batch, not a long evaluation
)


class Crosses(nn.Module):
    r"""Some embeddings and some products of two, side by side: part p is

    .. math:: g_p\, e_i \quad\text{or}\quad g_p\, e_i \odot e_j

    It takes gates itself, one a part. No weight multiplies a part here: a gate is absorbed by the Linear that
    reads the result.

    Args:
        parts: of each part the number of its embedding, or of the two that are multiplied.
        dim: width of an embedding.
        places: where in the result each part goes, increasing; zeros stand in the other places.
        slots: how many places there are.
        kernel: ``numba`` (float32 on a CPU), ``torch``, or ``auto``: the first where it can be had and pays. Both
            give the same bits forward; in the gradient the order of sums differs.

    >>> crosses = Crosses([(0,), (1,), (0, 1)], dim=2)
    >>> crosses(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[1., 2., 3., 4., 3., 8.]])

    """  # fmt: skip

    kernel: Literal["auto", "numba", "torch"]

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
        at = list(range(len(parts))) if places is None else list(places)
        self.slots = len(parts) if slots is None else slots
        self.plan = CrossPlan.build(parts, at, dim, self.slots)
        self._memory = ReusableBuffer()

    def forward(self, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return (B, slots·D + E) for embeddings (B, N, D) and what stands after them (B, E)."""
        gate = None if self.gate is None else self.gate()
        if gate is not None:
            gate = gate.to(tokens.dtype)
        out: Tensor = CrossFunction.apply(tokens, gate, beside, self.plan, self._memory, self._run(tokens))  # type: ignore[no-untyped-call]
        return out

    def _run(self, tokens: Tensor) -> Any:
        """Return the kernel for these embeddings."""
        if self.kernel == "auto" and tokens.is_cuda:
            return _on_gpu()
        if self.kernel == "torch" or tokens.device.type != "cpu" or tokens.dtype != torch.float32:
            return torch_crosses
        if self.kernel == "auto" and tokens.shape[0] * self.parts * self.dim < MIN_REUSE:
            return torch_crosses
        if numba_crosses.available():
            return numba_crosses
        return torch_crosses

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return nothing: no weight here multiplies a part."""
        return []

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the crosses."""
        return f"{self.parts} parts in {self.slots} places, dim={self.dim}"


@cache
def _on_gpu() -> Any:
    try:
        from lpfs.models._kernels import triton_crosses
    except ImportError:
        return torch_crosses
    return triton_crosses


class CrossFunction(torch.autograd.Function):
    """The products of a plan, in memory that is used again once nobody reads it any more."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        gate: Tensor | None,
        beside: Tensor | None,
        plan: CrossPlan,
        memory: ReusableBuffer,
        kernel: Any,
    ) -> Tensor:
        """Fill the buffer."""
        tokens = tokens.contiguous()
        extra = 0 if beside is None else beside.shape[1]
        out = memory.take(tokens, len(tokens), plan.slots * plan.dim + extra)
        if plan.unused_slots:
            out[:, : plan.slots * plan.dim].zero_()
        kernel.fill(plan, tokens, gate, out)
        if beside is not None:
            out[:, plan.slots * plan.dim :] = beside
        ctx.save_for_backward(tokens, gate)
        ctx.plan, ctx.kernel, ctx.beside = plan, kernel, beside is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the embeddings, the gates, and what stands after them."""
        tokens, gate = ctx.saved_tensors
        grad = grad.contiguous()
        own, of_gate = ctx.kernel.reduce(ctx.plan, tokens, gate, grad)
        beside = grad[:, ctx.plan.slots * ctx.plan.dim :] if ctx.beside else None
        return own, of_gate, beside, None, None, None


class ReusableBuffer:
    """One piece of memory that is handed out again when nobody else holds it; a GPU's own allocator does that."""

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []

    def take(self, like: Tensor, rows: int, width: int) -> Tensor:
        """Return (rows, width) of undefined values."""
        size = rows * width * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(rows, width)
        try:
            storage = self._kept.pop()  # whoever has it in hand is alone with it
        except IndexError:
            storage = None
        if storage is None or not size <= storage.nbytes() <= MAX_BUFFERS * size or _is_referenced(storage):
            storage = torch.UntypedStorage(size)
        out = torch.empty(0, dtype=like.dtype).set_(storage, 0, (rows, width), (width, 1))
        self._kept[:] = [storage]
        return out

    def __deepcopy__(self, memo: Any) -> ReusableBuffer:
        return ReusableBuffer()

    def __reduce__(self) -> Any:
        return ReusableBuffer, ()


def _is_referenced(storage: torch.UntypedStorage) -> bool:
    """Whether anyone else, a tensor or what autograd saved, holds this memory."""
    return bool(torch._C._storage_Use_Count(storage._cdata) != 1)
