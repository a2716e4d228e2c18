"""Nested state as JSON and tensors, tensors as safetensors files, state and errors as text between ranks.

A value that JSON cannot express is tagged: ``{"!tuple": […]}``, ``{"!items": [[key, value], …]}``,
``{"!float": "inf"}``, ``{"!tensor": "name"}``, ``{"!rows": ["mask", "rows"]}``. Reading never executes code.

A checkpoint leaves out the rows of a large tensor that are zero, such as the accumulators of rows of a table that have
had no gradient: it stores a mask (N,) of the other rows, and these rows.

The safetensors format is eight bytes of length, a JSON header (name -> dtype, shape, offsets), then the bytes of
the tensors. The ``safetensors`` package is not used: it writes neither tensor by tensor nor with a checksum.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from lpfs import errors
from lpfs._fileio import fsync_path, parse_json
from lpfs._validation import check_json
from lpfs.errors import InputError, LpfsError, RankError

TAGS = frozenset({"!tuple", "!items", "!float", "!tensor", "!rows"})
_TORCH_NAMES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
_FILE_NAMES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]  # of the safetensors format
DTYPES: dict[str, torch.dtype] = dict(zip(_FILE_NAMES, (getattr(torch, name) for name in _TORCH_NAMES), strict=True))
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 8 << 20  # of a safetensors file: about 60,000 tensors
READ_BYTES = 1 << 20  # read at once: other threads wait for a call that reads 64 MB for 30 ms
MAX_DIMS = 64  # of a tensor
MIN_SPARSE_BYTES = 1 << 16  # size of a tensor from which rows of zeros are left out
MAX_SPARSE_ROW_BYTES = 4096  # size of a row up to which they are: a small file cannot claim a huge tensor
MAX_NONZERO_FRACTION = 0.75  # of rows, above which a tensor is stored whole


@dataclass(frozen=True)
class NonzeroRows:
    """The rows of a tensor that are not zero, selected when they are written."""

    tensor: Tensor  # (N, …)
    mask: Tensor  # (N,) bool
    count: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return (self.count, *self.tensor.shape[1:])

    @property
    def nbytes(self) -> int:
        """The size of the rows."""
        return self.tensor.nbytes // len(self.tensor) * self.count

    def select(self) -> Tensor:
        """Return the rows."""
        return self.tensor[self.mask]


def nonzero_rows(tensor: Tensor) -> NonzeroRows | None:
    """Return the rows with a bit that is set, if a tensor is large and leaving out the others saves space."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if not tensor.ndim or tensor.nbytes < MIN_SPARSE_BYTES:
        return None
    row_bytes = tensor.nbytes // len(tensor)
    word = {0: torch.int64, 4: torch.int32}.get(row_bytes % 8)
    if row_bytes > MAX_SPARSE_ROW_BYTES or word is None:
        return None
    mask = as_bytes(tensor).view(word).view(len(tensor), -1).any(1)  # -0.0 is not zero
    count = int(mask.sum())
    return NonzeroRows(tensor, mask, count) if count <= MAX_NONZERO_FRACTION * len(tensor) else None


def expand_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Return the tensor of which these are the rows at ``mask``; all other rows are zero."""
    if mask.dtype is not torch.bool or mask.ndim != 1 or int(mask.sum()) != len(rows):
        raise ValueError(f"a mask of {mask.dtype} {tuple(mask.shape)} does not select {len(rows)} rows")
    if math.prod(rows.shape[1:]) * rows.itemsize > MAX_SPARSE_ROW_BYTES:
        raise ValueError(f"rows of {tuple(rows.shape[1:])} are larger than {MAX_SPARSE_ROW_BYTES} bytes")
    tensor = torch.zeros(len(mask), *rows.shape[1:], dtype=rows.dtype)
    tensor[mask] = rows
    return tensor


def flatten_state(value: Any, sparse: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return a nested value as JSON values and its tensors by name; ``sparse`` leaves out rows of zeros.

    >>> flatten_state({"lr": 0.1, "betas": (0.9, float("inf"))})
    ({'lr': 0.1, 'betas': {'!tuple': [0.9, {'!float': 'inf'}]}}, {})
    """
    tensors: dict[str, Tensor | NonzeroRows] = {}
    return _flatten(value, "", tensors, sparse), tensors


def _flatten(value: Any, path: str, tensors: dict[str, Tensor | NonzeroRows], sparse: bool) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        name = path if not {path, f"{path}!rows"} & tensors.keys() else f"{path}#{len(tensors)}"
        rows = nonzero_rows(value.detach()) if sparse else None
        if rows is not None:
            tensors |= {f"{name}!mask": rows.mask, f"{name}!rows": rows}
            return {"!rows": [f"{name}!mask", f"{name}!rows"]}
        tensors[name] = value.detach()
        return {"!tensor": name}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": str(float(value))}
    if isinstance(value, Mapping):
        flat = {
            key: _flatten(item, f"{path}.{key}" if path else str(key), tensors, sparse) for key, item in value.items()
        }
        is_json = all(type(key) is str for key in flat) and not TAGS & set(flat)
        return flat if is_json else {"!items": [[_flatten(k, path, tensors, sparse), item] for k, item in flat.items()]}
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{path}.{number}", tensors, sparse) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    raise InputError(
        f"{path or 'the state'} contains a {type(value).__name__}, which a checkpoint cannot store; use only "
        "tensors, numbers, text, None, lists, tuples and dictionaries"
    )


