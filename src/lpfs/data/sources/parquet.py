"""Page headers of a Parquet file, checked before they are trusted.

A damaged count in a page header makes the Parquet reader ask for more memory than any machine has, which ends
the process. Only what is certainly wrong is refused here; whatever else is odd is left to the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from lpfs.errors import DataError

HEADER = 1 << 16  # bytes in which a page header is looked for
FOOTER = 1 << 26  # a larger footer is not checked
Struct = dict[int, Any]


class Thrift:
    """Reads structs of the compact protocol as {field number: value}."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def varint(self) -> int:
        """Read an unsigned number."""
        result = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            result |= (byte & 127) << shift
            if byte < 128:
                return result
            shift += 7
            if shift > 70:
                raise ValueError("a number is too long")

    def number(self) -> int:
        """Read a signed number."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def value(self, kind: int, depth: int) -> Any:
        """Read a value of a type."""
        if kind in (1, 2):
            return kind == 1
        if kind in (3, 7):
            size = 1 if kind == 3 else 8
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (4, 5, 6):
            return self.number()
        if kind == 8:
            size = self.varint()
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (9, 10):
            head = self.data[self.at]
            self.at += 1
            size = head >> 4 if head >> 4 != 15 else self.varint()
            if size > len(self.data):
                raise ValueError("a list is too long")
            if head & 15 in (1, 2):
                self.at += size
                return None
            return [self.value(head & 15, depth + 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"unknown type {kind}")

    def struct(self, depth: int = 0) -> Struct:
        """Read a struct."""
        if depth > 20:
            raise ValueError("nested too deeply")
        result: Struct = {}
        field = 0
        while True:
            head = self.data[self.at]
            self.at += 1
            if head == 0:
                return result
            field = field + (head >> 4) if head >> 4 else self.number()
            result[field] = self.value(head & 15, depth)


def check_pages(path: Path) -> int:
    """Refuse a file whose page headers hold impossible counts; return how many were looked at."""
    with path.open("rb") as file:
        try:
            chunks = column_chunks(file)
        except (LookupError, ValueError, TypeError, AttributeError, OSError):
            return 0  # the reader will say what is wrong
        return sum(check_chunk(file, path, chunk) for chunk in chunks)


def column_chunks(file: BinaryIO) -> list[Struct]:
    """Return the description of every column chunk, from the footer."""
    size = file.seek(0, 2)
    file.seek(size - 8)
    length = int.from_bytes(file.read(4), "little")
    if length > min(FOOTER, size - 8):
        return []
    file.seek(size - 8 - length)
    footer = Thrift(file.read(length)).struct()
    return [column[3] for group in footer[4] for column in group[1]]


def check_chunk(file: BinaryIO, path: Path, chunk: Struct) -> int:
    """Walk the pages of a column chunk; return how many there are."""
    pages = 0
    try:
        at, values = chunk[9], chunk[5]
        if 0 < chunk.get(11, 0) < at:
            at = chunk[11]
        end = at + chunk[7]
        name = b".".join(chunk[3]).decode("utf-8", "replace")
        while at < end:
            file.seek(at)
            reader = Thrift(file.read(min(HEADER, end - at)))
            page = reader.struct()
            body = page.get(5) or page.get(7) or page.get(8) or {}
            counts = [body.get(1, 0), page[2], page[3], *(body.get(i, 0) for i in (2, 3, 5, 6) if 8 in page)]
            most = values if 7 not in page else 2**31 - 1
            if min(counts) < 0 or counts[0] > most or at + reader.at + page[3] > end:
                raise DataError(
                    f"{path}: cannot be read as Parquet: column {name!r} has a damaged page at byte {at}; "
                    "copy or make the file again"
                )
            at += reader.at + page[3]
            pages += 1
    except DataError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OSError, OverflowError):
        pass  # the reader will say what is wrong
    return pages
