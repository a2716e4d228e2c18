"""GraphStepper: a training step captured once as a CUDA graph, then replayed.

A step of a small batch is some hundred kernels of a few microseconds each: launching them one by one takes the
host ten times as long as the GPU takes to run them. A graph is launched as a whole. It holds the forward and
backward pass, the optimizer, and what callbacks do ``within_step``; batches are copied to where it reads them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.embeddings.optim import move_rates_to_device, move_rates_to_host, rates_on_device
from lpfs.embeddings.row_grad import clear_grads
from lpfs.errors import InputError, LpfsError
from lpfs.train.evaluate import autocast, on_device, predict_batch, sample_weights
from lpfs.train.step import Stepper, bce_loss

WARMUP_STEPS = 3  # steps before the capture: kernels are compiled, libraries make their workspaces


class GraphStepper(Stepper):
    """Takes steps by replaying a graph; the first ones, and batches of another size, without it."""

    graph: torch.cuda.CUDAGraph | None = None
    held: Batch | None = None
    loss: Tensor | None = None  # where a replay leaves its loss
    stream: torch.cuda.Stream | None = None
    taken = 0
    unmoved = "; the step that gave it was taken"

    def take(self, batch: Batch, position: Callable[[], str]) -> None:
        """Train on one batch."""
        state = self.state
        if self.stream is None:
            self._begin()
        batch = on_device(batch, self.device)
        if self.held is not None and len(batch) > len(self.held) and not batch.bags:
            self.graph = self.held = None  # a short one was captured, the last of a pass: take this one instead
        fits = self.fetch() and not batch.bags and (self.held is None or same_shape(self.held, batch))
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if not fits or self.taken < WARMUP_STEPS:
                self.taken += fits
                self.step(batch, position)
            else:
                self.apply_schedule()
                if self.graph is None or state.recapture:
                    self._capture(batch)
                assert self.held is not None
                copy_into(self.held, batch)
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
        """Write the learning rate of this step to where the graph reads it."""
        for group, lr in zip(self.state.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(lr * self.factor(self.state.step))

    def finish(self) -> None:
        """Leave the optimizer as it was found."""
        if self.stream is not None:
            self.graph = self.held = self.loss = None
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
            move_rates_to_host(self.state.optimizer)
        super().finish()

    def _begin(self) -> None:
        optimizer = self.state.optimizer
        if self.device.type != "cuda":
            raise InputError(f"graph=True needs a GPU, the model is on {self.device}; leave it out")
        if not hasattr(optimizer, "knows_rows"):
            kind = type(optimizer).__name__
            raise InputError(
                f"graph=True takes an optimizer by name or one of lpfs.embeddings.optim, found {kind}"
            )
        if self.state.config.clip is not None:
            raise InputError("graph=True cannot clip: that looks at a number in every step")
        if not rates_on_device(optimizer):
            move_rates_to_device(optimizer, self.device)
        self.stream = torch.cuda.Stream()
        # what was computed on another stream before (gates just attached) is waited for: no news
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def _capture(self, batch: Batch) -> None:
        self.held = clone_batch(batch, self.device)
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
        assert self.held is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            clear_grads(self.parameters)
            with autocast(config.precision, self.device):
                logits, labels = predict_batch(state.model, self.held)
            sample = None if self.weights is None else sample_weights(self.weights, self.held)
            state.batch, state.loss = self.held, bce_loss(logits, labels, config.task_weights, sample)
            for each in self.callbacks:
                each.before_backward(state)
            self.loss = state.loss
            torch.autograd.backward(state.loss)
            for each in self.callbacks:
                each.before_step(state)
            state.optimizer.step()
            for each in self.callbacks:
                each.within_step(state)
        return graph


def same_shape(held: Batch, batch: Batch) -> bool:
    """Return whether a batch can be copied into another."""
    alike = held.labels.shape == batch.labels.shape and (held.missing is None) == (batch.missing is None)
    return alike and not batch.bags


def copy_into(held: Batch, batch: Batch) -> None:
    """Overwrite a batch of the same shape, in place."""
    held.ids.copy_(batch.ids)
    held.dense.copy_(batch.dense)
    held.labels.copy_(batch.labels)
    if held.missing is not None and batch.missing is not None:
        held.missing.copy_(batch.missing)


def clone_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on the device that nobody else holds, for others to be copied into."""
    return batch.to(device)._map(Tensor.clone)
