"""Training of masks: MaskMethod, its holdout rows, and the centering of embeddings before a search."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.embeddings.optim import Adam, move_rates
from lpfs.embeddings.row_grad import clear_grads
from lpfs.errors import InputError
from lpfs.methods.base import HistoryCallback, Method, SearchCost, SearchTask, restore_position, select_by_scores
from lpfs.methods.masks import FieldMask, Mask, TokenMask, apply_mask, check_maskable
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.checkpoint import Resumable
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import rank_batches, weighted_mean
from lpfs.train.evaluate import autocast, device_of, on_device, predict_batch
from lpfs.train.step import bce_loss, can_capture, clone_batch, copy_into, is_too_small, same_shape

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
            An option ``every`` is the number of steps between two updates on holdout rows.
    """

    cuda_graph = True
    mask_class: ClassVar[type[FieldMask] | type[TokenMask]]
    holdout_only: ClassVar[bool] = False

    def make_mask(self, model: Model, task: SearchTask, options: Any) -> FieldMask | TokenMask:
        """Return the mask of a model; ``strength`` of the options is the penalty of the target, if it has one."""
        return self.mask_class(tuple(model.sites()), task.steps, task.seed, options)

    def learning_rate(self, task: SearchTask) -> float:
        """Return the learning rate of the mask."""
        return float(self.options.lr)

    def search(self, task: SearchTask) -> Selection:
        """Train mask and model together; return the K best parts, or with ``penalty`` those the mask selects."""
        model = check_maskable(task.model, self.name)
        self.check(task.target, tuple(model.sites()), task.steps)
        holdout = holdout_batches(task, self.name) if self.holdout_only else task.holdout
        center_embeddings(model, task.stream)
        penalty = task.target.penalty
        options = self.options if penalty is None else replace(self.options, strength=penalty)
        mask, cost = self.make_mask(model, task, options), SearchCost()
        with apply_mask(model, mask, self.name):
            optimizer = Adam(mask.parameters(), lr=self.learning_rate(task))
            training = MaskTraining(mask, optimizer, cost, holdout, getattr(options, "every", 1))
            task.fit(cost, training)
            scores, selected = mask.scores(), mask.selected()
        chosen = None
        if selected is not None:
            scores = rank_selected_first(scores, selected, training.mean)
            chosen = list(compress(mask.names, selected.tolist()))
        by_name = dict(zip(mask.names, scores.tolist(), strict=True))
        facts = {"steps": task.steps, "history": training.history, **cost.to_dict()}
        return select_by_scores(task, self.name, by_name, chosen, **facts)


def rank_selected_first(scores: Tensor, selected: Tensor, mean: Tensor) -> Tensor:
    """Return scores in which rejected fields are below all selected ones, in the order of another score (N,).

    >>> selected = torch.tensor([False, True, False, False])
    >>> rank_selected_first(torch.tensor([0.2, 0.9, 0.1, 0.0]), selected, torch.tensor([0.3, 1.0, 0.5, 0.1]))
    tensor([0.6990, 0.9000, 0.8990, 0.4990])
    """
    if bool(selected.all()):
        return scores
    floor = scores[selected].min() if bool(selected.any()) else scores.max()
    mean = mean.to(scores)
    lower = mean - mean[~selected].max()  # 0 for the best rejected field, negative for the others
    return torch.where(selected, scores, floor - TIE_BREAK + lower)


def holdout_batches(task: SearchTask, method: str) -> Iterable[Batch]:
    """Return the holdout rows of a task, or else its validation rows in batches of the training size."""
    if task.holdout is not None:
        return task.holdout
    valid = task.valid
    if valid is None:
        raise InputError(f"{method} trains its mask on held-out rows: give valid= or holdout=")
    if isinstance(valid, Stream) and isinstance(task.stream, Stream):
        return valid.dataset.stream(
            task.stream.batch_size, shuffle=True, seed=task.seed, fields=valid.schema.names, device=valid.device
        )
    return valid


