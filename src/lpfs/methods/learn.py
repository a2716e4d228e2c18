"""Learn: train a mask beside the model through the one loop, and read which fields it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.embeddings.row_grad import clear_grads
from lpfs.errors import InputError
from lpfs.methods.centre import centre
from lpfs.methods.effort import Effort
from lpfs.methods.held import Held, held_loss
from lpfs.methods.masks import FieldMask, Mask, TokenMask, check_wearer, worn
from lpfs.methods.polarize import RECORDS
from lpfs.methods.ranking import cut
from lpfs.methods.task import Task
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State

FAINT = 1e-3  # how far below those that are kept the others begin


def learn(
    task: Task,
    method: str,
    make: Callable[[Model], FieldMask | TokenMask],
    *,
    lr: float,
    held: bool = False,
    every: int = 1,
) -> Selection:
    """Train the mask of a method, moved by Adam, together with the model, and return what it says.

    As for gates, the model is centred first: a mask takes away only what tells rows apart. Fields that the mask
    itself would drop are ranked, below those it keeps, by its mean over the search: who died last is first.

    Args:
        task: the search.
        method: its name.
        make: makes the mask for the model.
        lr: learning rate of the mask.
        held: whether the mask always moves on held-out rows; otherwise it does where the task has rows that the
            weights never see, because its others come again, and moves on the rows of the step elsewhere.
        every: steps between two moves on held-out rows.

    """
    model = check_wearer(task.model, method)
    if task.training.graph:
        raise InputError(
            f"{method} draws and counts in every step, which a captured graph cannot; leave out graph="
        )
    centre(model, task.stream)
    mask = make(model)
    task.wish.check(mask.names)
    rows = Held.of(task, method) if held or task.held is not None else None
    effort = Effort()
    with worn(model, mask, method):
        driver = Learn(mask, torch.optim.Adam(mask.parameters(), lr=lr), effort, rows, every)
        try:
            task.fit(effort, driver)
        finally:
            if rows is not None:
                rows.close()
        own = mask.own()
        found = mask.scores() if own is None else below(mask.scores(), own, driver.mean)
        scores = dict(zip(mask.names, found.tolist(), strict=True))
    kept = None if own is None else [name for name, each in zip(mask.names, own.tolist(), strict=True) if each]
    chosen = cut(task, method, scores, kept, steps=task.steps, **effort.told())
    return replace(chosen, history=tuple(driver.history))


def below(scores: Tensor, own: Tensor, mean: Tensor) -> Tensor:
    """Return scores in which fields that are not kept come below all others, in the order of another score (N,).

    >>> own = torch.tensor([False, True, False, False])
    >>> below(torch.tensor([0.2, 0.9, 0.1, 0.0]), own, torch.tensor([0.3, 1.0, 0.5, 0.1]))
    tensor([0.6990, 0.9000, 0.8990, 0.4990])
    """
    if not bool((~own).any()):
        return scores
    floor = scores[own].min() if bool(own.any()) else scores.max()
    mean = mean.to(scores)
    lower = mean - mean[~own].max()  # 0 for the best of them, less for the others
    return torch.where(own, scores, floor - FAINT + lower)


class Learn(Callback):
    """Moves a mask, with the model in every step or on held-out rows now and then."""

    def __init__(
        self, mask: Mask, optimizer: torch.optim.Optimizer, effort: Effort, held: Held | None, every: int
    ) -> None:
        self.mask, self.optimizer, self.effort, self.held, self.every = mask, optimizer, effort, held, every
        self.pause = max(1, mask.steps // RECORDS)
        self.mean = torch.zeros(len(mask.names), dtype=torch.float64)  # of the scores, over the search
        self.history: list[dict[str, Any]] = []

    def on_begin(self, state: State) -> None:
        """Tell the mask when it is; on its own rows it moves alone."""
        self.mask.at(state.step)
        self.mask.requires_grad_(self.held is None)

    def before_backward(self, state: State) -> None:
        """Add the penalty to the loss."""
        if self.held is None and state.loss is not None and state.batch is not None:
            penalty = self.mask.penalty(len(state.batch))
            state.loss = state.loss if penalty is None else state.loss + penalty

    def within_step(self, state: State) -> None:
        """Move the mask."""
        if self.held is None:
            self.optimizer.step()
        elif (state.step + 1) % self.every == 0:
            self._move(state, self.held)

    def _move(self, state: State, held: Held) -> None:
        """Take a step of the mask alone on held-out rows."""
        batch = held.next()
        with alone(state.model, self.mask):
            loss = held_loss(state, batch)
            penalty = self.mask.penalty(len(batch))
            torch.autograd.backward(loss if penalty is None else loss + penalty)
            self.optimizer.step()
            clear_grads(self.mask.parameters())
        self.effort.add(forwards=len(batch), backwards=len(batch))

    def after_step(self, state: State) -> None:
        """Tell the mask when it is, and write down where it stands, now and then."""
        self.mask.at(state.step)
        if state.step % self.pause == 0 or state.step == self.mask.steps:
            own, scores = self.mask.own(), self.mask.scores()
            self.mean += scores.double().cpu() * self.pause / self.mask.steps
            self.history.append(
                {
                    "step": state.step,
                    "loss": float("nan") if state.loss is None else float(state.loss.detach()),
                    "alive": len(scores) if own is None else int(own.sum()),
                    "gates": [round(each, 6) for each in scores.tolist()],
                }
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill; what the mask has learnt is part of the model."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "draw": self.mask.draw.get_state(),
            "held": None if self.held is None else self.held.state_dict(),
            "history": list(self.history),
            "mean": self.mean.clone(),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.optimizer.load_state_dict(values["optimizer"])
        self.mask.draw.set_state(values["draw"])
        if self.held is not None:
            self.held.load_state_dict(values["held"])
        self.history = list(values["history"])
        self.mean = values["mean"].clone()


@contextmanager
def alone(model: nn.Module, mask: Mask) -> Iterator[None]:
    """Within this block only the mask has a gradient; outside of it only the rest of the model."""
    own = {id(each) for each in mask.parameters()}
    others = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
    try:
        for each in others:
            each.requires_grad_(False)
        mask.requires_grad_(True)
        yield
    finally:
        mask.requires_grad_(False)
        for each in others:
            each.requires_grad_(True)
