"""What ranks tell each other beside tensors: nested values and errors as JSON, without code."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from lpfs import errors
from lpfs.errors import LpfsError, RankError
from lpfs.train.codec import as_bytes, pack, unpack
from lpfs.train.tensor_io import DTYPES, NAMES


def encode(value: Any) -> str:
    """Return a value as text: whatever a checkpoint can keep.

    >>> decode(encode({"step": 3, "drawn": (torch.ones(2), float("inf"))}))
    {'step': 3, 'drawn': (tensor([1., 1.]), inf)}
    """
    values, tensors = pack(value)
    told = {
        name: [NAMES[each.dtype], list(each.shape), base64.b64encode(as_bytes(each).numpy().tobytes()).decode()]
        for name, each in tensors.items()
    }
    return json.dumps([values, told])


def decode(data: str | bytes) -> Any:
    """Return what ``encode`` was given."""
    values, told = json.loads(data)
    tensors = {}
    for name, (kind, shape, text) in told.items():
        raw = bytearray(base64.b64decode(text))
        empty = torch.empty(shape, dtype=DTYPES[kind])
        tensors[name] = torch.frombuffer(raw, dtype=DTYPES[kind]).reshape(shape) if raw else empty
    return unpack(values, tensors)


def describe(error: BaseException) -> list[str]:
    """Return an error as two words: what kind, and what it says."""
    return [type(error).__name__, str(error)]


def rebuild(kind: str, text: str) -> LpfsError:
    """Return the error of rank 0 for another rank to raise.

    >>> rebuild("InputError", "no such field")
    InputError('no such field')
    >>> rebuild("ZeroDivisionError", "division by zero")
    RankError('rank 0 failed: ZeroDivisionError: division by zero')
    """
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, LpfsError):
        return found(text)
    return RankError(f"rank 0 failed: {kind}: {text}")
