"""Held: rows that the weights do not learn from, for gates and masks that move on them alone."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.methods.task import Task
from lpfs.train.callbacks import State
from lpfs.train.checkpoint import Resumable
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import rank_batches, weighted_mean
from lpfs.train.evaluate import autocast, device_of, on_device, predict_batch
from lpfs.train.step import bce_loss


class Held:
    """Batches one by one, over and over; where they stand can be saved."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = rank_batches(batches)
        self._passing: Iterator[Batch] | None = None

    @classmethod
    def of(cls, task: Task, method: str) -> Held:
        """Return the held-out rows of a task: its own, or else those for choices, in batches as of the weights."""
        if task.held is not None:
            return cls(task.held)
        batches = task.valid
        if batches is None:
            raise InputError(f"{method} moves its mask on rows held out of the training: give valid=")
        if isinstance(batches, Stream) and isinstance(task.stream, Stream):
            names = batches.schema.names
            size, device = task.stream.batch_size, batches.device
            batches = batches.dataset.stream(size, shuffle=True, seed=task.seed, fields=names, device=device)
        return cls(batches)

    def next(self) -> Batch:
        """Return the next batch; after the last comes the first again."""
        for _ in range(2):
            if self._passing is None:
                self._passing = iter(self.batches)
            for batch in self._passing:
                return batch
            self._passing = None
        raise InputError("the held-out rows gave no batch in a pass; is it a generator that is used up?")

    def close(self) -> None:
        """Let go of a pass that is under way."""
        if isinstance(self._passing, Generator):
            self._passing.close()
        self._passing = None

    def state_dict(self) -> dict[str, Any]:
        """Return where they stand; empty if they cannot tell."""
        return self.batches.state_dict() if isinstance(self.batches, Resumable) else {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from there."""
        if not isinstance(self.batches, Resumable):
            raise InputError("resume needs held-out rows with state_dict and load_state_dict, such as lpfs.Stream")
        self.close()
        self.batches.load_state_dict(values)


@contextmanager
def unmoved(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this block these parameters gather no gradient."""
    moving = [each for each in parameters if each.requires_grad]
    for each in moving:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in moving:
            each.requires_grad_(True)


def held_loss(state: State, batch: Batch) -> Tensor:
    """Return the loss of the model on a batch, as the loop computes it."""
    device = device_of(state.model)
    with autocast(state.config.precision, device):
        logits, labels = predict_batch(state.model, on_device(batch, device))
    return bce_loss(logits, labels, state.config.task_weights)


def held_grad(state: State, batch: Batch, wanted: Tensor, others: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of that loss to one tensor; the other parameters are left alone."""
    with unmoved(others):
        (found,) = torch.autograd.grad(held_loss(state, batch), [wanted])
    return weighted_mean(current_group(), found, len(batch), "adding up gradients of held-out rows")
