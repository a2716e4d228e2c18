"""Spent: what a search costs, in seconds and in rows that went through a model."""

from __future__ import annotations

import time
from typing import Any


class Spent:
    """Counts from when it is made; ``seconds`` and rows that an earlier process spent can be added.

    >>> spent = Spent()
    >>> spent.forward(512)
    >>> {name: value for name, value in spent.told().items() if name != "seconds"}
    {'forwards': 512, 'backwards': 0}
    """

    def __init__(self) -> None:
        self.begin, self.before = time.perf_counter(), 0.0
        self.forwards = self.backwards = 0

    @property
    def seconds(self) -> float:
        """Seconds so far, those of an earlier process too."""
        return self.before + time.perf_counter() - self.begin

    def forward(self, rows: int, *, backward: bool = False) -> None:
        """Count rows that went forward, and back again where ``backward`` says so."""
        self.forwards += rows
        self.backwards += rows if backward else 0

    def told(self) -> dict[str, Any]:
        """Return what a Selection says of it: seconds, and rows forward and backward."""
        return {"seconds": self.seconds, "forwards": self.forwards, "backwards": self.backwards}
