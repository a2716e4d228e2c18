"""What the loop and evaluation share: a model's logits and labels of a batch, on its device and in one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.data.batches.batch import Batch
from lpfs.errors import InputError

Precision = Literal["float32", "tf32", "bfloat16"]
Weights: TypeAlias = Callable[[Batch], Tensor]


def device_of(model: nn.Module) -> torch.device:
    """Return where a model lives: the device of its first parameter or buffer."""
    for each in (*model.parameters(), *model.buffers()):
        return each.device
    return torch.device("cpu")


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the model's device."""
    return batch if batch.labels.device == device else batch.to(device, non_blocking=True)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a model runs."""
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def matmuls(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within this block a GPU multiplies float32 matrices in TF32, with fewer bits, where that is asked for."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return float32 logits (B, T) and the labels (B, T) they are for; (B,) logits are for the first label."""
    logits = model(batch)
    labels = batch.labels
    if not isinstance(logits, Tensor):
        raise InputError(f"a model must return logits (B,) or (B, T), found {type(logits).__name__}")
    if logits.shape == labels.shape[:1]:
        logits, labels = logits[:, None], labels[:, :1]
    if logits.shape != labels.shape:
        raise InputError(
            f"a model must return logits (B,) or (B, T), here {tuple(labels.shape[:1])} or "
            f"{tuple(labels.shape)}; found {tuple(logits.shape)}"
        )
    return logits.float(), labels


def weights_of(weights: Weights, batch: Batch) -> Tensor:
    """Return the sample weights (B,) of a batch."""
    found = weights(batch)
    if not isinstance(found, Tensor) or found.shape != batch.labels.shape[:1]:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"weights must give a tensor of shape ({len(batch)},) for a batch, found {what}")
    return found.to(batch.labels.device, torch.float32)
