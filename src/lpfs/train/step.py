"""One step of training: loss, backward, clip, move; nothing moves when the loss is not finite."""

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

LR = {"adagrad": 0.01, "rowwise-adagrad": 0.01, "adam": 0.001, "sgd": 0.01}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": Adagrad,
    "rowwise-adagrad": RowWiseAdagrad,
    "adam": Adam,
    "sgd": SGD,
}


def make_optimizer(config: Training, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer by name, with the paper's rate unless another is given; it knows tables."""
    lr = LR[config.optimizer] if config.lr is None else config.lr
    wanted = [each for each in parameters if each.requires_grad]
    if not wanted:
        raise InputError("there is nothing to train: the model has no parameter that requires a gradient")
    return OPTIMIZERS[config.optimizer](wanted, lr=lr)


def bce_loss(
    logits: Tensor, labels: Tensor, task_weights: Sequence[float] | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the sum over tasks of c_t · mean over rows of w_b · binary cross entropy.

    Logits and labels are (B, T), weights (B,); one number comes out.
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
        raise InputError(f"task_weights must be {tasks.numel()} numbers, one a task; found {len(task_weights)}")
    return (tasks * tasks.new_tensor(task_weights)).sum()


class Stepper:
    """Takes one step after another; what it adds up between two lines of the log is part of the state."""

    unmoved = "; nothing was moved"  # when the loss is looked at before the step

    def __init__(
        self, state: State, callbacks: Sequence[Callback], factor: Callable[[int], float], weights: Weights | None
    ) -> None:
        self.state, self.callbacks, self.factor, self.weights = state, callbacks, factor, weights
        self.device = device_of(state.model)
        self.rates: list[float] = [float(group["lr"]) for group in state.optimizer.param_groups]
        moved = [each for group in state.optimizer.param_groups for each in group["params"]]
        self.parameters = list(dict.fromkeys([*state.model.parameters(), *moved]))
        self.ranks = current_group()
        self.total, self.count = 0.0, 0
        self.pending: list[Tensor] = []  # losses not looked at yet: reading one waits for the GPU

    def take(self, batch: Batch, position: Callable[[], str]) -> None:
        """Train on one batch; ``position`` says which it is, in case something is wrong with it."""
        self.fetch()
        self.step(on_device(batch, self.device), position)

    def fetch(self) -> bool:
        """Let the callbacks get what they need for a step; return whether it may be a replay."""
        ready = [each.fetch(self.state) for each in self.callbacks]  # each is asked, whatever the others say
        return all(ready)

    def step(self, batch: Batch, position: Callable[[], str]) -> None:
        """Take the step, kernel by kernel."""
        state, config = self.state, self.state.config
        optimizer = state.optimizer
        self.apply_schedule()
        clear_grads(self.parameters)
        rows = len(batch)
        state.batch, state.loss = batch, self.loss_on(batch)
        for each in self.callbacks:
            each.before_backward(state)
        if not self.ranks.is_distributed:
            self._check_loss(state.loss, position)
        torch.autograd.backward(state.loss)
        if self.ranks.is_distributed:  # a loss that is not finite is so on all ranks: they all stop here
            rows, state.loss = reduce_grads(self.ranks, self.parameters, rows, state.loss)
            self._check_loss(state.loss, position)
        for each in self.callbacks:
            each.before_step(state)
        if config.clip is not None:
            self._clip(config.clip, position)
        optimizer.step()
        for each in self.callbacks:
            each.within_step(state)
        self.count_step(rows)

    def loss_on(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; 0 where a rank has no row of it."""
        if not len(batch):
            return torch.zeros((), device=self.device, requires_grad=True)
        config = self.state.config
        with autocast(config.precision, self.device):
            logits, labels = predict_batch(self.state.model, batch)
        sample = None if self.weights is None else sample_weights(self.weights, batch)
        return bce_loss(logits, labels, config.task_weights, sample)

    def _check_loss(self, loss: Tensor, position: Callable[[], str]) -> None:
        """Take note of the loss of a step, before anything moves."""
        self.pending.append(loss.detach())
        if (self.state.step + 1) % self.state.config.check_every == 0:
            self.check(position)

    def describe(self, state: State) -> str:
        """Return what the callbacks have to say about where training stands."""
        return ", ".join(filter(None, (each.describe(state) for each in self.callbacks)))

    def apply_schedule(self) -> None:
        """Give the optimizer the learning rate of this step."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * self.factor(self.state.step)

    def finish(self) -> None:
        """Leave the rates of the optimizer as they were found: a schedule is over when its training is."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr

    def count_step(self, rows: int) -> None:
        """Count a step that is done, and tell the callbacks."""
        self.state.step += 1
        self.state.rows += rows
        for each in self.callbacks:
            each.after_step(self.state)

    def mean(self) -> float:
        """Return the mean loss since the last call."""
        self.collect()
        mean = self.total / max(1, self.count)
        self.total, self.count = 0.0, 0
        return mean

    def collect(self) -> None:
        """Add up the losses that were not looked at yet, one by one, in float64."""
        waiting, self.pending = self.pending, []
        self.count += len(waiting)
        for loss in waiting if len(waiting) < 2 else torch.stack(waiting).cpu():
            self.total += float(loss)

    def check(self, position: Callable[[], str]) -> None:
        """Refuse to go on with a loss that is not finite."""
        self.collect()
        if math.isfinite(self.total):
            return
        before = self.state.config.check_every - 1
        raise NonFiniteError(
            f"the loss is not finite at {position()}"
            + (f" or in the {before} steps before" if before else self.unmoved)
            + ". The last checkpoint is intact. Look at these rows, lower the learning rate, or clip the gradient"
        )

    def check_parameters(self) -> None:
        """Refuse to save parameters that are not finite, so that the last checkpoint is a good one."""
        for name, each in self.state.model.named_parameters():
            if not math.isfinite(float(each.detach().sum())) and not bool(torch.isfinite(each).all()):
                raise NonFiniteError(
                    f"parameter {name!r} is not finite after step {self.state.step:,}: a gradient was inf or nan. "
                    "Nothing was saved, the last checkpoint is intact. Lower the learning rate, or clip"
                )

    def _clip(self, clip: float, position: Callable[[], str]) -> None:
        mine = [each for group in self.state.optimizer.param_groups for each in group["params"]]
        norm = grad_norm(mine)
        if not math.isfinite(float(norm)):
            raise NonFiniteError(f"the gradient is not finite at {position()}; nothing was moved")
        scale_grads(mine, (clip / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_


@contextmanager
def convert_out_of_memory(batch_size: int) -> Iterator[None]:
    """Turn a GPU's running out of memory into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = 1 << max(0, (batch_size - 1).bit_length() - 1)
        advice = f"try batch_size={smaller}" if smaller < batch_size else "the model itself is too large for it"
        raise DeviceMemoryError(
            f"the GPU has no memory left for a step on {batch_size} rows; {advice}. The last checkpoint is intact "
            f"({str(error).splitlines()[0]})"
        ) from error
