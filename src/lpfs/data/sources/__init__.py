"""Sources of raw rows: open_source() opens files, directories, glob patterns, or a table in memory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpfs._fileio import check_regular_file
from lpfs.data.remote import LogFile, as_url, list_remote_files
from lpfs.data.sources.blocks import PARQUET, convert_read_errors, magic
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    from lpfs.data.sources.base import Source

SUFFIXES = (".csv", ".tsv", ".txt", ".tab", ".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
UNSUPPORTED_MAGIC = {  # first bytes of other formats that are often mistaken for text tables
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


def open_source(
    source: Any, *, separator: str | None = None, header: bool | Sequence[str] = True, strip: bool = False
) -> Source:
    """Open a path, a directory, a glob pattern, a list of paths, or a table in memory.

    Args:
        source: see above; tables may be polars, pandas, Arrow, or any object with the Arrow stream protocol.
        separator: separator of a text table; detected from the first line if None.
        header: whether text tables have a header line; or the column names, where they have none.
        strip: remove blanks around the names and values of a text table.
    """
    from lpfs.data.sources.base import TableSource  # these import polars
    from lpfs.data.sources.csv import CsvSource
    from lpfs.data.sources.parquet import ParquetSource

    if not isinstance(source, (str, os.PathLike, list, tuple)):
        return TableSource(source)
    paths = find_files(source)
    if not paths:
        raise DataError(f"{source}: no file given; name at least one CSV or Parquet file")
    _check_duplicates(paths)
    is_parquet = [_is_parquet(path) for path in paths]
    if len(set(is_parquet)) > 1:
        path = paths[is_parquet.index(not is_parquet[0])]
        raise DataError(f"{path}: text and Parquet files are mixed ({paths[0]}); prepare one kind at a time")
    if is_parquet[0]:
        return ParquetSource(paths)
    return CsvSource(paths, separator=separator, header=header, strip=strip)


def find_files(source: Any) -> list[LogFile]:
    """Return the files of a path, a directory, a glob pattern or a list of those, in natural order."""
    if isinstance(source, (list, tuple)):
        return [path for item in source for path in find_files(item)]
    text = os.fspath(source)
    if not isinstance(text, str) or "\0" in text or not text:
        raise InputError(f"a source is a path as text, found {text!r}")
    url = as_url(text)
    if url is not None:
        remote = list_remote_files(url)
        tables = [file for file in remote if is_table(file.name)] if len(remote) > 1 else remote
        return sorted(tables or remote, key=natural_sort_key)
    path = Path(text)
    with convert_read_errors(path):
        if path.is_dir():
            entries = [entry for entry in path.iterdir() if is_table(entry.name)]
            if not entries:
                raise DataError(f"{path}: no CSV, TSV or Parquet file in this directory ({', '.join(SUFFIXES)})")
            return _regular_files(entries)
        if path.exists():
            return _regular_files([path])
    matches = [match for match in map(Path, glob.glob(text, recursive=True)) if not match.is_dir()]
    if not matches:
        raise DataError(f"{path}: no such file or directory, and no file matches it as a pattern")
    return _regular_files(matches)


def _regular_files(paths: Sequence[Path]) -> list[LogFile]:
    """Return the files in natural order; raise DataError if one is missing, or a pipe, a socket or a device."""
    for path in paths:
        with convert_read_errors(path):
            check_regular_file(path)
    return sorted(paths, key=natural_sort_key)


def _is_parquet(path: LogFile) -> bool:
    """Return whether a file is Parquet; raise DataError if it starts like one of an unsupported format."""
    first_bytes = magic(path)
    for prefix, description in UNSUPPORTED_MAGIC.items():
        # a header of a text table may start with [ or {
        certain = "JSON" not in description or path.suffix.startswith((".json", ".ndjson"))
        if first_bytes.startswith(prefix) and certain:
            raise DataError(f"{path} is not a text table or Parquet but {description}")
    return first_bytes == PARQUET


def _check_duplicates(paths: Sequence[LogFile]) -> None:
    """Raise DataError if a file is given twice, or compressed and uncompressed: its rows would count twice."""
    seen: dict[str, LogFile] = {}
    for path in paths:
        name = _uncompressed_name(os.path.realpath(path) if isinstance(path, Path) else str(path))
        if name in seen:
            raise DataError(f"{path}: the same log as {seen[name]}, its rows would count twice; name one of them only")
        seen[name] = path


def _uncompressed_name(name: str) -> str:
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def is_table(name: str) -> bool:
    """Return whether a file in a directory is part of the log, judged by its name."""
    if name.startswith((".", "_")):
        return False
    stem = _uncompressed_name(name.lower())
    return stem.endswith(SUFFIXES) or re.fullmatch(r"day_\d+", stem) is not None


def natural_sort_key(path: LogFile) -> list[tuple[int, int, str]]:
    """Return a sort key under which day_2 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]
