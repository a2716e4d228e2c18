"""One training step: loss, backward, clip, optimizer step; no parameter changes if the loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lpfs.data.batch import Batch
from lpfs.embeddings.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from lpfs.embeddings.row_grad import clear_grads, grad_norm, scale_grads
from lpfs.errors import DeviceMemoryError, InputError, NonFiniteError
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import reduce_grads
from lpfs.train.evaluate import Weights, autocast, device_of, on_device, predict_batch, sample_weights

DEFAULT_LR = {"adagrad": 0.01, "rowwise-adagrad": 0.01, "adam": 0.001, "sgd": 0.01}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": Adagrad,
    "rowwise-adagrad": RowWiseAdagrad,
    "adam": Adam,
    "sgd": SGD,
}


def make_optimizer(config: Training, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, which supports embedding tables."""
    lr = DEFAULT_LR[config.optimizer] if config.lr is None else config.lr
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise InputError("the model has no parameter that requires a gradient; unfreeze at least one")
    return OPTIMIZERS[config.optimizer](trainable, lr=lr)


def bce_loss(
    logits: Tensor, labels: Tensor, task_weights: Sequence[float] | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the sum over tasks of c_t · mean over rows of w_b · binary cross entropy.

    Logits and labels are (B, T), weights (B,); the result is a scalar.
    """
    if logits.shape[1] == 1 and task_weights is None and weights is None:
        return binary_cross_entropy_with_logits(logits, labels)
    losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")  # (B, T)
    if weights is not None:
        losses = losses * weights[:, None]
    tasks = losses.mean(0)  # (T,)
    if task_weights is None:
        return tasks.sum()
    if len(task_weights) != tasks.numel():
        raise InputError(f"task_weights must have one number per task, {tasks.numel()}; found {len(task_weights)}")
    return (tasks * tasks.new_tensor(task_weights)).sum()


class Stepper:
    """Takes training steps and sums up the loss between two log records."""

    loss_note = "; no parameter was changed"  # for the error of a non-finite loss

    def __init__(
        self, state: State, callbacks: Sequence[Callback], factor: Callable[[int], float], weights: Weights | None
    ) -> None:
        self.state, self.callbacks, self.factor, self.weights = state, callbacks, factor, weights
        self.device = device_of(state.model)
        self.rates: list[float] = [float(group["lr"]) for group in state.optimizer.param_groups]
        self._optimized = [weight for group in state.optimizer.param_groups for weight in group["params"]]
        self.parameters = list(dict.fromkeys([*state.model.parameters(), *self._optimized]))
        self.ranks = current_group()
        self.total, self.count = 0.0, 0
        self.pending: list[Tensor] = []  # losses not read yet, because reading synchronizes with the GPU

    def train_batch(self, batch: Batch, position: Callable[[], str]) -> None:
        """Train on one batch; ``position`` describes it in error messages."""
        self.fetch()
        self.step(on_device(batch, self.device), position)

    def fetch(self) -> bool:
        """Call ``fetch`` of all callbacks; return whether a captured graph can be replayed."""
        replayable = [callback.fetch(self.state) for callback in self.callbacks]  # all are called
        return all(replayable)

    def step(self, batch: Batch, position: Callable[[], str]) -> None:
        """Take one step without a graph."""
        state, config = self.state, self.state.config
        optimizer = state.optimizer
        self.apply_schedule()
        clear_grads(self.parameters)
        rows = len(batch)
        state.batch, state.loss = batch, self.loss_on(batch)
        for callback in self.callbacks:
            callback.before_backward(state)
        if not self.ranks.is_distributed:
            self._check_loss(state.loss, position)
        torch.autograd.backward(state.loss)
        if self.ranks.is_distributed:  # the summed loss is the same on all ranks, so all stop here
            rows, state.loss = reduce_grads(self.ranks, self.parameters, rows, state.loss)
            self._check_loss(state.loss, position)
        for callback in self.callbacks:
            callback.before_step(state)
        if config.clip is not None:
            self._clip(config.clip, position)
        optimizer.step()
        for callback in self.callbacks:
            callback.within_step(state)
        self.count_step(rows)

    def loss_on(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; 0 if this rank has no row of it."""
        if not len(batch):
            return torch.zeros((), device=self.device, requires_grad=True)
        config = self.state.config
        with autocast(config.precision, self.device):
            logits, labels = predict_batch(self.state.model, batch)
        sample = None if self.weights is None else sample_weights(self.weights, batch)
        return bce_loss(logits, labels, config.task_weights, sample)

    def _check_loss(self, loss: Tensor, position: Callable[[], str]) -> None:
        """Record the loss of a step, and check it every ``check_every`` steps."""
        self.pending.append(loss.detach())
        if (self.state.step + 1) % self.state.config.check_every == 0:
            self.check(position)

    def describe(self, state: State) -> str:
        """Return the progress texts of the callbacks."""
        return ", ".join(filter(None, (callback.describe(state) for callback in self.callbacks)))

    def apply_schedule(self) -> None:
        """Set the learning rate of this step."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * self.factor(self.state.step)

    def finish(self) -> None:
        """Restore the initial learning rates of the optimizer."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr

    def count_step(self, rows: int) -> None:
        """Count a completed step and call ``after_step`` of the callbacks."""
        self.state.step += 1
        self.state.rows += rows
        for callback in self.callbacks:
            callback.after_step(self.state)

    def mean(self) -> float:
        """Return the mean loss since the last call."""
        self.collect()
        mean = self.total / max(1, self.count)
        self.total, self.count = 0.0, 0
        return mean

    def collect(self) -> None:
        """Add the pending losses to the total, one by one, in float64."""
        losses, self.pending = self.pending, []
        self.count += len(losses)
        for loss in losses if len(losses) < 2 else torch.stack(losses).cpu():
            self.total += float(loss)

    def check(self, position: Callable[[], str]) -> None:
        """Raise NonFiniteError if a loss since the last check is not finite."""
        self.collect()
        if math.isfinite(self.total):
            return
        before = self.state.config.check_every - 1
        raise NonFiniteError(
            f"the loss is not finite at {position()}"
            + (f" or in the {before} steps before" if before else self.loss_note)
            + ". The last checkpoint is intact. Check these rows, lower the learning rate, or clip the gradient"
        )

    def check_parameters(self) -> None:
        """Raise NonFiniteError if a parameter is not finite, so that it is not saved."""
        for name, weight in self.state.model.named_parameters():
            if not math.isfinite(float(weight.detach().sum())) and not bool(torch.isfinite(weight).all()):
                raise NonFiniteError(
                    f"parameter {name!r} is not finite after step {self.state.step:,}: a gradient was inf or nan. "
                    "The last checkpoint is intact. Lower the learning rate, or clip the gradient"
                )

    def _clip(self, clip: float, position: Callable[[], str]) -> None:
        norm = grad_norm(self._optimized)
        if not math.isfinite(float(norm)):
            raise NonFiniteError(f"the gradient is not finite at {position()}; no parameter was changed")
        scale_grads(self._optimized, (clip / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils.clip_grad_norm_


@contextmanager
def convert_out_of_memory(batch_size: int) -> Iterator[None]:
    """Raise DeviceMemoryError, with a smaller batch size to try, if a GPU runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = 1 << max(0, (batch_size - 1).bit_length() - 1)
        advice = f"try batch_size={smaller}" if smaller < batch_size else "the model is too large for this GPU"
        raise DeviceMemoryError(
            f"the GPU has no memory left for {batch_size} rows; {advice}. The last checkpoint is intact "
            f"({str(error).splitlines()[0]})"
        ) from error
