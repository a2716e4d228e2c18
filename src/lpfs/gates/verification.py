"""Verification: outputs before and after a change, the bound of rounding, the leak check of dropped fields."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.errors import InputError, LeakError

ForwardCall = Callable[[nn.Module, Any], Any]
# Where the raw value of a field is in a batch: a key, a path of keys that may end in a column, or a function that
# returns a batch with other values in that field.
InputPath: TypeAlias = str | int | tuple[str | int, ...] | Callable[[Any], Any]


@torch.no_grad()
def compute_logits(model: nn.Module, batch: Any, call: ForwardCall | None = None) -> list[Tensor]:
    """Return the float tensors that a model returns for a batch, in eval mode; its modes are restored.

    The model is called as ``call(model, batch)`` if ``call`` is given, as ``model(*batch)`` for a tuple or a
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
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if not tensors:
        raise InputError(f"the model returned {type(output).__name__} without any float tensor to compare")
    return tensors


def check_batch(verb: str, model: nn.Module, batch: Any, call: ForwardCall | None) -> list[Tensor]:
    """Return ``compute_logits``; raise InputError if the model does not accept the batch."""
    try:
        return compute_logits(model, batch, call)
    except (LookupError, TypeError, AttributeError) as error:
        arguments = "*batch" if isinstance(batch, tuple | list) else "batch"
        way = "call(model, batch)" if call is not None else f"model({arguments})"
        raise InputError(
            f"{verb}: {way} failed with {type(error).__name__}: {error}; the batch is of type {type(batch).__name__}. "
            "Pass a batch that the model accepts, or call=lambda model, batch: model(**batch)"
        ) from error


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy; ``memo`` is that of ``copy.deepcopy``. Raise InputError with what cannot be copied."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied, {type(error).__name__}: {error}. The cause is {_find_uncopyable(model)}; "
            "remove it, or if it is an activation of the last call, detach it or pass batch="
        ) from error


def _find_uncopyable(model: nn.Module) -> str:
    """Return the path of an attribute of a module that cannot be copied."""
    modules = {id(module): module for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(modules))
            except Exception:
                return repr(f"{path}.{name}".lstrip("."))
    return repr(type(model).__name__)


def float64_copies(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return float64 copies if a model is in half precision, whose rounding would hide a real change."""
    half = (torch.float16, torch.bfloat16)
    if all(parameter.dtype not in half for parameter in model.parameters()):
        return model, batch
    double = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)
    return copy_model(model).double(), double


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch with a function applied to its tensors, in new containers."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [map_tensors(function, value) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: map_tensors(function, getattr(batch, field.name)) for field in fields(batch)}
        return replace(batch, **values)
    return batch


def max_abs_difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Return max |Δ| between two outputs; inf if shapes or non-finite values differ."""
    if len(before) != len(after):
        return float("inf")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        finite = torch.isfinite(a) & torch.isfinite(b)
        if not torch.equal(a[~finite].nan_to_num(nan=0.5), b[~finite].nan_to_num(nan=0.5)):
            return float("inf")
        if bool(finite.any()):
            worst = max(worst, float((a[finite].double() - b[finite].double()).abs().max()))
    return worst


def rounding_bound(outputs: list[Tensor]) -> float:
    """Return how much rounding may change an output: 1,000 units in the last place of its largest value.

    Multiplying a factor into a weight changes each product and sum by at most one rounding, so that a layer that
    sums n terms changes by about n·eps of the size of its terms; 1,000 covers the widths in use. Types with 8 or
    11 bits are summed in float32 and rounded once per layer, so that 0.1 is enough for them.
    """
    bound = 0.0
    for output in outputs:
        finite = output[torch.isfinite(output)]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        bound = max(bound, min(1000 * torch.finfo(output.dtype).eps, 0.1) * size)
    return bound


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))


