"""One training step: loss, backward, clip and optimizer step, eager or captured as a CUDA graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lpfs.data.batch import Batch, map_rows
from lpfs.embeddings.optim import SGD, Adagrad, Adam, RowWiseAdagrad, move_rates, rates_on_device
from lpfs.embeddings.row_grad import clear_grads, grad_norm, scale_grads
from lpfs.errors import DeviceMemoryError, InputError, LpfsError, NonFiniteError
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Factor, Training
from lpfs.train.dense import fused_layers, gpu_kernels
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import reduce_grads
from lpfs.train.evaluate import Weights, autocast, device_of, on_device, predict_batch, sample_weights

WARMUP_STEPS = 3  # steps before the capture of a graph, in which kernels are compiled and workspaces allocated
BAG_ROOM = 1.25  # of a static batch for values of bags, times those of the first batch; one with more is captured again
BAG_BLOCK = 64  # the room is a multiple of it
OPTIMIZERS = {"adagrad": Adagrad, "rowwise-adagrad": RowWiseAdagrad, "adam": Adam, "sgd": SGD}


def make_optimizer(config: Training, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, which supports embedding tables."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise InputError("the model has no parameter that requires a gradient; unfreeze at least one")
    optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[config.optimizer]
    return optimizer(trainable) if config.lr is None else optimizer(trainable, lr=config.lr)


def bce_loss(
    logits: Tensor, labels: Tensor, task_weights: Sequence[float] | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the sum over tasks of c_t · mean over rows of w_b · binary cross entropy.

    Logits and labels are (B, T), weights (B,); the result is a scalar.
    """
    kernels = gpu_kernels(logits)
    if kernels is not None and task_weights is None and weights is None and labels.dtype == logits.dtype:
        fused: Tensor = kernels.BinaryCrossEntropy.apply(logits, labels)
        return fused
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
    """Takes training steps, unless the loss is not finite, and sums up the loss between two log records."""

    loss_note = "; no parameter was changed"  # for the error of a non-finite loss

    def __init__(self, state: State, callbacks: Sequence[Callback], factor: Factor, weights: Weights | None) -> None:
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
        self.apply_schedule()
        rows, loss = len(batch), self._compute_loss(batch)
        if not self.ranks.is_distributed:
            self._check_loss(loss, position)
        torch.autograd.backward(loss)
        if self.ranks.is_distributed:  # the summed loss is the same on all ranks, so all stop here
            rows, self.state.loss = reduce_grads(self.ranks, self.parameters, rows, loss)
            self._check_loss(self.state.loss, position)
        self._update(position)
        self.count_step(rows)

    def _compute_loss(self, batch: Batch) -> Tensor:
        """Clear the gradients and return the loss of a batch; 0 if this rank has no row of it."""
        state, config = self.state, self.state.config
        clear_grads(self.parameters)
        state.batch = batch
        if len(batch):
            with autocast(config.precision, self.device):
                logits, labels = predict_batch(state.model, batch)
            sample = None if self.weights is None else sample_weights(self.weights, batch)
            state.loss = bce_loss(logits, labels, config.task_weights, sample)
        else:
            state.loss = torch.zeros((), device=self.device, requires_grad=True)
        for callback in self.callbacks:
            callback.before_backward(state)
        return state.loss

    def _update(self, position: Callable[[], str]) -> None:
        """Clip the gradient and update the parameters."""
        for callback in self.callbacks:
            callback.before_step(self.state)
        clip = self.state.config.clip
        if clip is not None:
            norm = grad_norm(self._optimized)
            if not math.isfinite(float(norm)):
                raise NonFiniteError(f"the gradient is not finite at {position()}; no parameter was changed")
            scale_grads(self._optimized, (clip / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils.clip_grad_norm_
        self.state.optimizer.step()
        for callback in self.callbacks:
            callback.within_step(self.state)

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

    def check(self, position: Callable[[], str] | None = None) -> None:
        """Raise NonFiniteError if a loss since the last check is not finite."""
        self.collect()
        if math.isfinite(self.total):
            return
        before = self.state.config.check_every - 1
        raise NonFiniteError(
            f"the loss is not finite at {position() if position else f'step {self.state.step:,}'}"
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


@dataclass(frozen=True)
class CapturedStep:
    """The graph of a step, and the loss (), its output."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor


class GraphStepper(Stepper):
    """Trains by replaying a step that was captured once as a CUDA graph, with the captured hooks of callbacks.

    Launching the hundreds of short kernels of a step on a small batch one by one takes the host ten times as long as
    the GPU needs to run them. Batches are copied into the static batch, the input of the graph; the first steps and
    batches of another size run without it. Steps in which callbacks do something else have a graph of their own, see
    ``Callback.variant``.
    """

    static_batch: Batch | None = None  # the input of all graphs
    stream: torch.cuda.Stream | None = None
    loss_note = "; the step was applied"

    def __init__(self, state: State, callbacks: Sequence[Callback], factor: Factor, weights: Weights | None) -> None:
        super().__init__(state, callbacks, factor, weights)
        self.captured: dict[Hashable, CapturedStep] = {}  # by what the callbacks do
        self.warmup_steps = Counter[Hashable]()  # completed steps that count towards WARMUP_STEPS

    def train_batch(self, batch: Batch, position: Callable[[], str]) -> None:
        state = self.state
        self.stream = self.stream or self._prepare()
        batch = on_device(batch, self.device)
        if self.static_batch is not None and is_too_small(self.static_batch, batch):
            self._discard()  # the short last batch of a pass was captured, or fewer values; capture again
        fits = self.fetch() and can_capture(state.model, batch)
        fits = fits and (self.static_batch is None or same_shape(self.static_batch, batch))
        variant = tuple(callback.variant(state) for callback in self.callbacks)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if fits:
                self.static_batch = self.static_batch or clone_batch(batch, self.device)
                copy_into(self.static_batch, batch)
            if self.static_batch is None or not fits or self.warmup_steps[variant] < WARMUP_STEPS:
                self.warmup_steps[variant] += fits
                # the kernels of padded bags are others, and must be compiled before the capture
                input_batch = self.static_batch if fits and self.static_batch is not None and batch.bags else batch
                with fused_layers(state.model):
                    self.step(input_batch, position)
            else:
                self.apply_schedule()
                if state.recapture:
                    self.captured.clear()
                    state.recapture = False
                if variant not in self.captured:
                    self.captured[variant] = self._capture(self.static_batch, position)
                captured = self.captured[variant]
                captured.graph.replay()
                state.batch, state.loss = batch, captured.loss.detach().clone()
                self._check_loss(state.loss, position)
                self.count_step(len(batch))
        torch.cuda.current_stream().wait_stream(self.stream)

    def _discard(self) -> None:
        self.captured.clear()
        self.static_batch = None

    def apply_schedule(self) -> None:
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(lr * self.factor(self.state.step))  # the tensor that the graph reads

    def finish(self) -> None:
        if self.stream is not None:
            self._discard()
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
            move_rates(self.state.optimizer, torch.device("cpu"))
        super().finish()

    def _prepare(self) -> torch.cuda.Stream:
        optimizer = self.state.optimizer
        if self.device.type != "cuda":
            raise InputError(f"graph=True needs a GPU, but the model is on {self.device}; leave it out")
        if not hasattr(optimizer, "knows_rows"):
            found = type(optimizer).__name__
            raise InputError(f"graph=True needs an optimizer by name or one of lpfs.embeddings, found {found}")
        if self.state.config.clip is not None:
            raise InputError("graph=True does not support clip, which needs a GPU value in every step; leave one out")
        if not rates_on_device(optimizer):
            move_rates(optimizer, self.device)
        # gradients may have been created on another stream (new gates); it is synchronized, so do not warn
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        return torch.cuda.Stream()

    def _capture(self, batch: Batch, position: Callable[[], str]) -> CapturedStep:
        clear_grads(self.parameters)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for callback in self.callbacks:
            for generator in callback.generators():
                graph.register_generator_state(generator)
        try:
            capture = torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local")
            with fused_layers(self.state.model), capture:
                loss = self._compute_loss(batch)
                torch.autograd.backward(loss)
                self._update(position)
        except (LpfsError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise InputError(
                "the step cannot be captured; train with graph=False, or --graph off "
                f"({str(error.__context__ or error).splitlines()[0]})"
            ) from error
        return CapturedStep(graph, loss)


def can_capture(model: nn.Module, batch: Batch) -> bool:
    """Return whether a step with this batch can be captured.

    Bags are padded, which the models of ``lpfs.models`` and fleets of them can read: their modules that read bags have
    the attribute ``reads_padded_bags``. A bag without any value has none to repeat.
    """
    if not batch.bags:
        return True
    has_values = all(len(values) for values, _ in batch.bags.values())
    return has_values and any(getattr(module, "reads_padded_bags", False) for module in model.modules())


def same_shape(static_batch: Batch, batch: Batch) -> bool:
    """Return whether a batch can be copied into a static batch that is not too small for it."""
    same_missing = (static_batch.missing is None) == (batch.missing is None)
    return static_batch.labels.shape == batch.labels.shape and same_missing


def is_too_small(static_batch: Batch, batch: Batch) -> bool:
    """Return whether a batch has more rows, or more values in a bag, than a static batch has room for."""
    return len(batch) > len(static_batch) or any(
        len(values) > len(static_batch.bags[name][0]) for name, (values, _) in batch.bags.items()
    )


def copy_into(static_batch: Batch, batch: Batch) -> None:
    """Overwrite a static batch, in place, by a batch of the same shape; the first value of a bag pads its values."""
    for name in ("ids", "dense", "labels", "missing"):
        if getattr(static_batch, name) is not None:
            getattr(static_batch, name).copy_(getattr(batch, name))
    for name, (values, offsets) in batch.bags.items():
        static_values, static_offsets = static_batch.bags[name]
        static_values[: len(values)].copy_(values)
        static_values[len(values) :].copy_(values[:1].expand(len(static_values) - len(values)))
        static_offsets[:-1].copy_(offsets)
        static_offsets[-1:].fill_(len(values))


def clone_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on the device, into which other batches can be copied; its bags are padded."""
    longest = max((len(values) for values, _ in batch.bags.values()), default=0)
    length = -(-int(longest * BAG_ROOM) // BAG_BLOCK) * BAG_BLOCK

    def make_room(name: str, bag: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return bag[0].new_zeros(length), bag[1].new_zeros(len(batch) + 1)

    static_batch: Batch = replace(map_rows(batch.to(device), Tensor.clone, make_room), padded=bool(batch.bags))
    copy_into(static_batch, batch)
    return static_batch


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
