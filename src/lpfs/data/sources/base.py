"""The contract of sources: rows that can be read several times over, in chunks, always in the same order.

Rows of a table in memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from lpfs.data.parsing import decode_dictionary_columns, first_line
from lpfs.data.remote import LogFile
from lpfs.data.sources.blocks import convert_read_errors
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    import polars as pl


ByteCounter = Callable[[int], None]
ROWS = 1 << 16  # rows of a chunk, where the source lets one choose


@dataclass(frozen=True)
class Chunk:
    """Some rows of a source, in order.

    Args:
        frame: the wanted columns; text columns from a text file, typed ones otherwise.
        file: index of the file the rows come from.
        place: says where a row is, for messages.
        consumed: bytes of the source that this chunk took.

    """

    frame: pl.DataFrame
    file: int
    locate: Callable[[int], str]
    consumed: int


@dataclass(frozen=True)
class Piece:
    """Chunks of one file that can be read without those before them; to its end when ``stop`` is None."""

    file: int
    first: int = 0
    stop: int | None = None


class Source(ABC):
    """Rows that can be read several times, in chunks, always in the same order."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    size: int

    @abstractmethod
    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or those of some files, with these columns only."""

    @abstractmethod
    def fingerprint(self, told: ByteCounter) -> list[list[Any]]:
        """Return name, size and content hash of every part; ``told`` hears how many bytes were read."""

    def rows(self) -> int | None:
        """Return the number of rows where it is known without reading them."""
        return None

    def sample(self, rows: int) -> pl.DataFrame:
        """Return the first rows."""
        import polars as pl

        frames: list[pl.DataFrame] = []
        for chunk in self.chunks(self.names):
            frames.append(chunk.frame)
            if sum(frame.height for frame in frames) >= rows:
                break
        if not sum(frame.height for frame in frames):
            raise DataError(f"{self.files[0]}: the source is empty; it needs at least one row")
        return pl.concat(frames, how="vertical_relaxed").head(rows)


class FileSource(Source):
    """Files of one layout, read one after the other."""

    def __init__(self, paths: Sequence[LogFile]) -> None:
        self.paths = tuple(paths)
        self.files = tuple(map(str, paths))
        self.size = sum(path.stat().st_size for path in paths)

    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or those of some files, with these columns only."""
        for index in range(len(self.paths)) if files is None else files:
            yield from self._file(index, columns)

    @abstractmethod
    def _file(self, index: int, columns: Sequence[str]) -> Iterator[Chunk]:
        """Yield the rows of one file."""

    def pieces(self, index: int) -> list[Piece]:
        """Cut a file into pieces that can be read apart; one where it cannot be cut."""
        return [Piece(index)]

    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece: the very chunks that ``chunks`` has there."""
        return self._file(piece.file, columns)

    def identity(self, index: int, told: ByteCounter = lambda done: None) -> list[Any]:
        """Return name, size and content hash of a file."""
        path = self.paths[index]
        return [path.name, path.stat().st_size, hash_file(path, told)]

    def fingerprint(self, told: ByteCounter) -> list[list[Any]]:
        """Return name, size and content hash of every file."""
        result: list[list[Any]] = []
        for index in range(len(self.paths)):
            before = sum(size for _, size, _ in result)
            result.append(self.identity(index, lambda done, before=before: told(before + done)))  # type: ignore[misc]
        return result

    def check_names(self, first: Iterable[str], names: Iterable[str], where: str) -> None:
        """Refuse a file that has other columns than the first one; their order may differ."""
        known = set(first)
        different = sorted(known ^ set(names))
        if different:
            verb = "is missing" if different[0] in known else "is new"
            raise DataError(
                f"{where}: column {different[0]!r} {verb} here, compared with {self.files[0]}; "
                "all files must have the same columns"
            )


def hash_file(path: LogFile, told: ByteCounter) -> str:
    """Return the SHA-256 of a file."""
    digest, done = hashlib.sha256(), 0
    with convert_read_errors(path), path.open("rb") as file:
        while data := file.read(8 << 20):
            digest.update(data)
            done += len(data)
            told(done)
    return digest.hexdigest()


class TableSource(Source):
    """A table in memory: polars, pandas, Arrow, or anything with the Arrow stream protocol."""

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
        """Return the number of rows."""
        return self.frame.height

    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, with these columns only."""
        for start in range(0, self.frame.height, ROWS):
            frame = self.frame.select(list(columns)).slice(start, ROWS)
            yield Chunk(
                decode_dictionary_columns(frame),
                0,
                lambda row, start=start: f"the table, row {start + row + 1}",  # type: ignore[misc]
                self.size * frame.height // self.frame.height,
            )

    def fingerprint(self, told: ByteCounter) -> list[list[Any]]:
        """Return the names, types and a hash of the content."""
        digest = hashlib.sha256(repr(self.frame.schema).encode())
        for start in range(0, self.frame.height, ROWS):
            for column in self.frame.slice(start, ROWS):
                digest.update(_column_digest(column))
        return [["table", self.frame.height, digest.hexdigest()]]


def _column_digest(column: pl.Series) -> bytes:
    """Return bytes that change with the content of a column."""
    try:
        return column.hash().to_numpy().tobytes()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return repr(column.to_list()).encode()


def to_polars(table: Any) -> pl.DataFrame:
    """Return a polars frame of a table in memory."""
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if isinstance(table, pl.DataFrame):
        return table
    columns = getattr(table, "columns", None)
    if columns is not None and hasattr(table, "to_numpy"):  # pandas
        names = [str(name) for name in columns]
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise DataError(f"two columns of the table are named {twice[0]!r}; rename one")
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
    raise InputError(
        "a source is a path, a folder, a pattern, or a polars, pandas or Arrow table, "
        f"found {type(table).__name__}"
    )
