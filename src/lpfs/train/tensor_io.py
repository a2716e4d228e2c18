"""Tensors in a file in the safetensors format, with a checksum taken on the way: torch alone is needed.

The format is eight bytes of length, a JSON header (name -> dtype, shape, place), then the bytes of the tensors
one after another. It is written here and not by its package so that a checkpoint can be made where nothing but
torch is installed, tensor by tensor without a copy of them all, and so that a full disk is an OSError; the
tests read these files with the package, and the package's files with this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lpfs.data.store.format import sync
from lpfs.errors import InputError
from lpfs.train.codec import as_bytes

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
        put(file, digest, len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            if tensor.numel():
                put(file, digest, as_bytes(tensor).numpy().data)
    sync(path)
    return {"bytes": 8 + len(head) + place, "sha256": digest.hexdigest()}


def put(file: BinaryIO, digest: Any, data: bytes | memoryview) -> None:
    """Write a piece of the file."""
    file.write(data)
    digest.update(data)


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file; a ValueError says what is wrong with it."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = take(file, digest, 8)
        count = int.from_bytes(length, "little")
        if count > min(size - 8, LARGEST_HEADER):
            raise ValueError("its header is longer than it")
        header = json.loads(take(file, digest, count))
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


def take(file: BinaryIO, digest: Any, count: int) -> bytes:
    """Read a piece of the file."""
    data = file.read(count)
    if len(data) != count:
        raise ValueError("it ends early")
    digest.update(data)
    return data
