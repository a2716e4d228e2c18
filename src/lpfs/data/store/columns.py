"""Write the columns of a folder: buffered in memory, then in a temporary file; short columns share one file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NPY_HEADER_BYTES = 128
PACKED = "columns"  # name of the file with the short columns of a folder
PACKED_BYTES = 1 << 16  # a column of fewer bytes is a part of that file
ALIGNMENT = 8  # bytes; of the columns in that file
BUFFER_BYTES = 32 << 20  # of all columns that are not written yet
ARRAY_BYTES = 128  # memory of an array besides its items
COPY_ITEMS = 1 << 20  # items copied at a time

Values = npt.NDArray[Any]


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a header of .npy version 1.0 that is ``NPY_HEADER_BYTES`` long."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    body = text.ljust(NPY_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode("latin1")


class WriteBuffer:
    """The number of bytes that the writers of all folders keep in memory; at most ``BUFFER_BYTES``."""

    def __init__(self) -> None:
        self.folders: list[FolderWriter] = []
        self.bytes = 0

    def add(self, size: int) -> None:
        """Count ``size`` more bytes; move the largest folders to their temporary files if there are too many."""
        self.bytes += size
        if self.bytes > BUFFER_BYTES:
            for folder in sorted(self.folders, key=lambda folder: folder.buffered, reverse=True):
                if self.bytes > BUFFER_BYTES // 2:
                    folder.spill()


class ColumnBuffer:
    """A column that is being written: the parts in memory, and where the earlier ones are in the temporary file."""

    __slots__ = ("dtype", "items", "parts", "spilled", "width")

    def __init__(self, dtype: np.dtype[Any], width: int) -> None:
        self.dtype, self.width, self.items = dtype, width, 0
        self.parts: list[Values] = []
        self.spilled: array[int] | None = None  # of each part: first byte, number of items, type (a character code)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the final type."""
        return self.items * self.dtype.itemsize


class FolderWriter:
    """Columns that grow by chunks and change to a wider type if a chunk needs it; ``close`` writes the files.

    A column of fewer than ``PACKED_BYTES`` bytes becomes a part of ``columns.npy``, any other a .npy file, so that
    thousands of columns and days need few files, and few files are open at a time.
    """

    def __init__(self, folder: Path, buffer: WriteBuffer) -> None:
        self.folder, self.columns, self.buffered = folder, dict[str, ColumnBuffer](), 0
        self._buffer, self._temporary = buffer, folder / "columns.tmp"
        buffer.folders.append(self)

    def append(self, name: str, values: Values, width: int = 1) -> None:
        """Append values, (n,) or (n, width), which must not be changed afterwards."""
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = ColumnBuffer(values.dtype, width)
        elif column.dtype != values.dtype:
            column.dtype = np.promote_types(column.dtype, values.dtype)
        column.parts.append(values)
        column.items += values.size
        self.buffered += values.nbytes + ARRAY_BYTES
        self._buffer.add(values.nbytes + ARRAY_BYTES)

    def append_zeros(self, name: str, items: int, width: int = 1) -> None:
        """Append zeros of one byte each, in parts, so that memory stays small."""
        for start in range(0, items, COPY_ITEMS):
            self.append(name, np.zeros(min(COPY_ITEMS, items - start), np.uint8), width)

    def spill(self) -> None:
        """Move what is in memory to the temporary file."""
        with self._temporary.open("ab") as file:
            for column in self.columns.values():
                if column.parts:
                    values = np.concatenate([part.reshape(-1) for part in column.parts])
                    column.spilled = column.spilled or array("q")
                    column.spilled.extend((file.tell(), values.size, ord(values.dtype.char)))
                    file.write(values.data.cast("B") if values.size else b"")
                    column.parts.clear()
        self._buffer.bytes -= self.buffered
        self.buffered = 0

    def close(self, new_names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Write the columns in ``new_names`` under their new names; return their entries in ``dataset.json``."""
        if self._temporary.exists():
            self.spill()
        entries: dict[str, dict[str, Any]] = {}
        packed: list[ColumnBuffer] = []
        start = NPY_HEADER_BYTES
        for new, column in sorted((new, self.columns[name]) for name, new in new_names.items()):
            entries[new] = {"dtype": column.dtype.str, "items": column.items}
            if (size := column.nbytes) < PACKED_BYTES:
                entries[new]["start"] = start
                start += _padded(size)
                packed.append(column)
            else:
                rows = column.items // column.width
                shape = (rows,) if column.width == 1 else (rows, column.width)
                self._write(new, npy_header(column.dtype, shape), [column])
        if packed:
            self._write(PACKED, npy_header(np.dtype(np.uint8), (start - NPY_HEADER_BYTES,)), packed)
        self._temporary.unlink(missing_ok=True)
        self._buffer.bytes -= self.buffered
        self._buffer.folders.remove(self)
        self.columns.clear()
        return entries

    def _write(self, name: str, header: bytes, columns: list[ColumnBuffer]) -> None:
        with (self.folder / f"{name}.npy").open("wb") as file:
            file.write(header)
            for column in columns:
                for values in self._parts(column) if column.spilled else column.parts:
                    file.write(np.ascontiguousarray(values, column.dtype).data)
                if name == PACKED and (rest := column.nbytes % ALIGNMENT):
                    file.write(bytes(ALIGNMENT - rest))

    def _parts(self, column: ColumnBuffer) -> Iterator[Values]:
        """Yield the parts of a column in order."""
        if column.spilled:
            with self._temporary.open("rb") as file:
                for index in range(0, len(column.spilled), 3):
                    start, items, code = column.spilled[index : index + 3]
                    file.seek(start)
                    for first in range(0, items, COPY_ITEMS):
                        yield np.fromfile(file, chr(code), min(COPY_ITEMS, items - first))
        yield from column.parts


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
