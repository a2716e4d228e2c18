"""Where rows come from: files of text or Parquet, a folder or a pattern of them, a table in memory."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpfs.data.reading import PARQUET, magic, telling
from lpfs.errors import DataError, InputError, MissingPackageError

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".csv", ".tsv", ".txt", ".tab", ".parquet", ".pq")
PACKED = (".gz", ".zst", ".zstd")
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


class Source(ABC):
    """Rows that can be read several times, in chunks, always in the same order."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    size: int

    @abstractmethod
    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or those of some files, with these columns only."""

    @abstractmethod
    def fingerprint(self) -> list[list[Any]]:
        """Return name, size and content hash of every part."""

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


def open_source(source: Any, *, separator: str | None = None, header: bool | Sequence[str] = True) -> Source:
    """Open what the user gave: a path, a folder, a pattern, a list of paths, or a table in memory.

    Args:
        source: see above; tables may be polars, pandas, Arrow, or anything with the Arrow stream protocol.
        separator: of a text table; found from the first line when not given.
        header: whether text tables name their columns in the first line; or the names, where they do not.

    """
    try:
        from lpfs.data import csvsource, tablesource
    except ImportError as error:
        raise MissingPackageError(f"prepare needs polars ({error}); install: pip install polars") from None
    if isinstance(source, (str, os.PathLike, list, tuple)):
        paths = find_files(source)
        if not paths:
            raise DataError(f"{source}: no file given; name at least one CSV or Parquet file")
        kinds = {path: magic(path) == PARQUET for path in paths}
        if len(set(kinds.values())) > 1:
            odd = next(path for path in paths if kinds[path] != kinds[paths[0]])
            raise DataError(f"{odd}: text and Parquet files are mixed ({paths[0]}); prepare one kind at a time")
        if kinds[paths[0]]:
            return tablesource.ParquetSource(paths)
        return csvsource.CsvSource(paths, separator=separator, header=header)
    return tablesource.TableSource(source)


def find_files(source: Any) -> list[Path]:
    """Return the files that a path, a folder, a pattern or a list of those stands for, in natural order."""
    if isinstance(source, (list, tuple)):
        return [path for each in source for path in find_files(each)]
    text = os.fspath(source)
    if not isinstance(text, str) or "\0" in text or not text:
        raise InputError(f"a source is a path as text, found {text!r}")
    path = Path(text)
    with telling(path):
        if path.is_dir():
            found = [each for each in path.iterdir() if each.is_file() and is_table(each.name)]
            if not found:
                raise DataError(f"{path}: no CSV, TSV or Parquet file in this folder ({', '.join(SUFFIXES)})")
            return sorted(found, key=natural)
        if path.exists():
            return [path]
    matches = sorted((Path(each) for each in glob.glob(text, recursive=True)), key=natural)
    files = [each for each in matches if each.is_file()]
    if not files:
        raise DataError(f"{path}: there is no such file or folder, and no file matches it as a pattern")
    return files


def is_table(name: str) -> bool:
    """Whether a file in a folder is taken for a part of the log."""
    if name.startswith((".", "_")):
        return False
    stem = name.lower()
    for packed in PACKED:
        stem = stem.removesuffix(packed)
    return stem.endswith(SUFFIXES) or re.fullmatch(r"day_\d+", stem) is not None


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key under which day_2 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with telling(path), path.open("rb") as file:
        while data := file.read(8 << 20):
            digest.update(data)
    return digest.hexdigest()
