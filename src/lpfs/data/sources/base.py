"""The contract of sources: rows that can be read several times over, in chunks, always in the same order."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpfs.data.sources.blocks import telling
from lpfs.data.remote import LogFile
from lpfs.errors import DataError

if TYPE_CHECKING:
    import polars as pl

Told = Callable[[int], None]
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
    place: Callable[[int], str]
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
    def fingerprint(self, told: Told) -> list[list[Any]]:
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

    def identity(self, index: int, told: Told = lambda done: None) -> list[Any]:
        """Return name, size and content hash of a file."""
        path = self.paths[index]
        return [path.name, path.stat().st_size, hash_file(path, told)]

    def fingerprint(self, told: Told) -> list[list[Any]]:
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


def hash_file(path: LogFile, told: Told) -> str:
    """Return the SHA-256 of a file."""
    digest, done = hashlib.sha256(), 0
    with telling(path), path.open("rb") as file:
        while data := file.read(8 << 20):
            digest.update(data)
            done += len(data)
            told(done)
    return digest.hexdigest()
