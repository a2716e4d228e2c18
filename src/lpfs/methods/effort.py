"""Effort: what a search cost, counted the same way for every method."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lpfs.train.callbacks import Callback, State
from lpfs.train.evaluate import Metrics


class Effort(Callback):
    """Seconds, and rows that went through the model, forward and backward; as a callback it counts the steps.

    Without a training loop, ``with effort:`` measures the seconds. What was spent before a kill counts too, up to
    the checkpoint that the search went on from.

    >>> effort = Effort()
    >>> with effort:
    ...     effort.add(forwards=512)
    >>> effort.told()["forwards"], effort.told()["backwards"]
    (512, 0)
    """

    def __init__(self) -> None:
        self.seconds, self.forwards, self.backwards = 0.0, 0, 0
        self._since: float | None = None

    def __enter__(self) -> Effort:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self._since = self.spent(), None

    def add(self, *, forwards: int = 0, backwards: int = 0) -> None:
        """Count rows that went through the model beside the steps."""
        self.forwards += forwards
        self.backwards += backwards

    def evaluated(self, found: Metrics) -> None:
        """Count the rows of an evaluation."""
        self.add(forwards=found.main.rows)

    def spent(self) -> float:
        """Return the seconds so far."""
        return self.seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def told(self) -> dict[str, Any]:
        """Return the record that goes into ``Selection.made``."""
        return {"seconds": round(self.spent(), 3), "forwards": self.forwards, "backwards": self.backwards}

    def on_begin(self, state: State) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def after_step(self, state: State) -> None:
        """Count the rows of a step."""
        if state.batch is not None:
            self.add(forwards=len(state.batch), backwards=len(state.batch))

    def on_end(self, state: State) -> None:
        """Stop the clock."""
        self.__exit__()

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {"seconds": self.spent(), "forwards": self.forwards, "backwards": self.backwards}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.seconds, self.forwards, self.backwards = values["seconds"], values["forwards"], values["backwards"]
