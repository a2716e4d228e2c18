"""Source: rows that can be read several times in chunks, always in the same order; files and tables in memory."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.parsing import decode_dictionary_columns, first_line
from lpfs.data.remote import LogFile, RemoteFile
from lpfs.data.sources.blocks import convert_read_errors
from lpfs.errors import DataError, InputError

ROWS = 1 << 16  # rows of a chunk, where the source does not determine them
HASH_BYTES = 8 << 20  # bytes read at a time to hash a file
ByteCounter = Callable[[int], None]  # called with the number of bytes read so far


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a source."""

    frame: pl.DataFrame  # the requested columns; text columns from a text file, typed ones otherwise
    file: int  # index of the file
    locate: Callable[[int], str]  # describes the location of a row, for messages
    consumed: int  # bytes of the source that were read for this chunk

    def take(self, rows: npt.NDArray[np.int64]) -> Chunk:
        """Return some of the rows."""
        return replace(self, frame=self.frame[rows], locate=lambda row: self.locate(int(rows[row])))


@dataclass(frozen=True)
class Piece:
    """Range of blocks of a file that can be read independently; up to its end if ``stop`` is None."""

    file: int
    first: int = 0
    stop: int | None = None


def row_locator(name: str, start: int = 0) -> Callable[[int], str]:
    """Return a function that describes the location of a row, from row ``start`` on, for messages."""
    return lambda row: f"{name}, row {start + row + 1}"


def file_state(path: LogFile) -> tuple[int | str, ...]:
    """Return the size of a file, and values of which one changes when the file is written or replaced."""
    if isinstance(path, RemoteFile):
        return path.stat().st_size, path.read_version()
    with convert_read_errors(path):
        status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class Source(ABC):
    """Rows that can be read several times, in chunks, always in the same order."""

    names: tuple[str, ...]  # the columns
    files: tuple[str, ...]  # names of the files, for messages
    size: int  # in bytes
    typed = True  # whether columns have types; without them numbers are text

    @abstractmethod
    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or those of some files, with these columns only."""

    @abstractmethod
    def fingerprint(self, progress: ByteCounter) -> list[list[Any]]:
        """Return name, size and content hash of every file; ``progress`` gets the number of bytes read so far."""

    def check_unchanged(self) -> None:  # noqa: B027
        """Raise DataError if a file is not the one that was opened, or changed since then."""

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Replace an error of the block by that of ``check_unchanged``, if the source changed."""
        try:
            yield
        except DataError:
            self.check_unchanged()
            raise

    def rows(self) -> int | None:
        """Return the number of rows; None if they would have to be read."""
        return None

    def sample(self, rows: int) -> pl.DataFrame:
        """Return the first rows."""
        frames: list[pl.DataFrame] = []
        height = 0
        for chunk in self.chunks(self.names):
            frames.append(chunk.frame)
            height += chunk.frame.height
            if height >= rows:
                break
        if not height:
            raise DataError(f"{self.files[0]}: the source is empty; it needs at least one row")
        return pl.concat(frames, how="vertical_relaxed").head(rows)


