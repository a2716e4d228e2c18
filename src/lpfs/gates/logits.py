"""Running a model on a batch to compare what it predicts: in eval mode, without gradients, without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import InputError

Call = Callable[[nn.Module, Any], Any]


@torch.no_grad()
def logits_of(model: nn.Module, batch: Any, call: Call | None = None) -> list[Tensor]:
    """Return the float tensors that a model gives for a batch, in eval mode; its modes are restored.

    The model is called as ``call(model, batch)`` where that is given, as ``model(*batch)`` for a tuple or a
    list, and as ``model(batch)`` otherwise.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if call is not None:
            output = call(model, batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
    finally:
        for module, mode in modes:
            module.training = mode
    found = [each for each in _tensors(output) if each.is_floating_point()]
    if not found:
        raise InputError(f"the model returned {type(output).__name__} without any float tensor to compare")
    return found


def precise(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return copies in float64 where a model is in half precision, whose rounding would hide a real change."""
    half = (torch.float16, torch.bfloat16)
    if all(each.dtype not in half for each in model.parameters()):
        return model, batch
    return copy.deepcopy(model).double(), _double(batch)


def _double(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _double(each) for key, each in batch.items()}
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return type(batch)(_double(each) for each in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{each.name: _double(getattr(batch, each.name)) for each in fields(batch)})
    return batch


def max_change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return max |Δ| between two outputs; inf where shapes or non-finite values differ."""
    if len(before) != len(after):
        return float("inf")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        odd = ~torch.isfinite(a) | ~torch.isfinite(b)
        if bool(odd.any()) and not torch.equal(a[odd].nan_to_num(nan=0.5), b[odd].nan_to_num(nan=0.5)):
            return float("inf")
        same = ~odd
        if bool(same.any()):
            worst = max(worst, float((a[same].double() - b[same].double()).abs().max()))
    return worst


def rounding_bound(outputs: list[Tensor]) -> float:
    """Return how far rounding may move an output: 1,000 units in the last place of its largest value.

    Multiplying a factor into a weight changes each product and sum by at most one rounding, so a layer that
    sums n terms moves by about n·eps of the size of its terms; 1,000 covers the widths in use. Types of 8 or 11
    bits sum in float32 and round once a layer, so that a tenth is ample for them.
    """
    bound = 0.0
    for each in outputs:
        finite = each[torch.isfinite(each)]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        bound = max(bound, min(1000 * torch.finfo(each.dtype).eps, 0.1) * size)
    return bound


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)
