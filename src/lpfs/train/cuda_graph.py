"""GraphStepper: a training step captured once as a CUDA graph, then replayed.

A step on a small batch has hundreds of kernels of a few microseconds each; launching them one by one takes the
host ten times as long as the GPU needs to run them. A graph is launched as a whole. It contains the forward and
backward pass, the optimizer step, and the captured hooks of callbacks; batches are copied into its static batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpfs.data.batch import Batch, map_rows
from lpfs.embeddings.optim import move_rates_to_device, move_rates_to_host, rates_on_device
from lpfs.embeddings.row_grad import clear_grads
from lpfs.errors import InputError, LpfsError
from lpfs.train.evaluate import autocast, on_device, predict_batch, sample_weights
from lpfs.train.step import Stepper, bce_loss

WARMUP_STEPS = 3  # steps before the capture, in which kernels are compiled and libraries allocate workspaces


class GraphStepper(Stepper):
    """Trains by replaying a graph; the first steps and batches of another size run without it."""

    graph: torch.cuda.CUDAGraph | None = None
    static_batch: Batch | None = None  # the input of the graph
    loss: Tensor | None = None  # the output of the graph
    stream: torch.cuda.Stream | None = None
    warmup_steps = 0  # completed steps that count towards WARMUP_STEPS
    loss_note = "; the step was applied"

    def train_batch(self, batch: Batch, position: Callable[[], str]) -> None:
        """Train on one batch."""
        state = self.state
        if self.stream is None:
            self._prepare()
        batch = on_device(batch, self.device)
        if self.static_batch is not None and len(batch) > len(self.static_batch) and not batch.bags:
            self.graph = self.static_batch = None  # the short last batch of a pass was captured; capture again
        static = self.static_batch
        fits = self.fetch() and not batch.bags and (static is None or same_shape(static, batch))
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if not fits or self.warmup_steps < WARMUP_STEPS:
                self.warmup_steps += fits
                self.step(batch, position)
            else:
                self.apply_schedule()
                if self.graph is None or state.recapture:
                    self._capture(batch)
                assert self.static_batch is not None
                copy_into(self.static_batch, batch)
                assert self.graph is not None
                assert self.loss is not None
                self.graph.replay()
                state.batch, state.loss = batch, self.loss.detach().clone()
                self.pending.append(state.loss)
                if (state.step + 1) % state.config.check_every == 0:
                    self.check(position)
                self.count_step(len(batch))
        torch.cuda.current_stream().wait_stream(self.stream)

    def apply_schedule(self) -> None:
        """Write the learning rate of this step into the tensors that the graph reads."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(lr * self.factor(self.state.step))

    def finish(self) -> None:
        """Restore the learning rates of the optimizer and release the graph."""
        if self.stream is not None:
            self.graph = self.static_batch = self.loss = None
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
            move_rates_to_host(self.state.optimizer)
        super().finish()

    def _prepare(self) -> None:
        optimizer = self.state.optimizer
        if self.device.type != "cuda":
            raise InputError(f"graph=True needs a GPU, but the model is on {self.device}; leave it out")
        if not hasattr(optimizer, "knows_rows"):
            kind = type(optimizer).__name__
            raise InputError(f"graph=True needs an optimizer by name or one of lpfs.embeddings, found {kind}")
        if self.state.config.clip is not None:
            raise InputError("graph=True does not support clip, which needs a GPU value in every step; leave one out")
        if not rates_on_device(optimizer):
            move_rates_to_device(optimizer, self.device)
        self.stream = torch.cuda.Stream()
        # gradients may have been created on another stream (new gates); it is synchronized, so do not warn
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def _capture(self, batch: Batch) -> None:
        self.static_batch = clone_batch(batch, self.device)
        self.state.recapture = False
        clear_grads(self.parameters)
        torch.cuda.synchronize()
        try:
            self.graph = self._captured_step()
        except (LpfsError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise InputError(
                "the step cannot be captured; train with graph=False, or --graph off "
                f"({str(error.__context__ or error).splitlines()[0]})"
            ) from error

    def _captured_step(self) -> torch.cuda.CUDAGraph:
        state, config = self.state, self.state.config
        assert self.static_batch is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            clear_grads(self.parameters)
            with autocast(config.precision, self.device):
                logits, labels = predict_batch(state.model, self.static_batch)
            sample = None if self.weights is None else sample_weights(self.weights, self.static_batch)
            state.batch, state.loss = self.static_batch, bce_loss(logits, labels, config.task_weights, sample)
            for callback in self.callbacks:
                callback.before_backward(state)
            self.loss = state.loss
            torch.autograd.backward(state.loss)
            for callback in self.callbacks:
                callback.before_step(state)
            state.optimizer.step()
            for callback in self.callbacks:
                callback.within_step(state)
        return graph


def same_shape(static_batch: Batch, batch: Batch) -> bool:
    """Return whether a batch can be copied into a static batch."""
    same_missing = (static_batch.missing is None) == (batch.missing is None)
    return static_batch.labels.shape == batch.labels.shape and same_missing and not batch.bags


def copy_into(static_batch: Batch, batch: Batch) -> None:
    """Overwrite a static batch, in place, by a batch of the same shape."""
    static_batch.ids.copy_(batch.ids)
    static_batch.dense.copy_(batch.dense)
    static_batch.labels.copy_(batch.labels)
    if static_batch.missing is not None and batch.missing is not None:
        static_batch.missing.copy_(batch.missing)


def clone_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on the device, into which other batches can be copied."""
    return map_rows(batch.to(device), Tensor.clone)
