"""One column of one day, written chunk by chunk into a .npy file."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lpfs.data.store.format import HEADER, AnyArray, npy_header

COPY = 1 << 20  # items moved at a time when a column gets a wider type


class ColumnFile:
    """A .npy file that grows by chunks and widens its type when a chunk needs it.

    No file stays open between two chunks, so that a thousand columns of many days can grow side by side.
    The checksum runs along: CRC-32 of the data, then of the header, which is known only at the end.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], width: int = 1) -> None:
        self.path, self.dtype, self.width = path, dtype, width
        self.items = 0
        self.before = 0  # items that were there before the last chunk
        self._crc = 0
        path.write_bytes(b"\0" * HEADER)

    def append(self, values: AnyArray) -> None:
        """Add values, (n,) or (n, width), of a type that the column can hold or widen to."""
        if values.dtype != self.dtype:
            wide = np.promote_types(values.dtype, self.dtype)
            if wide != self.dtype:
                self._widen(wide)
            values = values.astype(self.dtype)
        data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        with self.path.open("ab") as file:
            file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.before = self.items
        self.items += values.size

    def append_zeros(self, items: int) -> None:
        """Add as many zeros, without holding them all."""
        for start in range(0, items, COPY):
            self.append(np.zeros(min(COPY, items - start), self.dtype))

    def _widen(self, dtype: np.dtype[Any]) -> None:
        old, aside = self.path, self.path.with_suffix(".wider")
        self._crc = 0
        with old.open("rb") as source, aside.open("wb") as target:
            target.write(source.read(HEADER))
            while chunk := source.read(COPY * self.dtype.itemsize):
                data = np.frombuffer(chunk, self.dtype).astype(dtype).tobytes()
                self._crc = zlib.crc32(data, self._crc)
                target.write(data)
        aside.replace(old)
        self.dtype = dtype

    def close(self) -> dict[str, Any]:
        """Write the header; return size, checksum and type for ``dataset.json``."""
        rows = self.items // self.width
        header = npy_header(self.dtype, (rows,) if self.width == 1 else (rows, self.width))
        with self.path.open("r+b") as file:
            file.write(header)
        size = HEADER + self.items * self.dtype.itemsize
        return {"bytes": size, "checksum": f"{zlib.crc32(header, self._crc):08x}", "dtype": self.dtype.str}
