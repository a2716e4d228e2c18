"""Nested state as JSON and tensors: what state dicts hold, taken apart and put together again, without code.

Tuples, keys that are not text, numbers that JSON has no spelling for and tensors are tagged:
``{"!tuple": […]}``, ``{"!items": [[key, value], …]}``, ``{"!float": "inf"}``, ``{"!tensor": "name"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lpfs.errors import InputError

TAGS = frozenset({"!tuple", "!items", "!float", "!tensor"})


def pack(value: Any, where: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON and the tensors in it, by name.

    >>> pack({"lr": 0.1, "betas": (0.9, float("inf"))})
    ({'lr': 0.1, 'betas': {'!tuple': [0.9, {'!float': 'inf'}]}}, {})
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, where, tensors), tensors


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        name = where if where not in tensors else f"{where}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"!tensor": name}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": str(float(value))}
    if isinstance(value, Mapping):
        packed = {
            key: _pack(each, f"{where}.{key}" if where else str(key), tensors) for key, each in value.items()
        }
        plain = all(type(key) is str for key in packed) and not TAGS & set(packed)
        return packed if plain else {"!items": [[_pack(k, where, tensors), each] for k, each in packed.items()]}
    if isinstance(value, list | tuple):
        several = [_pack(each, f"{where}.{number}", tensors) for number, each in enumerate(value)]
        return several if isinstance(value, list) else {"!tuple": several}
    raise InputError(
        f"{where or 'the state'} holds a {type(value).__name__}, which a checkpoint cannot keep; state must be "
        "made of tensors, numbers, text, None, lists, tuples and dictionaries"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what ``pack`` was given.

    >>> unpack(*pack({0: (1, 2.0), "x": torch.ones(2)}))
    {0: (1, 2.0), 'x': tensor([1., 1.])}
    """
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "!tensor":
            return tensors[inner]
        if tag == "!float":
            return float(inner)
        if tag == "!tuple":
            return tuple(unpack(each, tensors) for each in inner)
        if tag == "!items":
            return {unpack(key, tensors): unpack(each, tensors) for key, each in inner}
    return {key: unpack(each, tensors) for key, each in value.items()}


def equal(one: Any, two: Any) -> bool:
    """Say whether two nested states are the same, bit by bit."""
    (left, ours), (right, theirs) = pack(one), pack(two)
    return left == right and ours.keys() == theirs.keys() and all(same(ours[n], theirs[n]) for n in ours)


def same(one: Tensor, two: Tensor) -> bool:
    """Say whether two tensors hold the same bits."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(as_bytes(one), as_bytes(two))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, (n,) uint8, without a copy where it lies there already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
