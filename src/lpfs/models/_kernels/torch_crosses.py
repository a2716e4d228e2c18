"""The crosses in torch operations: run after run, so that no temporary is as large as the result."""

from __future__ import annotations

import torch
from torch import Tensor

from lpfs.models._kernels import CrossPlan


def forward(plan: CrossPlan, tokens: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """Write g_p · e_i or g_p · e_i ⊙ e_j of embeddings (B, N, D) into their places of ``out`` (B, ≥ slots·D)."""
    parts = _parts(plan, out)
    for run in plan.runs:
        second = tokens[:, run.second : run.second + run.count]
        target = parts[:, run.place : run.place + run.count]
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
    own = torch.zeros_like(tokens)
    of_gate = None if gate is None else torch.zeros_like(gate)
    for run in plan.runs:
        numbers = slice(run.part, run.part + run.count)
        several = slice(run.second, run.second + run.count)
        given, second = parts[:, run.place : run.place + run.count], tokens[:, several]
        back = given * second  # (B, count, D)
        if run.first is not None:
            first = tokens[:, run.first : run.first + 1]
            if of_gate is not None:
                of_gate[numbers] = (back * first).sum((0, 2))
        elif of_gate is not None:
            of_gate[numbers] = back.sum((0, 2))
        scaled = given if gate is None else given * gate[numbers, None]
        if run.first is None:
            own[:, several] += scaled
        else:
            own[:, run.first] += (back if gate is None else back * gate[numbers, None]).sum(1)
            own[:, several].addcmul_(scaled, first)
    return own, of_gate


def _parts(plan: CrossPlan, flat: Tensor) -> Tensor:
    """Return (B, slots, D) as a view of (B, ≥ slots·D)."""
    parts: Tensor = flat[:, : plan.slots * plan.dim].unflatten(1, (plan.slots, plan.dim))
    return parts
