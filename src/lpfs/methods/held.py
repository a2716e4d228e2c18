"""Rows that the weights of a model never see: endless batches of them, and the gradient of gates alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batches.batch import Batch
from lpfs.errors import InputError
from lpfs.train.callback import State
from lpfs.train.predict import autocast, device_of, on_device, predict
from lpfs.train.snapshot import place, position_of
from lpfs.train.step import loss_of


class Endless:
    """The batches of a stream, one after another, from the beginning again when it ends.

    >>> numbers = Endless([1, 2])
    >>> [numbers.take() for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream = stream
        self._under_way: Iterator[Any] | None = None

    def take(self) -> Any:
        """Return the next batch."""
        for _ in range(2):
            if self._under_way is None:
                self._under_way = iter(self.stream)
            for batch in self._under_way:
                return batch
            self._under_way = None
        raise InputError("the held-out stream gave no batch in a pass; is it a generator that is used up?")

    def state_dict(self) -> dict[str, Any]:
        """Return the position, where the stream can tell."""
        return {"position": position_of(self.stream)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from a position."""
        place(self.stream, values["position"], "held-out stream")
        self._under_way = None


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
        logits, labels = predict(state.model, on_device(batch, device))
    return loss_of(logits, labels, state.config.task_weights)


def held_grad(state: State, batch: Batch, wanted: Tensor, others: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of that loss to one tensor; the other parameters are left alone."""
    with unmoved(others):
        (found,) = torch.autograd.grad(held_loss(state, batch), [wanted])
    return found
