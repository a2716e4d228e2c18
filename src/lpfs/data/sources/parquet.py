"""Rows of Parquet files, with a check of the page headers before polars reads them.

A damaged count in a page header makes the Parquet reader request more memory than any machine has, which ends the
process. The check rejects only certain errors; anything else is left to the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from lpfs.data.parsing import decode_dictionary_columns, first_line
from lpfs.data.remote import LogFile, fetch_to_local
from lpfs.data.sources.base import ROWS, Chunk, FileSource, Piece, row_locator
from lpfs.errors import DataError, InputError

MAX_HEADER = 1 << 16  # bytes read to parse a page header
MAX_FOOTER = 1 << 26  # bytes; a larger footer is not checked
MAX_DEPTH = 20  # of nested structs
SLICE_CELLS = 1 << 22  # rows times columns decoded at a time from a large row group
MALFORMED = (LookupError, ValueError, TypeError, AttributeError, OSError, OverflowError)  # errors of parsing metadata
Struct = dict[int, Any]


class CompactThriftReader:
    """Reads structs of the Thrift compact protocol as {field number: value}."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def byte(self) -> int:
        """Read a byte."""
        self.position += 1
        return self.data[self.position - 1]

    def varint(self) -> int:
        """Read an unsigned integer."""
        result = 0
        for shift in range(0, 77, 7):
            byte = self.byte()
            result |= (byte & 127) << shift
            if byte < 128:
                return result
        raise ValueError("a number is too long")

    def integer(self) -> int:
        """Read a signed integer."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def value(self, kind: int, depth: int) -> Any:
        """Read a value of a Thrift type."""
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self.integer()
        if kind in (3, 7, 8):  # a byte, a double, a string
            size = {3: 1, 7: 8}.get(kind) or self.varint()
            self.position += size
            return self.data[self.position - size : self.position]
        if kind in (9, 10):
            head = self.byte()
            size = head >> 4 if head >> 4 != 15 else self.varint()
            if size > len(self.data):
                raise ValueError("a list is too long")
            if head & 15 in (1, 2):
                self.position += size
                return None
            return [self.value(head & 15, depth + 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"unknown type {kind}")

    def struct(self, depth: int = 0) -> Struct:
        """Read a struct."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        result: Struct = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.integer()
            result[field] = self.value(head & 15, depth)
        return result


def check_pages(path: Path) -> tuple[int, int]:
    """Raise DataError if a page header holds impossible counts.

    Return the number of pages checked, and the rows of the largest row group: 2^63 - 1 if the footer is not readable.
    """
    with path.open("rb") as file:
        try:
            groups = row_groups(file)
            chunks = [column[3] for group in groups for column in group[1]]
            largest = max(int(group[3]) for group in groups)
        except MALFORMED:
            return 0, 2**63 - 1  # the reader reports the error
        return sum(check_chunk(file, path, chunk) for chunk in chunks), largest


def row_groups(file: BinaryIO) -> list[Struct]:
    """Return the metadata of every row group, from the footer."""
    size = file.seek(0, 2)
    file.seek(size - 8)
    length = int.from_bytes(file.read(4), "little")
    if length > min(MAX_FOOTER, size - 8):
        return []
    file.seek(size - 8 - length)
    groups: list[Struct] = CompactThriftReader(file.read(length)).struct()[4]
    return groups


def check_chunk(file: BinaryIO, path: Path, chunk: Struct) -> int:
    """Check the pages of a column chunk; return how many there are."""
    pages = 0
    try:
        position, values = chunk[9], chunk[5]
        if 0 < chunk.get(11, 0) < position:
            position = chunk[11]
        end = position + chunk[7]
        name = b".".join(chunk[3]).decode("utf-8", "replace")
        while position < end:
            file.seek(position)
            reader = CompactThriftReader(file.read(min(MAX_HEADER, end - position)))
            page = reader.struct()
            body = page.get(5) or page.get(7) or page.get(8) or {}
            counts = [body.get(1, 0), page[2], page[3], *(body.get(i, 0) for i in (2, 3, 5, 6) if 8 in page)]
            max_values = values if 7 not in page else 2**31 - 1
            size = reader.position + page[3]
            if min(counts) < 0 or counts[0] > max_values or position + size > end:
                problem = f"column {name!r} has a damaged page at byte {position}; copy or make the file again"
                raise DataError(f"{path}: cannot be read as Parquet: {problem}")
            position += size
            pages += 1
    except MALFORMED as error:  # the reader reports it
        if isinstance(error, DataError):
            raise
    return pages