class FileSource(Source):
    """Files with the same columns, read one after the other."""

    def __init__(self, paths: Sequence[LogFile]) -> None:
        self.paths = tuple(paths)
        self.files = tuple(map(str, paths))
        self._states = [file_state(path) for path in paths]
        self.sizes = tuple(int(size) for size, *_ in self._states)
        self.size = sum(self.sizes)

    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        for index in range(len(self.paths)) if files is None else files:
            yield from self.piece(columns, Piece(index))

    def pieces(self, index: int) -> list[Piece]:
        """Split a file into pieces that can be read independently; one piece if that is not possible."""
        return [Piece(index)]

    @abstractmethod
    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece, in the same chunks as ``chunks``."""

    def identity(self, index: int, progress: ByteCounter = lambda done: None) -> list[Any]:
        """Return name, size and content hash of a file."""
        path, digest, done = self.paths[index], hashlib.sha256(), 0
        with convert_read_errors(path), path.open("rb") as file:
            while data := file.read(HASH_BYTES):
                digest.update(data)
                done += len(data)
                progress(done)
        return [path.name, done, digest.hexdigest()]

    def check_unchanged(self) -> None:
        for path, state in zip(self.paths, self._states, strict=True):
            if file_state(path) != state:
                raise DataError(f"{path}: changed while it was read; try again when it is complete")

    def fingerprint(self, progress: ByteCounter) -> list[list[Any]]:
        result: list[list[Any]] = []
        for index in range(len(self.paths)):
            before = sum(size for _, size, _ in result)
            result.append(self.identity(index, lambda done, before=before: progress(before + done)))  # type: ignore[misc]
        return result

    def check_names(self, first: Iterable[str], names: Iterable[str], location: str) -> None:
        """Raise DataError if a file has other columns than the first one; their order may differ."""
        known = set(first)
        different = sorted(known ^ set(names))
        if different:
            problem = f"column {different[0]!r} {'is missing' if different[0] in known else 'is new'} here"
            raise DataError(
                f"{location}: {problem}, compared with {self.files[0]}; all files must have the same columns"
            )


class TableSource(Source):
    """A table in memory: polars, pandas, Arrow, or any object with the Arrow stream protocol."""

    def __init__(self, table: Any) -> None:
        self.frame = to_polars(table)
        self.names = tuple(self.frame.columns)
        self.files = ("the table",)
        self.size = max(1, int(self.frame.estimated_size()))
        if not self.names or not self.frame.height:
            raise DataError("the table is empty; it needs at least one row")
        if "" in self.names:
            raise DataError(f"column {self.names.index('') + 1} of the table has no name; give it one")

    def rows(self) -> int | None:
        return self.frame.height

    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        for start in range(0, self.frame.height, ROWS):
            frame = self.frame.select(list(columns)).slice(start, ROWS)
            consumed = self.size * frame.height // self.frame.height
            yield Chunk(decode_dictionary_columns(frame), 0, row_locator("the table", start), consumed)

    def fingerprint(self, progress: ByteCounter) -> list[list[Any]]:
        digest = hashlib.sha256(repr(self.frame.schema).encode())
        for start in range(0, self.frame.height, ROWS):
            for column in self.frame.slice(start, ROWS):
                digest.update(_column_digest(column))
        return [["table", self.frame.height, digest.hexdigest()]]


def _column_digest(column: pl.Series) -> bytes:
    try:
        return column.hash().to_numpy().tobytes()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return repr(column.to_list()).encode()


def to_polars(table: Any) -> pl.DataFrame:
    """Return a table in memory as a polars frame."""
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if isinstance(table, pl.DataFrame):
        return table
    columns = getattr(table, "columns", None)
    if columns is not None and hasattr(table, "to_numpy"):  # pandas
        names = [str(name) for name in columns]
        duplicates = [name for index, name in enumerate(names) if name in names[:index]]
        if duplicates:
            raise DataError(f"two columns of the table are named {duplicates[0]!r}; rename one")
    try:
        if hasattr(table, "__arrow_c_stream__"):
            with suppress(ImportError):  # pandas without pyarrow
                return pl.DataFrame(table)
        if columns is not None and hasattr(table, "to_numpy"):
            return pl.DataFrame({str(name): table[name].to_numpy() for name in columns})
        if isinstance(table, dict):
            return pl.DataFrame(table)
    except (pl.exceptions.PolarsError, TypeError, ValueError, ImportError, OverflowError) as error:
        raise DataError(f"the table cannot be read: {first_line(error)}") from error
    kinds = "a path, a directory, a glob pattern, or a polars, pandas or Arrow table"
    raise InputError(f"a source is {kinds}, found {type(table).__name__}")
