"""Callback: hooks into the loop that do nothing by default; State: what they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics


def _discard_record(kind: str, values: dict[str, Any]) -> None:
    """Write a record nowhere: there is no log."""


@dataclass
class State:
    """Where training stands; a callback may replace ``loss`` before backward and set ``stop``.

    Args:
        model: what is trained.
        optimizer: of the model's parameters.
        config: the settings.
        steps: how many steps there will be; None if not known.
        step: how many are done.
        rows: how many rows were trained on.
        batch: the batch of this step.
        loss: its loss, a tensor that backward starts from.
        metrics: the last evaluation.
        best: the best evaluation, and ``best_step`` when it was.
        waiting: evaluations since then.
        stop: why training ends now; empty while it goes on.
        note: writes a record of a kind into the log, numbers by name; under ``values``, many numbers at once by
            name, which become a histogram.
        recapture: set by a callback that changed what a captured graph has in it; see ``within_step``.

    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: Training
    steps: int | None = None
    step: int = 0
    rows: int = 0
    batch: Batch | None = None
    loss: Tensor | None = None
    metrics: Metrics | None = None
    best: Metrics | None = None
    best_step: int | None = None
    waiting: int = 0
    stop: str = ""
    note: Callable[[str, dict[str, Any]], None] = field(default=_discard_record, repr=False)
    recapture: bool = False


class Callback:
    """Hooks into the loop; override those you need.

    Whatever a callback carries from step to step belongs into ``state_dict``: it is saved in every checkpoint
    and handed back on resume, before ``on_begin``. Tensors, numbers, text, None, lists, tuples and dictionaries
    of them can be saved; tensors come back on the CPU.

    >>> class Count(Callback):
    ...     seen = 0
    ...     def after_step(self, state):
    ...         self.seen += len(state.batch)
    ...     def state_dict(self):
    ...         return {"seen": self.seen}
    ...     def load_state_dict(self, values):
    ...         self.seen = values["seen"]
    """

    def on_begin(self, state: State) -> None:
        """Act when training begins, or goes on after a resume."""

    def fetch(self, state: State) -> bool:
        """Act before a step: get what ``within_step`` will read, and say whether the step may be a replay.

        With ``graph=True`` this is not captured: copy a new batch to where ``within_step`` read the first one.
        False takes this step without the graph.
        """
        return True

    def before_backward(self, state: State) -> None:
        """Act when the loss is computed: add to ``state.loss`` what should be minimised with it."""

    def before_step(self, state: State) -> None:
        """Act when the gradients are there and no parameter has moved: the place to refuse a step."""

    def within_step(self, state: State) -> None:
        """Act when the model's optimizer has moved: move what is yours, as part of the step.

        With ``graph=True`` this, like ``before_backward`` and ``before_step``, is captured once and replayed, so
        it must not look at a number on the GPU, nor count on the host.
        """

    def after_step(self, state: State) -> None:
        """Act when ``state.step`` counts this step: write down, look, set ``state.stop``."""

    def on_evaluate(self, state: State) -> None:
        """Act when ``state.metrics`` is new."""

    def on_checkpoint(self, state: State, path: Path) -> None:
        """Act when a checkpoint is complete on the disk."""

    def on_end(self, state: State) -> None:
        """Act when training has ended; not called when an error ends it."""

    def describe(self, state: State) -> str:
        """Return a word on where things stand for the line that training shows; it is asked for often."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
