"""Training of masks: MaskMethod, its holdout rows, and the centering of embeddings before a search."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.embeddings.row_grad import clear_grads
from lpfs.errors import InputError
from lpfs.methods.base import HistoryCallback, Method, SearchCost, SearchTask, select_by_scores
from lpfs.methods.masks import FieldMask, Mask, TokenMask, apply_mask, check_maskable
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.checkpoint import Resumable
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import rank_batches, weighted_mean
from lpfs.train.evaluate import autocast, device_of, on_device, predict_batch
from lpfs.train.step import bce_loss

TIE_BREAK = 1e-3  # distance of the best rejected field below the worst selected one
CENTERING_ROWS = 20_000  # rows the mean is estimated on: any vector can move into the bias, the mean is the best


class MaskMethod(Method):
    """A method that trains a mask with Adam, together with the model.

    As for gates, the embeddings are centered first, so that a mask removes only what differs between rows.
    Fields that the mask itself rejects are ranked below the selected ones by their mean score over the search:
    the last one to be rejected comes first.

    Attributes:
        mask_class: class of the mask; its docstring has the formula.
        holdout_only: whether the mask is always trained on holdout rows, if need be on the validation rows.
            Otherwise it is if the task has holdout rows, and on the rows of the step elsewhere.
        update_every: steps between two updates of the mask on holdout rows.
    """

    mask_class: ClassVar[type[Mask]]
    holdout_only: ClassVar[bool] = False
    update_every: int = 1

    @abstractmethod
    def make_mask(self, model: Model, task: SearchTask) -> FieldMask | TokenMask:
        """Return the mask of a model."""

    def learning_rate(self, task: SearchTask) -> float:
        """Return the learning rate of the mask."""
        rate: float = self.options.lr
        return rate

    def search(self, task: SearchTask) -> Selection:
        """Train mask and model together; return the K best parts, or with ``penalty`` those the mask selects."""
        model = check_maskable(task.model, self.name)
        self.check(task.target, tuple(model.sites()), task.steps)
        if task.training.graph:
            raise InputError(
                f"{self.name} draws random numbers on the host in every step, which a CUDA graph cannot capture; "
                "remove graph="
            )
        needs_holdout = self.holdout_only or task.holdout is not None
        rows = HoldoutBatches.from_task(task, self.name) if needs_holdout else None
        center_embeddings(model, task.stream)
        mask, cost = self.make_mask(model, task), SearchCost()
        with apply_mask(model, mask, self.name):
            optimizer = torch.optim.Adam(mask.parameters(), lr=self.learning_rate(task))
            training = MaskTraining(mask, optimizer, cost, rows, self.update_every)
            try:
                task.fit(cost, training)
            finally:
                if rows is not None:
                    rows.close()
            mask_scores, selected = mask.scores(), mask.selected()
            if selected is not None:
                mask_scores = rank_selected_first(mask_scores, selected, training.mean)
            scores = dict(zip(mask.names, mask_scores.tolist(), strict=True))
        names = None
        if selected is not None:
            names = [name for name, chosen in zip(mask.names, selected.tolist(), strict=True) if chosen]
        selection = select_by_scores(task, self.name, scores, names, steps=task.steps, **cost.to_dict())
        return replace(selection, history=tuple(training.history))


def rank_selected_first(scores: Tensor, selected: Tensor, mean: Tensor) -> Tensor:
    """Return scores in which rejected fields are below all selected ones, in the order of another score (N,).

    >>> selected = torch.tensor([False, True, False, False])
    >>> rank_selected_first(torch.tensor([0.2, 0.9, 0.1, 0.0]), selected, torch.tensor([0.3, 1.0, 0.5, 0.1]))
    tensor([0.6990, 0.9000, 0.8990, 0.4990])
    """
    if not bool((~selected).any()):
        return scores
    floor = scores[selected].min() if bool(selected.any()) else scores.max()
    mean = mean.to(scores)
    lower = mean - mean[~selected].max()  # 0 for the best rejected field, negative for the others
    return torch.where(selected, scores, floor - TIE_BREAK + lower)


class MaskTraining(HistoryCallback):
    """Updates a mask: with the model in every step, or on holdout rows every ``update_every`` steps."""

    def __init__(
        self,
        mask: Mask,
        optimizer: torch.optim.Optimizer,
        cost: SearchCost,
        holdout: HoldoutBatches | None,
        update_every: int,
    ) -> None:
        super().__init__(mask.steps)
        self.mask, self.optimizer, self.cost = mask, optimizer, cost
        self.holdout, self.update_every = holdout, update_every
        self.mean = torch.zeros(len(mask.names), dtype=torch.float64)  # of the scores, over the search

    def on_begin(self, state: State) -> None:
        """Set the step of the mask; with holdout rows it gets no gradient from the step of the model."""
        self.mask.set_step(state.step)
        self.mask.requires_grad_(self.holdout is None)

    def before_backward(self, state: State) -> None:
        """Add the penalty to the loss."""
        if self.holdout is None and state.loss is not None and state.batch is not None:
            penalty = self.mask.penalty(len(state.batch))
            state.loss = state.loss if penalty is None else state.loss + penalty

    def within_step(self, state: State) -> None:
        """Update the mask."""
        if self.holdout is None:
            self.optimizer.step()
        elif (state.step + 1) % self.update_every == 0:
            self._update_on(state, self.holdout.next())

    def _update_on(self, state: State, batch: Batch) -> None:
        """Take a step of the mask alone on a batch of holdout rows."""
        with only_mask_requires_grad(state.model, self.mask):
            loss = holdout_loss(state, batch)
            penalty = self.mask.penalty(len(batch))
            torch.autograd.backward(loss if penalty is None else loss + penalty)
            self.optimizer.step()
            clear_grads(self.mask.parameters())
        self.cost.add(forwards=len(batch), backwards=len(batch))

    def after_step(self, state: State) -> None:
        """Set the step of the mask, and record its scores every few steps."""
        self.mask.set_step(state.step)
        if self.should_record(state.step):
            selected, scores = self.mask.selected(), self.mask.scores()
            self.mean += scores.double().cpu() * self.record_every / self.steps
            alive = len(scores) if selected is None else int(selected.sum())
            self.record(state, alive=alive, gates=[round(score, 6) for score in scores.tolist()])

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs; the parameters of the mask are part of the model."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.mask.draw.get_state(),
            "holdout": None if self.holdout is None else self.holdout.state_dict(),
            "history": list(self.history),
            "mean": self.mean.clone(),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.optimizer.load_state_dict(values["optimizer"])
        self.mask.draw.set_state(values["generator"])
        if self.holdout is not None:
            self.holdout.load_state_dict(values["holdout"])
        self.history = list(values["history"])
        self.mean = values["mean"].clone()


class HoldoutBatches:
    """Batches of rows that the weights are not trained on, repeated without end; the position can be saved."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = rank_batches(batches)
        self._iterator: Iterator[Batch] | None = None

    @classmethod
    def from_task(cls, task: SearchTask, method: str) -> HoldoutBatches:
        """Return the holdout rows of a task, or else its validation rows in batches of the training size."""
        if task.holdout is not None:
            return cls(task.holdout)
        batches = task.valid
        if batches is None:
            raise InputError(f"{method} trains its mask on held-out rows: give valid= or holdout=")
        if isinstance(batches, Stream) and isinstance(task.stream, Stream):
            names = batches.schema.names
            size, device = task.stream.batch_size, batches.device
            batches = batches.dataset.stream(size, shuffle=True, seed=task.seed, fields=names, device=device)
        return cls(batches)

    def next(self) -> Batch:
        """Return the next batch; the first one follows the last."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        raise InputError("the holdout rows gave no batch; give a stream or a list, not an exhausted generator")

    def close(self) -> None:
        """End the current pass and release its resources."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position; empty if the batches have none."""
        return self.batches.state_dict() if isinstance(self.batches, Resumable) else {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from a position."""
        if not isinstance(self.batches, Resumable):
            raise InputError("resume needs holdout rows with state_dict and load_state_dict, such as lpfs.Stream")
        self.close()
        self.batches.load_state_dict(values)


def holdout_loss(state: State, batch: Batch) -> Tensor:
    """Return the loss of the model on a batch, as the training loop computes it."""
    device = device_of(state.model)
    with autocast(state.config.precision, device):
        logits, labels = predict_batch(state.model, on_device(batch, device))
    return bce_loss(logits, labels, state.config.task_weights)


def holdout_grad(state: State, batch: Batch, tensor: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of that loss with respect to one tensor; these parameters get no gradient."""
    with no_grad_for(parameters):
        (grad,) = torch.autograd.grad(holdout_loss(state, batch), [tensor])
    return weighted_mean(current_group(), grad, len(batch), "averaging gradients of holdout rows")


@contextmanager
def no_grad_for(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Turn off the gradients of these parameters while the block runs."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def only_mask_requires_grad(model: nn.Module, mask: Mask) -> Iterator[None]:
    """Give gradients to the mask alone while the block runs, and afterwards to the rest of the model alone."""
    of_mask = {id(parameter) for parameter in mask.parameters()}
    with no_grad_for(parameter for parameter in model.parameters() if id(parameter) not in of_mask):
        mask.requires_grad_(True)
        try:
            yield
        finally:
            mask.requires_grad_(False)


@torch.no_grad()
def center_embeddings(model: Model, batches: Iterable[Batch], rows: int = CENTERING_ROWS) -> bool:
    """Move the mean of every embedding into the bias of the Linear that uses it, in place.

    A gate removes an embedding with its mean, which is the same for every row; a trained model needs the mean of
    a useless field like a bias. Since W e + b = W (e - ē) + (b + W ē), the mean can be moved into the bias
    before gates are attached. Then a gate removes only what differs between rows. Logits stay equal up to
    rounding.

    Args:
        model: with fields of one id per row; other fields are left as they are.
        batches: rows to estimate the mean on; a resumable stream is set back to its position.
        rows: number of rows.

    Returns:
        Whether the model has such a Linear.
    """
    path = model.entrance()
    table = model.inputs.table
    if path is None or table is None or not model.inputs.ids:
        return False
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    ids, dim = model.inputs.ids, model.inputs.dim
    means = _mean_embeddings(model, batches, rows)[:ids, :dim].to(linear.weight.dtype)  # (F, D)
    columns = dict(zip(model.inputs.slots, linear.weight.unflatten(1, (-1, dim)).unbind(1), strict=True))
    for part, name in enumerate(model.inputs.names[:ids]):
        first, stop = sum(table.sizes[:part]), sum(table.sizes[: part + 1])
        table.weight.data[first:stop, :dim] -= means[part]
        linear.bias.add_(columns[name] @ means[part])
    return True


def _mean_embeddings(model: Model, batches: Iterable[Batch], rows: int) -> Tensor:
    """Return the mean embedding of every part (N, D) over the first rows, without gates."""
    position = batches.state_dict() if isinstance(batches, Resumable) else None
    device = device_of(model)
    total: Tensor = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    order = [model.inputs.slots.index(name) for name in model.inputs.names]
    ranks = current_group()
    for batch in rank_batches(batches):
        embeddings: Tensor = model.inputs(on_device(batch, device))
        total = torch.add(total, embeddings.double().sum(0))
        count += len(batch)
        if count * ranks.world >= rows:
            break
    if position is not None and isinstance(batches, Resumable):
        batches.load_state_dict(position)
    return weighted_mean(ranks, total / max(1, count), count, "averaging embeddings")[order]