def restore_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``flatten_state`` took apart.

    >>> restore_state(*flatten_state({0: (1, 2.0), "x": torch.ones(2)}))
    {0: (1, 2.0), 'x': tensor([1., 1.])}
    """
    if isinstance(value, list):
        return [restore_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "!tensor":
            return tensors[inner]
        if tag == "!rows":
            mask, rows = inner
            return expand_rows(tensors[mask], tensors[rows])
        if tag == "!float":
            return float(inner)
        if tag == "!tuple":
            return tuple(restore_state(item, tensors) for item in inner)
        if tag == "!items":
            return {restore_state(key, tensors): restore_state(item, tensors) for key, item in inner}
    return {key: restore_state(item, tensors) for key, item in value.items()}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on its device, (n,) uint8, as a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write_tensors(path: Path, tensors: Mapping[str, Tensor | NonzeroRows]) -> dict[str, Any]:
    """Write tensors to a file, flush it to disk, and return its size and checksum."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        layout = tensor.layout if isinstance(tensor, Tensor) else torch.strided
        if tensor.dtype not in DTYPE_NAMES or layout is not torch.strided:
            raise InputError(f"{name}: a checkpoint cannot store a tensor of {tensor.dtype}, {layout}")
        start, offset = offset, offset + tensor.nbytes
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, offset]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        _write_bytes(file, digest, len(header_bytes).to_bytes(8, "little") + header_bytes)
        for tensor in tensors.values():
            if tensor.nbytes:
                rows = tensor if isinstance(tensor, Tensor) else tensor.select()
                _write_bytes(file, digest, as_bytes(rows.cpu()).numpy().data)
    fsync_path(path)
    return {"bytes": 8 + len(header_bytes) + offset, "sha256": digest.hexdigest()}


def _write_bytes(file: BinaryIO, digest: Any, data: bytes | memoryview) -> None:
    file.write(data)
    digest.update(data)


def read_header(path: Path) -> dict[str, Any]:
    """Return dtype, shape and offsets of the tensors of a file; raise ValueError if they do not match its size."""
    if not path.is_file() and path.exists():
        raise ValueError(f"{path.name} is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        count = int.from_bytes(file.read(8), "little")
        if size < 8 or count > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"the header has {count} bytes, the file has {size}; at most {MAX_HEADER_BYTES} are read")
        header = parse_json(file.read(count))
    check_json(header, dict[str, dict[str, Any]])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_tensor_entry(entry):
            raise ValueError(f"tensor {name!r} needs dtype, shape and data_offsets, found {str(entry)[:200]}")
    header = dict(sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])))
    offset = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        expected = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if start != offset or stop - start != expected:
            raise ValueError(f"tensor {name!r} needs {expected} bytes from {offset}, its offsets are {start} to {stop}")
        offset = stop
    if 8 + count + offset != size:
        raise ValueError(f"the file has {size} bytes, its header describes {8 + count + offset}")
    return header


def _is_tensor_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a header has a known dtype, a shape of sizes, and two offsets."""
    if entry.get("dtype") not in _FILE_NAMES:
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or len(shape) > MAX_DIMS:
        return False
    return all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, *offsets))


def read_tensors(
    path: Path, sha256: str | None = None, allocate: Callable[..., Tensor] = torch.empty
) -> dict[str, Tensor]:
    """Return the tensors of a file, in memory of ``allocate(shape, dtype=…)``; raise ValueError if it is damaged."""
    header = read_header(path)
    tensors: dict[str, Tensor] = {}
    with path.open("rb") as file:
        prefix = file.read(8)
        digest = hashlib.sha256(prefix + file.read(int.from_bytes(prefix, "little")))
        for name, entry in header.items():
            tensors[name] = tensor = allocate(entry["shape"], dtype=DTYPES[entry["dtype"]])
            data = as_bytes(tensor).numpy().data if tensor.numel() else b""
            for start in range(0, len(data), READ_BYTES):
                part = data[start : start + READ_BYTES]
                if file.readinto(part) != len(part):
                    raise ValueError("the file is truncated")
                digest.update(part)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ValueError("the checksum does not match")
    return tensors


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the aligned tensors of a file, mapped into memory; a change of a tensor does not change the file."""
    header = read_header(path)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if last > first and first % 8 == 0:
            data = np.memmap(path, np.uint8, "c", start + first, (last - first,))
            tensors[name] = torch.from_numpy(data).view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def state_to_text(value: Any) -> str:
    """Return a nested state as text.

    >>> state_from_text(state_to_text({"step": 3, "sampled": (torch.ones(2), float("inf"))}))
    {'step': 3, 'sampled': (tensor([1., 1.]), inf)}
    """
    return json.dumps(_encode(value))


def _encode(value: Any) -> list[Any]:
    """Return a nested state as JSON values and its tensors as dtype, shape and bytes."""
    values, tensors = flatten_state(value)
    data = {name: base64.b64encode(as_bytes(tensor.cpu()).numpy().data).decode() for name, tensor in tensors.items()}
    return [values, {name: [DTYPE_NAMES[x.dtype], list(x.shape), data[name]] for name, x in tensors.items()}]


def states_equal(first: Any, second: Any) -> bool:
    """Return whether two nested states are bitwise identical."""
    return _encode(first) == _encode(second)


def state_from_text(data: str | bytes) -> Any:
    """Return the value that ``state_to_text`` encoded."""
    values, encoded = json.loads(data)
    tensors = {}
    for name, (dtype, shape, text) in encoded.items():
        tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
        if text:
            as_bytes(tensors[name]).copy_(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))
    return restore_state(values, tensors)


def error_from_pair(kind: str, text: str) -> LpfsError:
    """Return the error of rank 0, given as class name and message, as an object that another rank can raise.

    >>> error_from_pair("InputError", "no such field")
    InputError('no such field')
    >>> error_from_pair("ZeroDivisionError", "division by zero")
    RankError('rank 0 failed: ZeroDivisionError: division by zero')
    """
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, LpfsError):
        return cls(text)
    return RankError(f"rank 0 failed: {kind}: {text}")
