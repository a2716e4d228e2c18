"""Crosses with torch operations, range by range, so that no temporary is as large as the result."""

from __future__ import annotations

import torch
from torch import Tensor

from lpfs.models._kernels import CrossPlan


def forward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write g_p · e_i or g_p · e_i ⊙ e_j of embeddings (B, N, D) into their slots of ``out`` (B, ≥ slots·D)."""
    parts = _parts(plan, out)
    for run in plan.ranges:
        second = tokens[:, run.second : run.second + run.count]
        target = parts[:, run.slot : run.slot + run.count]
        if run.first is None:
            target.copy_(second)
        else:
            torch.mul(tokens[:, run.first : run.first + 1], second, out=target)
        if gate is not None:
            target.mul_(gate[run.part : run.part + run.count, None])


def backward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    r"""Return the gradients of embeddings and gates, from the gradient a_p of the parts.

    .. math:: \partial L/\partial e_i = \sum_{p=(i,j)} g_p\, a_p \odot e_j, \qquad
              \partial L/\partial g_p = \langle a_p, e_i \odot e_j \rangle
    """
    parts = _parts(plan, grad)
    token_grad = torch.zeros_like(tokens)
    gate_grad = None if gate is None else torch.zeros_like(gate)
    for run in plan.ranges:
        in_gate = slice(run.part, run.part + run.count)
        in_tokens = slice(run.second, run.second + run.count)
        part_grad, second = parts[:, run.slot : run.slot + run.count], tokens[:, in_tokens]
        product = part_grad * second  # (B, count, D)
        first = None if run.first is None else tokens[:, run.first : run.first + 1]
        if gate is not None and gate_grad is not None:
            gate_grad[in_gate] = (product if first is None else product * first).sum((0, 2))
            part_grad, product = part_grad * gate[in_gate, None], product * gate[in_gate, None]
        if first is None:
            token_grad[:, in_tokens] += part_grad
        else:
            token_grad[:, run.first] += product.sum(1)
            token_grad[:, in_tokens].addcmul_(part_grad, first)
    return token_grad, gate_grad


def _parts(plan: CrossPlan, flat: Tensor) -> Tensor:
    """Return (B, slots, D) as a view of (B, ≥ slots·D)."""
    parts: Tensor = flat[:, : plan.slots * plan.dim].unflatten(1, (plan.slots, plan.dim))
    return parts
