"""The layout of a prepared Dataset on disk: names of files, versions, checksums.

::

    out/
      dataset.json    version, fingerprint, settings, and of every file its size and checksum
      schema.json     the fields in order, the label, the tasks
      vocab/NNNN.npz  raw values of field NNNN in id order (numbers, or UTF-8 text)
      days/NNNN/      one folder a day, in time order, one .npy file a column
        fNNNN.npy           ids (smallest unsigned type), or numbers (float32; (n, w) when w > 1)
        fNNNN.missing.npy   1 where a number is missing (the number is 0.0 there); absent when none is
        fNNNN.offsets.npy   of a bag: row i holds values[offsets[i]:offsets[i + 1]]
        yNNNN.npy           label (0000) and tasks (0001 …), uint8, or float32 when not all are whole

Names of fields and days are text from outside and never become part of a path.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lpfs.errors import DataError

FORMAT = "lpfs dataset"
VERSION = 1
MISSING_ID = 0
UNSEEN_ID = 1
FIRST_ID = 2
SYNCED = 16  # files put on the disk at a time
HEADER = 128  # bytes of the .npy header, padded so that it can be rewritten in place

AnyArray = npt.NDArray[Any]


def field_file(index: int, part: str = "") -> str:
    """Name of a column file of field ``index``; ``part`` is ``""``, ``"missing"`` or ``"offsets"``."""
    return f"f{index:04d}.{part}.npy" if part else f"f{index:04d}.npy"


def label_file(index: int) -> str:
    """Name of the file of the label (0) or of task ``index - 1``."""
    return f"y{index:04d}.npy"


def day_folder(index: int) -> str:
    """Path of a day, relative to the Dataset."""
    return f"days/{index:04d}"


def vocabulary_file(index: int) -> str:
    """Path of the vocabulary of field ``index``, relative to the Dataset."""
    return f"vocab/{index:04d}.npz"


def id_dtype(largest: int) -> np.dtype[Any]:
    """Smallest unsigned type that holds ids up to ``largest``."""
    if largest >= 2**31:
        raise DataError(f"an id must be below 2**31, found {largest}; cap the vocabulary or hash the field")
    return np.min_scalar_type(max(int(largest), 0))


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Header of a version 1.0 .npy file, always ``HEADER`` bytes long."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    body = text.ljust(HEADER - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode("latin1")


def file_checksum(path: Path) -> str:
    """CRC-32 of a file: of a column, the data first and the header last, as it is written."""
    with path.open("rb") as file:
        head = file.read(HEADER) if path.suffix == ".npy" else b""
        crc = 0
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return f"{zlib.crc32(head, crc):08x}"


def json_checksum(values: dict[str, Any]) -> str:
    """CRC-32 of JSON values in one canonical spelling."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def write_json(path: Path, values: Any) -> None:
    """Write JSON, UTF-8, one space of indentation."""
    path.write_text(json.dumps(values, indent=1, ensure_ascii=True) + "\n", "utf-8")


def sync(path: Path) -> None:
    """Have the system put a file or a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(folder: Path) -> None:
    """Put everything below a folder on the disk, many at a time: one by one, each would wait for the disk."""
    paths = sorted(folder.rglob("*"), reverse=True)  # a folder comes after what is in it
    with ThreadPoolExecutor(SYNCED) as pool:
        list(pool.map(sync, (path for path in paths if not path.is_dir())))
        list(pool.map(sync, (path for path in paths if path.is_dir())))


def save_vocabulary(file: BinaryIO, values: Any) -> None:
    """Write raw values in id order: numbers as they are, anything else as UTF-8 text."""
    array = values if isinstance(values, np.ndarray) else None
    if array is not None and array.dtype.kind in "iufb":
        np.savez(file, numbers=array)
        return
    encoded = [str(value).encode("utf-8", "surrogatepass") for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    np.savez(file, text=np.frombuffer(b"".join(encoded), np.uint8), ends=ends)


def load_vocabulary(path: Path) -> AnyArray | list[str]:
    """Read what ``save_vocabulary`` wrote: an array of numbers or a list of text."""
    with np.load(path, allow_pickle=False) as stored:
        if "numbers" in stored:
            return np.asarray(stored["numbers"])
        data, ends = stored["text"].tobytes(), stored["ends"].tolist()
    return [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(ends)]
