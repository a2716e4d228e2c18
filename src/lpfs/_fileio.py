"""TODO"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NPY_HEADER_BYTES = 128  # of a column file: padded so that it can be rewritten in place


def file_checksum(path: Path) -> str:
    """CRC-32 of a file: of a column, the data first and the header last, as it is written."""
    with path.open("rb") as file:
        head = file.read(NPY_HEADER_BYTES) if path.suffix == ".npy" else b""
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


def fsync_path(path: Path) -> None:
    """Have the system put a file or a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SYNCED = 16  # files put on the disk at a time


def fsync_tree(folder: Path) -> None:
    """Put everything below a folder on the disk, many at a time: one by one, each would wait for the disk."""
    paths = sorted(folder.rglob("*"), reverse=True)  # a folder comes after what is in it
    with ThreadPoolExecutor(SYNCED) as pool:
        list(pool.map(fsync_path, (path for path in paths if not path.is_dir())))
        list(pool.map(fsync_path, (path for path in paths if path.is_dir())))
