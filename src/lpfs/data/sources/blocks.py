"""Bytes of a file: decompression, and blocks of complete lines."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from lpfs.data.remote import LogFile
from lpfs.errors import DataError

BLOCK = 16 << 20  # bytes read at a time
BUFFER = 1 << 20  # bytes decompressed at a time
LOOKBACK = 1 << 16  # bytes read at a time to find the start of a line
MAX_RECORD = 64 << 20  # maximum bytes of one record, including line breaks inside quotes
GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"  # first bytes of a file
BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8
QUOTE = b'"'


def magic(path: LogFile) -> bytes:
    """Return the first four bytes of a file."""
    with convert_read_errors(path), path.open("rb") as file:
        return file.read(4)


def is_splittable(path: LogFile, quoted: bool) -> bool:
    """Return whether lines can be read from any position: not if compressed, or if line ends may be quoted."""
    if magic(path)[:2] == GZIP or magic(path) == ZSTD:
        return False
    with convert_read_errors(path), path.open("rb") as file:
        return not (quoted and any(QUOTE in data for data in iter(lambda: file.read(BLOCK), b"")))


@contextmanager
def convert_read_errors(path: LogFile) -> Iterator[None]:
    """Convert failures of reading or decompression into a DataError that names the file."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data ({error}); copy or download the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path}: damaged zstd data ({error}); copy or download the file again") from error


@contextmanager
def open_bytes(path: LogFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a plain, gzip or zstd file; yield the stream and a function that returns how many bytes were read."""
    with convert_read_errors(path), path.open("rb") as raw:
        start = raw.read(4)
        raw.seek(0)
        if start[:2] == GZIP:
            with gzip.GzipFile(fileobj=raw) as decompressed:
                yield io.BufferedReader(decompressed, BUFFER), raw.tell
        elif start == ZSTD:
            yield zstd_reader(raw), raw.tell
        else:
            yield raw, raw.tell


def zstd_reader(raw: BinaryIO) -> BinaryIO:
    """Decompress zstd with the standard library (Python 3.14), else with ``zstandard``."""
    stream: Any
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        stream = zstd.ZstdFile(raw)
    except ImportError:
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return io.BufferedReader(stream, BUFFER)


class LineBlocks:
    """Blocks of a file that end with a line, as far as this can be determined by counting quotes.

    Blocks of ``size`` bytes are read from ``first`` to ``stop``; the blocks before ``first`` must not contain quotes.
    If the parser finds that the last record of a block is incomplete, it returns that part with ``put_back``.
    """

    def __init__(
        self, file: BinaryIO, path: LogFile, quoted: bool, size: int, first: int = 0, stop: int | None = None
    ) -> None:
        self.file, self.path, self.quoted, self.size = file, path, quoted, size
        self.ended = False
        self._next, self._stop, self._rest = first, stop, b""
        if first:
            with convert_read_errors(path):
                self._rest = end_of_line(file, first * size)
                file.seek(first * size)

    def put_back(self, data: bytes) -> None:
        """Prepend data to the next block."""
        self._rest = data + self._rest

    def next(self) -> bytes:
        """Return the next block, empty at the end of the file; ``ended`` is true for the last one."""
        while True:
            if self._next == self._stop:
                return b""  # the rest of the last line belongs to the next piece
            with convert_read_errors(self.path):
                data = self.file.read(self.size)
            if not self._next:
                data = data.removeprefix(BOM)
            self._next += 1
            buffer, self._rest = self._rest + data, b""
            if not data:
                self.ended = True
                return buffer
            end = _last_complete_line(buffer, self.quoted)
            if not end and len(buffer) >= MAX_RECORD:
                end = buffer.rfind(b"\n") + 1
                if not end:
                    size = f"{MAX_RECORD >> 20} MB"
                    raise DataError(f"{self.path}: a line is longer than {size}: {buffer[:40]!r}…; is it a text table?")
            self._rest = buffer[end:]
            if end:
                return buffer[:end]


def end_of_line(file: BinaryIO, stop: int) -> bytes:
    """Return the bytes between the last line end before a position and that position."""
    data = b""
    while stop > 0 and b"\n" not in data:
        start = max(0, stop - LOOKBACK)
        file.seek(start)
        data = file.read(stop - start) + data
        stop = start
    return data[data.rfind(b"\n") + 1 :]


def _last_complete_line(buffer: bytes, quoted: bool) -> int:
    """Return the position after the last line end outside quotes; 0 if there is none."""
    if not quoted or QUOTE not in buffer:
        return buffer.rfind(b"\n") + 1
    bytes_ = np.frombuffer(buffer, np.uint8)
    ends = np.flatnonzero((bytes_ == 10) & ~inside_quotes(bytes_))
    return int(ends[-1]) + 1 if len(ends) else 0


def inside_quotes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask of the bytes that follow an odd number of quotes; overflow of the count keeps its parity."""
    return (np.cumsum(values == QUOTE[0], dtype=np.uint8) & 1).view(bool)
