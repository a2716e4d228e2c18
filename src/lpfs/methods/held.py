"""Held: rows that the weights do not learn from, for a method that moves its mask on them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from lpfs.data.batches.batch import Batch
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.methods.task import Task
from lpfs.train.snapshot import Resumable


class Held:
    """Batches one by one, over and over; where they stand can be saved."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self._passing: Iterator[Batch] | None = None

    @classmethod
    def of(cls, task: Task, method: str) -> Held:
        """Return the held-out rows of a task, in batches as large as those that the weights are trained on."""
        batches = task.valid if task.held is None else task.held
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
        self.batches.load_state_dict(values)
