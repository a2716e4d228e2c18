"""Callback: hooks into the training loop; State: the state of training that the hooks receive."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics


def ignore_record(kind: str, values: dict[str, Any]) -> None:
    """Log nothing."""


@dataclass
class State:
    """The state of training; a callback may replace ``loss`` before backward and set ``stop``.

    Args:
        model: the model in training.
        optimizer: the optimizer of its parameters.
        config: the settings.
        steps: total number of steps; None if unknown.
        step: number of completed steps.
        rows: number of rows trained on.
        batch: the batch of this step.
        loss: the loss of the batch, on which backward is called.
        metrics: the last evaluation.
        best: the best evaluation.
        best_step: the step of the best evaluation.
        waiting: number of evaluations since the best one.
        stop: the reason to end training after this step; empty to continue.
        note: function that logs a record of a kind with numbers by name; arrays under the key ``values`` become
            histograms.
        recapture: set it to True after a change to anything that a captured graph uses; see ``within_step``.
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
    note: Callable[[str, dict[str, Any]], None] = field(default=ignore_record, repr=False)
    recapture: bool = False


class Callback:
    """Hooks into the training loop; override the ones you need.

    The state that a callback keeps between steps belongs into ``state_dict``: it is saved in every checkpoint and
    restored on resume, before ``on_begin``. It can contain tensors, numbers, text, None, lists, tuples and
    dictionaries; tensors are restored on the CPU.

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
        """Run when training starts or resumes."""

    def fetch(self, state: State) -> bool:
        """Prepare the inputs of ``within_step`` before a step; return whether a captured graph can be replayed.

        With ``graph=True`` this hook is not captured: copy a new batch into the tensors that ``within_step``
        used at the capture. If it returns False, this step runs without the graph.
        """
        return True

    def variant(self, state: State) -> Hashable:
        """Return what the captured hooks of this step branch on: with ``graph=True``, one graph per value is captured.

        It is called after ``fetch``. Return few different values, such as whether a mask is updated in this step.
        """
        return None

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators, on the GPU, that the model and the captured hooks draw from in a step."""
        return ()

    def before_backward(self, state: State) -> None:
        """Run after the loss is computed; add further terms to ``state.loss`` here."""

    def before_step(self, state: State) -> None:
        """Run after backward, before any parameter changes; raise here to reject a step."""

    def within_step(self, state: State) -> None:
        """Run after the optimizer step of the model; update the callback's own parameters here.

        With ``graph=True`` this hook, like ``before_backward`` and ``before_step``, is captured once and
        replayed: it must not read values from the GPU, count on the host, or branch on what changes between
        steps, except on :meth:`variant`. What changes belongs into tensors that ``fetch`` or ``after_step`` fill.
        """

    def after_step(self, state: State) -> None:
        """Run after the step is counted in ``state.step``; log values or set ``state.stop`` here."""

    def on_evaluate(self, state: State) -> None:
        """Run after an evaluation; ``state.metrics`` is new."""

    def on_checkpoint(self, state: State, path: Path) -> None:
        """Run after a checkpoint is written to disk."""

    def on_end(self, state: State) -> None:
        """Run after training; not called if an error ends it."""

    def describe(self, state: State) -> str:
        """Return a short text for the progress display; it is called often."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
