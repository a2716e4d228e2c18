"""What the user gave as a source: a file, a folder or a pattern of them, or a table in memory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpfs.data.remote import LogFile, as_url, list_remote_files
from lpfs.data.sources.base import Source
from lpfs.data.sources.blocks import PARQUET, convert_read_errors, magic
from lpfs.errors import DataError, InputError, MissingPackageError

SUFFIXES = (".csv", ".tsv", ".txt", ".tab", ".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
UNSUPPORTED_MAGIC = {  # how files begin that are often taken for text tables
    b"PK\x03\x04": "a zip archive or an Excel file; save it as CSV",
    b"\xff\xfe": "UTF-16 text; convert it: iconv -f utf-16 -t utf-8",
    b"\xfe\xff": "UTF-16 text; convert it: iconv -f utf-16 -t utf-8",
    b"BZh": "compressed with bzip2; unpack it, or use gzip or zstd",
    b"\xfd7zX": "compressed with xz; unpack it, or use gzip or zstd",
    b"ARRO": "an Arrow or Feather file; write it as Parquet",
    b"ORC": "an ORC file; write it as Parquet",
    b"Obj\x01": "an Avro file; write it as Parquet",
    b"{": "JSON; write it as Parquet or CSV",
    b"[": "JSON; write it as Parquet or CSV",
}


def open_source(source: Any, *, separator: str | None = None, header: bool | Sequence[str] = True) -> Source:
    """Open what the user gave: a path, a folder, a pattern, a list of paths, or a table in memory.

    Args:
        source: see above; tables may be polars, pandas, Arrow, or anything with the Arrow stream protocol.
        separator: of a text table; found from the first line when not given.
        header: whether text tables name their columns in the first line; or the names, where they do not.

    """
    try:
        from lpfs.data.sources.base import TableSource
        from lpfs.data.sources.csv import CsvSource
        from lpfs.data.sources.parquet import ParquetSource
    except ImportError as error:
        raise MissingPackageError(f"prepare needs polars ({error}); install: pip install polars") from None
    if isinstance(source, (str, os.PathLike, list, tuple)):
        paths = find_files(source)
        if not paths:
            raise DataError(f"{source}: no file given; name at least one CSV or Parquet file")
        _check_duplicates(paths)
        starts = {path: magic(path) for path in paths}
        for path, start in starts.items():
            _check_format(path, start)
        kinds = {path: start == PARQUET for path, start in starts.items()}
        if len(set(kinds.values())) > 1:
            odd = next(path for path in paths if kinds[path] != kinds[paths[0]])
            raise DataError(f"{odd}: text and Parquet files are mixed ({paths[0]}); prepare one kind at a time")
        if kinds[paths[0]]:
            return ParquetSource(paths)
        return CsvSource(paths, separator=separator, header=header)
    return TableSource(source)


def find_files(source: Any) -> list[LogFile]:
    """Return the files that a path, a folder, a pattern or a list of those stands for, in natural order."""
    if isinstance(source, (list, tuple)):
        return [path for each in source for path in find_files(each)]
    text = os.fspath(source)
    if not isinstance(text, str) or "\0" in text or not text:
        raise InputError(f"a source is a path as text, found {text!r}")
    url = as_url(text)
    if url is not None:
        remote = list_remote_files(url)
        named = [each for each in remote if is_table(each.name)] if len(remote) > 1 else remote
        return sorted(named or remote, key=natural_sort_key)
    path = Path(text)
    with convert_read_errors(path):
        if path.is_dir():
            found = [each for each in path.iterdir() if each.is_file() and is_table(each.name)]
            if not found:
                raise DataError(f"{path}: no CSV, TSV or Parquet file in this folder ({', '.join(SUFFIXES)})")
            return sorted(found, key=natural_sort_key)
        if path.exists():
            return [path]
    matches = sorted((Path(each) for each in glob.glob(text, recursive=True)), key=natural_sort_key)
    files: list[LogFile] = [each for each in matches if each.is_file()]
    if not files:
        raise DataError(f"{path}: there is no such file or folder, and no file matches it as a pattern")
    return files


def _check_format(path: LogFile, start: bytes) -> None:
    """Refuse a file that begins like one of another format."""
    for mark, what in UNSUPPORTED_MAGIC.items():
        certain = "JSON" not in what or path.suffix.startswith((".json", ".ndjson"))  # a header may begin with [
        if start.startswith(mark) and certain:
            raise DataError(f"{path} is not a text table or Parquet but {what}")


def _check_duplicates(paths: Sequence[LogFile]) -> None:
    """Refuse a file that comes twice, also once packed and once not: its rows would count twice."""
    seen: dict[str, LogFile] = {}
    for path in paths:
        plain = _uncompressed_name(os.path.realpath(path) if isinstance(path, Path) else str(path))
        if plain in seen:
            raise DataError(
                f"{path}: the same log as {seen[plain]}, its rows would count twice; name one of them only"
            )
        seen[plain] = path


def _uncompressed_name(name: str) -> str:
    """Return the name of a file without the ending of its compression."""
    for ending in COMPRESSED_SUFFIXES:
        name = name.removesuffix(ending)
    return name


def is_table(name: str) -> bool:
    """Whether a file in a folder is taken for a part of the log."""
    if name.startswith((".", "_")):
        return False
    stem = _uncompressed_name(name.lower())
    return stem.endswith(SUFFIXES) or re.fullmatch(r"day_\d+", stem) is not None


def natural_sort_key(path: LogFile) -> list[tuple[int, int, str]]:
    """Sort key under which day_2 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]