@contextmanager
def _convert_parquet_errors(file: str) -> Iterator[None]:
    """Convert failures of the Parquet reader into a DataError that names the file."""
    try:
        yield
    except pl.exceptions.DuplicateError as error:
        raise DataError(f"{file}: two columns have the same name ({first_line(error)}); rename one") from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise DataError(f"{file}: cannot be read as Parquet: {first_line(error)}; is it damaged?") from error


class ParquetSource(FileSource):
    """Parquet files with the same columns, read one after the other."""

    def __init__(self, paths: Sequence[LogFile]) -> None:
        super().__init__(paths)
        self._rows: list[int] = []
        self._largest_groups: list[int] = []  # rows of the largest row group of each file
        schemas = []
        for path, file in zip(self.paths, self.files, strict=True):
            with _convert_parquet_errors(file):
                self._largest_groups.append(check_pages(fetch_to_local(path))[1])
                lazy = scan(path)
                schemas.append(lazy.collect_schema())
                self._rows.append(int(lazy.select(pl.len()).collect().item()))
            self._check_schema(schemas[0], schemas[-1], file)
        self.names = tuple(schemas[0])
        if not self.names or not any(self._rows):
            raise DataError(f"{self.files[0]}: the source is empty; it needs at least one row")

    def _check_schema(self, first: pl.Schema, other: pl.Schema, file: str) -> None:
        self.check_names(first, other, file)
        for name in first:
            different = _comparable_type(first[name]) != _comparable_type(other[name])
            if different and pl.Null not in (first[name], other[name]):
                types = f"{other[name]} here and {first[name]} in {self.files[0]}"
                raise DataError(f"{file}: column {name!r} is {types}; store it as one type")

    def rows(self) -> int | None:
        return sum(self._rows)

    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        path, file, rows = self.paths[piece.file], self.files[piece.file], self._rows[piece.file]
        if not rows:
            return
        start = 0
        batches = read_batches(path, columns, rows, self._largest_groups[piece.file])
        while True:
            with _convert_parquet_errors(file):
                frame = next(batches, None)
            if frame is None:
                break
            consumed = self.sizes[piece.file] * frame.height // rows
            yield Chunk(decode_dictionary_columns(frame), piece.file, row_locator(file, start), consumed)
            start += frame.height
        if start != rows:
            raise DataError(f"{file}: {start} rows could be read, its footer says {rows}; is it damaged?")


def read_batches(path: LogFile, columns: Sequence[str], rows: int, largest_group: int) -> Iterator[pl.DataFrame]:
    """Yield ``ROWS`` rows at a time, the last fewer; from slices of the file if it has large row groups.

    The reader decodes a row group as a whole, however large it is; of a slice it decodes the rows of the slice only.
    """
    table = scan(path).select(list(columns))
    size = ROWS * max(1, SLICE_CELLS // (ROWS * max(1, len(columns))))
    for start in range(0, rows, size) if largest_group > size else (0,):
        part = table.slice(start, size) if largest_group > size else table
        yield from part.collect_batches(chunk_size=ROWS)


def _comparable_type(dtype: pl.DataType) -> Any:
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return "text"
    return "number" if dtype.is_numeric() else dtype


def scan(path: LogFile) -> pl.LazyFrame:
    """Open a Parquet file by its exact name, without glob patterns."""
    return pl.scan_parquet(fetch_to_local(path), glob=False, hive_partitioning=False)
