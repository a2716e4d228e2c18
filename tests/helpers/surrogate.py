"""A search without a network: the gradient of every gate follows from the known importance of its field."""

from __future__ import annotations

import torch
from torch import Tensor

from lpfs import Gates, gate_function


def importance(kind: str, size: int, keep: int) -> Tensor:
    """Return the curvature of the loss of every field in its gate."""
    if kind == "graded":
        return torch.linspace(0.001, 0.1, size)
    if kind == "tied":
        return torch.full((size,), 0.02)
    if kind == "useless":
        return torch.zeros(size)
    if kind == "duplicates":
        return torch.linspace(0.001, 0.1, size // 2 + 1).repeat_interleave(2)[:size]
    if kind == "few":
        return torch.tensor([0.05] * max(1, keep // 2) + [0.0] * (size - max(1, keep // 2)))
    if kind == "harmful":
        return torch.linspace(-0.05, 0.05, size)
    if kind == "strong":
        return torch.linspace(1, 100, size)
    raise ValueError(kind)


class Surrogate:
    """½ Σ importance·(1 - g)² + noise·g, whose minimum is all gates at one.

    A field of negative importance is harmful: ½ |importance|·g².
    """

    def __init__(self, kind: str, size: int, keep: int | None, steps: int, gate: str, **optimizer) -> None:
        self.gates = Gates([f"f{n}" for n in range(size)], gate_function(gate), steps)
        self.prox = self.gates.optimizer(keep=keep, **optimizer)
        self.importance = importance(kind, size, keep or size)
        self.noise = 0.0 if kind in ("useless", "tied") else 0.01 * float(self.importance.max().clamp(max=1.0)) * 10

    def backward(self) -> None:
        """Compute the gradient of x."""
        number = int(self.gates.steps_done)
        generator = torch.Generator().manual_seed(number)
        values = self.gates()
        jolt = self.noise * torch.randn(len(self.importance), generator=generator)
        self.prox.zero_grad()
        missed = self.importance.clamp(min=0) * (1 - values) ** 2 - self.importance.clamp(max=0) * values**2
        (0.5 * missed + jolt * values).sum().backward()

    def step(self) -> None:
        """Take one step of the optimizer and of the gates."""
        self.backward()
        self.prox.step()
        self.gates.step()

    def run(self, steps: int | None = None) -> Gates:
        """Take some steps, by default all, and return the gates."""
        for _ in range(self.gates.steps if steps is None else steps):
            self.step()
        return self.gates
