"""Tensors in a file in the safetensors format, with a checksum taken on the way: torch alone is needed.

The format is eight bytes of length, a JSON header (name -> dtype, shape, place), then the bytes of the tensors
one after another. It is written here and not by its package so that a checkpoint can be made where nothing but
torch is installed, tensor by tensor without a copy of them all, and so that a full disk is an OSError; the
tests read these files with the package, and the package's files with this.

Nested state as JSON and tensors: what state dicts hold, taken apart and put together again, without code.

Tuples, keys that are not text, numbers that JSON has no spelling for and tensors are tagged:
``{"!tuple": […]}``, ``{"!items": [[key, value], …]}``, ``{"!float": "inf"}``, ``{"!tensor": "name"}``.

What ranks tell each other beside tensors: nested values and errors as JSON, without code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lpfs import errors
from lpfs._fileio import fsync_path
from lpfs.errors import InputError, LpfsError, RankError

TAGS = frozenset({"!tuple", "!items", "!float", "!tensor"})


def flatten_state(value: Any, where: str = "") -> tuple[Any, dict[str, Tensor]]:
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


def restore_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what ``pack`` was given.

    >>> unpack(*pack({0: (1, 2.0), "x": torch.ones(2)}))
    {0: (1, 2.0), 'x': tensor([1., 1.])}
    """
    if isinstance(value, list):
        return [restore_state(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "!tensor":
            return tensors[inner]
        if tag == "!float":
            return float(inner)
        if tag == "!tuple":
            return tuple(restore_state(each, tensors) for each in inner)
        if tag == "!items":
            return {restore_state(key, tensors): restore_state(each, tensors) for key, each in inner}
    return {key: restore_state(each, tensors) for key, each in value.items()}


def states_equal(one: Any, two: Any) -> bool:
    """Say whether two nested states are the same, bit by bit."""
    (left, ours), (right, theirs) = flatten_state(one), flatten_state(two)
    return (
        left == right and ours.keys() == theirs.keys() and all(tensors_identical(ours[n], theirs[n]) for n in ours)
    )


def tensors_identical(one: Tensor, two: Tensor) -> bool:
    """Say whether two tensors hold the same bits."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(as_bytes(one), as_bytes(two))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, (n,) uint8, without a copy where it lies there already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LARGEST_HEADER = 100_000_000


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors, put them on the disk, and return the file's size and checksum."""
    header: dict[str, Any] = {}
    place = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
            raise InputError(f"{name}: a checkpoint cannot keep a tensor of {tensor.dtype}, {tensor.layout}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        _write_bytes(file, digest, len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            if tensor.numel():
                _write_bytes(file, digest, as_bytes(tensor).numpy().data)
    fsync_path(path)
    return {"bytes": 8 + len(head) + place, "sha256": digest.hexdigest()}


def _write_bytes(file: BinaryIO, digest: Any, data: bytes | memoryview) -> None:
    """Write a piece of the file."""
    file.write(data)
    digest.update(data)


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file; a ValueError says what is wrong with it."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = _read_bytes(file, digest, 8)
        count = int.from_bytes(length, "little")
        if count > min(size - 8, LARGEST_HEADER):
            raise ValueError("its header is longer than it")
        header = json.loads(_read_bytes(file, digest, count))
        header.pop("__metadata__", None)
        tensors: dict[str, Tensor] = {}
        place = 0
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = DTYPES[about["dtype"]], about["shape"]
            tensor = torch.empty(shape, dtype=dtype)
            begin, end = about["data_offsets"]
            if begin != place or end - begin != tensor.numel() * tensor.element_size() or 8 + count + end > size:
                raise ValueError(f"tensor {name!r} does not fit where it should be")
            if tensor.numel():
                data = as_bytes(tensor).numpy().data
                if file.readinto(data) != end - begin:
                    raise ValueError("it ends early")
                digest.update(data)
            tensors[name], place = tensor, end
        if file.read(1):
            raise ValueError("it is longer than its header says")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ValueError("its checksum does not match")
    return {name: tensors[name] for name in header}


def _read_bytes(file: BinaryIO, digest: Any, count: int) -> bytes:
    """Read a piece of the file."""
    data = file.read(count)
    if len(data) != count:
        raise ValueError("it ends early")
    digest.update(data)
    return data


def state_to_text(value: Any) -> str:
    """Return a value as text: whatever a checkpoint can keep.

    >>> decode(encode({"step": 3, "drawn": (torch.ones(2), float("inf"))}))
    {'step': 3, 'drawn': (tensor([1., 1.]), inf)}
    """
    values, tensors = flatten_state(value)
    told = {
        name: [NAMES[each.dtype], list(each.shape), base64.b64encode(as_bytes(each).numpy().tobytes()).decode()]
        for name, each in tensors.items()
    }
    return json.dumps([values, told])


def state_from_text(data: str | bytes) -> Any:
    """Return what ``encode`` was given."""
    values, told = json.loads(data)
    tensors = {}
    for name, (kind, shape, text) in told.items():
        raw = bytearray(base64.b64decode(text))
        empty = torch.empty(shape, dtype=DTYPES[kind])
        tensors[name] = torch.frombuffer(raw, dtype=DTYPES[kind]).reshape(shape) if raw else empty
    return restore_state(values, tensors)


def error_to_pair(error: BaseException) -> list[str]:
    """Return an error as two words: what kind, and what it says."""
    return [type(error).__name__, str(error)]


def error_from_pair(kind: str, text: str) -> LpfsError:
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
