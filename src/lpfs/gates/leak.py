"""The leak check, by behaviour: replace what goes into a dropped field, and no logit may move by one bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.errors import InputError, LeakError
from lpfs.gates.logits import Call, logits_of, max_change

# where the raw value of a field is in a batch: a key, a path of keys ending in a column, or a function that
# returns a batch with other values in that field
Where: TypeAlias = str | int | tuple[str | int, ...] | Callable[[Any], Any]


def inputs_of(model: nn.Module) -> Mapping[str, Where]:
    """Return how a model says its fields' raw values can be replaced; nothing if it does not say."""
    method = getattr(type(model), "inputs_of_fields", None)
    return dict(method(model)) if callable(method) else {}


def check_leaks(
    model: nn.Module,
    dropped: Sequence[str],
    batch: Any,
    inputs: Mapping[str, Where],
    call: Call | None = None,
) -> tuple[str, ...]:
    """Return the dropped fields that were checked; raise LeakError for one that still reaches the output.

    A field is checked where ``inputs`` knows it (it may know others too) and its values in the batch can be
    replaced by others of the same batch, so that ids stay in range.
    """
    changed: dict[str, list[Any]] = {}
    for name in dropped:
        if name in inputs:
            others = [_other_batch(batch, inputs[name], name, turn) for turn in (1, 2)]
            if any(each is not None for each in others):
                changed[name] = [each for each in others if each is not None]
    if not changed:
        return ()
    before = logits_of(model, batch, call)
    if not any(each.numel() for each in before):
        raise InputError("the batch is empty: nothing can be checked on it")
    again = logits_of(model, batch, call)
    if max_change(before, again) != 0.0:
        raise InputError("the model gives other outputs for the same batch in eval mode: it cannot be checked")
    for name, batches in changed.items():
        moved = max(max_change(before, logits_of(model, each, call)) for each in batches)
        if moved != 0.0:
            raise LeakError(
                f"field {name!r} is dropped, but its values still move the output by up to {moved:.3g}: it "
                "reaches the prediction past its gate (an ungated linear or wide part, a second table?). Name "
                f"that part too: fields={{{name!r}: [embedding, wide weight, …]}}"
            )
    return tuple(changed)


def _other_batch(batch: Any, where: Where, name: str, turn: int) -> Any:
    """Return a batch with other values in one field; None if there are no others to take."""
    if callable(where):
        other = where(batch)
        return None if other is batch else other
    return _replace(batch, where if isinstance(where, tuple) else (where,), name, turn)


def _replace(at: Any, path: tuple[str | int, ...], name: str, turn: int) -> Any:
    """Return a copy of ``at`` with the tensor, or the column of one, at the end of the path replaced."""
    if not path:
        if not isinstance(at, Tensor):
            raise InputError(f"inputs[{name!r}] leads to {type(at).__name__}, not to a tensor")
        return other_values(at, turn)
    key, rest = path[0], path[1:]
    if isinstance(at, Tensor):
        if rest or not isinstance(key, int) or at.ndim < 2 or not -at.shape[1] <= key < at.shape[1]:
            raise InputError(f"inputs[{name!r}]: {key!r} is no column of a tensor shaped {tuple(at.shape)}")
        column = other_values(at[:, key], turn)
        if column is None:
            return None
        result = at.clone()
        result[:, key] = column
        return result
    try:
        inner = getattr(at, key) if isinstance(key, str) and not isinstance(at, Mapping) else at[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        raise InputError(f"inputs[{name!r}]: the batch has no {key!r} (in {type(at).__name__})") from None
    value = _replace(inner, rest, name, turn)
    if value is None:
        return None
    if isinstance(at, Mapping):
        return {**at, key: value}
    if isinstance(at, tuple | list):
        several = [value if number == key else each for number, each in enumerate(at)]
        if isinstance(at, list):
            return several
        return type(at)(*several) if hasattr(at, "_fields") else tuple(several)
    changed = copy.copy(at)
    object.__setattr__(changed, str(key), value)
    return changed


def other_values(values: Tensor, turn: int) -> Tensor | None:
    """Return the values with each replaced by another one of them; None if they are all the same."""
    flat = values.reshape(-1).contiguous()
    if values.dtype == torch.bool:
        return ~values if turn == 1 and flat.numel() else None
    kinds = torch.unique(flat)
    if kinds.numel() < 2:
        return None
    others: Tensor = kinds[(torch.searchsorted(kinds, flat) + turn) % kinds.numel()].reshape(values.shape)
    return others