class HoldoutBatches:
    """Batches of rows that the weights are not trained on, repeated without end; the position can be saved."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = rank_batches(batches)
        self._iterator: Iterator[Batch] | None = None

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


class HoldoutCallback(HistoryCallback):
    """A callback that trains gates or a mask on holdout rows if it has some, else on the batch of the step.

    The holdout rows of a step are read before it, in :meth:`fetch`. For a captured step they are copied to where it
    reads them; a step without holdout rows has a graph of its own.
    """

    def __init__(self, steps: int, holdout: Iterable[Batch] | None, cost: SearchCost) -> None:
        super().__init__(steps)
        self.holdout, self.cost = None if holdout is None else HoldoutBatches(holdout), cost
        self.batch: Batch | None = None  # holdout rows of this step
        self.static_batch: Batch | None = None  # the memory that a captured step reads them from

    def needs_holdout(self, state: State) -> bool:
        """Return whether the coming step uses holdout rows, if there are some."""
        return True

    def fetch(self, state: State) -> bool:
        """Get the holdout rows of this step; return whether a captured step can use them."""
        self.batch = None
        if self.holdout is None or not self.needs_holdout(state):
            return True
        device = device_of(state.model)
        self.batch = on_device(self.next_holdout(self.holdout), device)
        if not state.config.graph or not can_capture(state.model, self.batch):
            return False
        if self.static_batch is None or is_too_small(self.static_batch, self.batch):
            self.static_batch = clone_batch(self.batch, device)
            state.recapture = True
        if not same_shape(self.static_batch, self.batch):
            return False
        copy_into(self.static_batch, self.batch)
        self.batch = self.static_batch
        return True

    def variant(self, state: State) -> bool:
        return self.batch is not None

    def next_holdout(self, holdout: HoldoutBatches) -> Batch:
        """Return the next batch of holdout rows, and count its forward and backward pass."""
        batch = holdout.next()
        self.cost.add(forwards=len(batch), backwards=len(batch))
        return batch

    def on_end(self, state: State) -> None:
        if self.holdout is not None:
            self.holdout.close()
        self.batch = self.static_batch = None

    def state_dict(self) -> dict[str, Any]:
        holdout = {} if self.holdout is None else {"holdout": self.holdout.state_dict()}
        return {**super().state_dict(), **holdout}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        super().load_state_dict(values)
        if self.holdout is not None:
            self.holdout.load_state_dict(values["holdout"])


class MaskTraining(HoldoutCallback):
    """Updates a mask: with the model in every step, or on holdout rows every ``update_every`` steps."""

    saved = ("mean",)

    def __init__(
        self,
        mask: Mask,
        optimizer: torch.optim.Optimizer,
        cost: SearchCost,
        holdout: Iterable[Batch] | None = None,
        update_every: int = 1,
    ) -> None:
        super().__init__(mask.steps, holdout, cost)
        self.mask, self.optimizer, self.update_every = mask, optimizer, update_every
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.mean = torch.zeros(len(mask.names), dtype=torch.float64)  # of the scores, over the search

    def on_begin(self, state: State) -> None:
        self.mask.set_step(state.step)
        self.mask.requires_grad_(self.holdout is None)  # with holdout rows, steps of the model do not train it
        self._move_rates(device_of(self.mask) if state.config.graph else torch.device("cpu"))

    def needs_holdout(self, state: State) -> bool:
        return (state.step + 1) % self.update_every == 0

    def generators(self) -> Sequence[torch.Generator]:
        return [self.mask.draw]

    def before_backward(self, state: State) -> None:
        if self.holdout is None and state.loss is not None and state.batch is not None:
            penalty = self.mask.penalty(len(state.batch))
            state.loss = state.loss if penalty is None else state.loss + penalty

    def within_step(self, state: State) -> None:
        if self.holdout is None:
            self.optimizer.step()
        elif self.batch is not None:
            with train_only(state.model, self.mask.parameters()):
                loss, penalty = holdout_loss(state, self.batch), self.mask.penalty(len(self.batch))
                torch.autograd.backward(loss if penalty is None else loss + penalty)
                self.optimizer.step()
                clear_grads(self.mask.parameters())
        self.mask.update_means()

    def after_step(self, state: State) -> None:
        self.mask.set_step(state.step)
        if self.should_record(state.step):
            selected, scores = self.mask.selected(), self.mask.scores()
            self.mean += scores.double().cpu() * self.record_every / self.steps
            alive = len(scores) if selected is None else int(selected.sum())
            self.record(state, alive=alive, gates=[round(score, 6) for score in scores.tolist()])

    def on_end(self, state: State) -> None:
        super().on_end(state)
        self._move_rates(torch.device("cpu"))

    def _move_rates(self, device: torch.device) -> None:
        """Move the learning rate to a GPU, where a captured step reads it, or to the host, with its initial value."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        move_rates(self.optimizer, device)

    def state_dict(self) -> dict[str, Any]:
        values = {"optimizer": self.optimizer.state_dict(), "generator": self.mask.draw.get_state()}
        return {**super().state_dict(), **values}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        if values["generator"].shape != self.mask.draw.get_state().shape:
            raise InputError(
                "the search was started on another kind of device, which draws other random numbers; resume it there, "
                "or start a new one"
            )
        super().load_state_dict(values)
        self.optimizer.load_state_dict(values["optimizer"])
        self.mask.draw.set_state(values["generator"])


def holdout_loss(state: State, batch: Batch) -> Tensor:
    """Return the loss of the model on a batch, as the training loop computes it."""
    device = device_of(state.model)
    with autocast(state.config.precision, device):
        logits, labels = predict_batch(state.model, on_device(batch, device))
    return bce_loss(logits, labels, state.config.task_weights)


def holdout_grads(state: State, batch: Batch, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of that loss with respect to some tensors; no other parameter gets a gradient."""
    with train_only(state.model, tensors):
        grads = torch.autograd.grad(holdout_loss(state, batch), tensors)
    action = "averaging gradients of holdout rows"
    return [weighted_mean(current_group(), grad, len(batch), action) for grad in grads]


@contextmanager
def train_only(model: nn.Module, trained: Iterable[Tensor]) -> Iterator[None]:
    """Give gradients to these parameters of the model alone while the block runs."""
    chosen = {id(tensor) for tensor in trained}
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@torch.no_grad()
def center_embeddings(model: Model, batches: Iterable[Batch], rows: int = CENTERING_ROWS) -> bool:
    """Move the mean of every embedding into the bias of the Linear that uses it, in place.

    A gate removes an embedding with its mean, which is the same for every row; a trained model needs the mean of
    a useless field like a bias. Since W e + b = W (e - ē) + (b + W ē), the mean, estimated on the first rows of a
    stream, can be moved into the bias before gates are attached. Then a gate removes only what differs between rows.
    Logits stay equal up to rounding. Fields without a single id per row are left as they are.

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
    device, ranks, count = device_of(model), current_group(), 0
    total: Tensor = torch.zeros((), dtype=torch.float64, device=device)
    order = [model.inputs.slots.index(name) for name in model.inputs.names]
    with restore_position(batches):
        for batch in rank_batches(batches):
            embeddings: Tensor = model.inputs(on_device(batch, device))
            total = torch.add(total, embeddings.double().sum(0))
            count += len(batch)
            if count * ranks.world >= rows:
                break
    return weighted_mean(ranks, total / max(1, count), count, "averaging embeddings")[order]
