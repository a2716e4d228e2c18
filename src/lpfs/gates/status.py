"""Status: where a search stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Where a search stands; ``print`` it for one readable line."""

    step: int
    steps: int
    alive: int
    total: int
    smallest: float
    epsilon: float
    lr: float
    penalty: float
    frozen: bool

    def __str__(self) -> str:
        settled = ", settled" if self.frozen else ""
        return (
            f"step {self.step:,} of {self.steps:,}: {self.alive} of {self.total} gates alive{settled}, "
            f"smallest |g| {self.smallest:.3g}, ε {self.epsilon:.2g}, η {self.lr:.2g}, λ {self.penalty:.3g}"
        )