def declared_inputs(model: nn.Module) -> Mapping[str, InputPath]:
    """Return the input paths that a model declares by a method ``inputs_of_fields()``; {} without one."""
    method = getattr(type(model), "inputs_of_fields", None)
    return dict(method(model)) if callable(method) else {}


def check_leaks(
    model: nn.Module,
    dropped: Sequence[str],
    batch: Any,
    inputs: Mapping[str, InputPath],
    call: ForwardCall | None = None,
) -> tuple[str, ...]:
    """Return the dropped fields that were checked; raise LeakError if one of them still changes the output.

    A field is checked if ``inputs`` contains it and its values in the batch can be replaced by other values of
    the same batch, so that ids stay in range. Then no output may change by one bit.
    """
    changed: dict[str, list[Any]] = {}
    for name in dropped:
        if name in inputs:
            batches = [_perturbed_batch(batch, inputs[name], name, attempt) for attempt in (1, 2)]
            batches = [other for other in batches if other is not None]
            if batches:
                changed[name] = batches
    if not changed:
        return ()
    before = compute_logits(model, batch, call)
    if not any(output.numel() for output in before):
        raise InputError("the batch is empty; pass a batch with rows to check on")
    again = compute_logits(model, batch, call)
    if max_abs_difference(before, again) != 0.0:
        raise InputError("the model returns different outputs for the same batch in eval mode: it cannot be checked")
    for name, batches in changed.items():
        moved = max(max_abs_difference(before, compute_logits(model, other, call)) for other in batches)
        if moved != 0.0:
            raise LeakError(
                f"field {name!r} is dropped, but its values still change the output by up to {moved:.3g}: they "
                "bypass its gate (a linear or wide part without a gate, a second table?). Give that part too: "
                f"fields={{{name!r}: [embedding, wide weight, …]}}"
            )
    return tuple(changed)


def _perturbed_batch(batch: Any, path: InputPath, name: str, attempt: int) -> Any:
    """Return a batch with other values in one field; None if all its values are equal."""
    if callable(path):
        other = path(batch)
        return None if other is batch else other
    return _replace(batch, path if isinstance(path, tuple) else (path,), name, attempt)


def _replace(value: Any, path: tuple[str | int, ...], name: str, attempt: int) -> Any:
    """Return a copy of ``value`` with the tensor, or the column of a tensor, at the end of the path replaced."""
    if not path:
        if not isinstance(value, Tensor):
            raise InputError(f"inputs[{name!r}] leads to {type(value).__name__}, not to a tensor")
        return permuted_values(value, attempt)
    key, rest = path[0], path[1:]
    if isinstance(value, Tensor):
        if rest or not isinstance(key, int) or value.ndim < 2 or not -value.shape[1] <= key < value.shape[1]:
            raise InputError(f"inputs[{name!r}]: {key!r} is not a column of a tensor of shape {tuple(value.shape)}")
        column = permuted_values(value[:, key], attempt)
        if column is None:
            return None
        result = value.clone()
        result[:, key] = column
        return result
    try:
        inner = getattr(value, key) if isinstance(key, str) and not isinstance(value, Mapping) else value[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        raise InputError(f"inputs[{name!r}]: the batch has no {key!r} (in {type(value).__name__})") from None
    changed = _replace(inner, rest, name, attempt)
    if changed is None:
        return None
    if isinstance(value, Mapping):
        return {**value, key: changed}
    if isinstance(value, tuple | list):
        items = [changed if index == key else item for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    result = copy.copy(value)
    object.__setattr__(result, str(key), changed)
    return result


def permuted_values(values: Tensor, attempt: int) -> Tensor | None:
    """Return the values with each of them replaced by another one; None if all are equal."""
    flat = values.reshape(-1).contiguous()
    if values.dtype == torch.bool:
        return ~values if attempt == 1 and flat.numel() else None
    distinct = torch.unique(flat)
    if distinct.numel() < 2:
        return None
    index = (torch.searchsorted(distinct, flat) + attempt) % distinct.numel()
    permuted: Tensor = distinct[index].reshape(values.shape)
    return permuted
