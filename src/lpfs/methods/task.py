"""Task: what every method is given, whatever it does with it.

A method is a module with ``Options``, settings that check themselves; ``check(options, wish, names, steps)``,
which refuses what could not be begun; and ``search(task)``, which returns the Selection and leaves the model with
its gates on, where the method has gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs.data.batch import Batch
from lpfs.methods.wish import Wish
from lpfs.train.callbacks import Callback
from lpfs.train.config import Training
from lpfs.train.fit import fit


@dataclass
class Task:
    """One search.

    Args:
        model: pretrained; trained further in place.
        optimizer: of the model's parameters.
        stream: batches of the search period.
        valid: held-out batches of it, on which every choice is made.
        held: batches of rows that the weights of the model never see, for what learns beside them: gates, a second
            optimizer. None: every row of ``stream`` is new when it comes, so they may learn from it too.
        wish: what is asked for.
        steps: how many steps the search may take.
        seed: of everything that is drawn.
        folder: where checkpoints and logs go; None: nowhere.
        resume: go on from the last checkpoint there.
        training: settings of the loop.
        options: settings of the method; an unknown one is an error.

    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: Iterable[Batch]
    valid: Iterable[Batch] | None
    wish: Wish
    steps: int
    seed: int = 0
    folder: Path | None = None
    resume: bool = False
    training: Training = field(default_factory=Training)
    options: Mapping[str, Any] = field(default_factory=dict)
    held: Iterable[Batch] | None = None

    def fit(
        self,
        *callbacks: Callback,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        steps: int | None = None,
        within: str = "",
    ) -> None:
        """Train on the search period, with callbacks that do what the method does.

        Args:
            callbacks: called in this order.
            model, optimizer: others than those of the task.
            steps: another number of them.
            within: a folder in that of the task.

        """
        fit(
            model or self.model,
            self.stream,
            optimizer or self.optimizer,
            folder=None if self.folder is None else self.folder / within,
            resume=self.resume,
            callbacks=list(callbacks),
            config=replace(self.training, steps=steps or self.steps, epochs=None, lr=None),
        )
