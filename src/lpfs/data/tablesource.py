"""Rows of Parquet files and of tables in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl

from lpfs.data.parquetcheck import check_pages
from lpfs.data.sources import ROWS, Chunk, Source, hash_file
from lpfs.errors import DataError, InputError


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turn failures of the Parquet reader into a DataError that names the file."""
    try:
        yield
    except pl.exceptions.DuplicateError as error:
        raise DataError(f"{file}: two columns have one name ({first_line(error)}); rename one") from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise DataError(f"{file}: cannot be read as Parquet: {first_line(error)}; is it damaged?") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


class ParquetSource(Source):
    """Parquet files of one layout, read one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.files = tuple(map(str, paths))
        self.size = sum(path.stat().st_size for path in paths)
        self._rows: list[int] = []
        schemas = []
        for path, file in zip(self.paths, self.files, strict=True):
            with reading(file):
                check_pages(path)
                lazy = scan(path)
                schemas.append(lazy.collect_schema())
                self._rows.append(int(lazy.select(pl.len()).collect().item()))
            self._check(schemas[0], schemas[-1], file)
        self.names = tuple(schemas[0])
        if not self.names or not any(self._rows):
            raise DataError(f"{self.files[0]}: the source is empty; it needs at least one row")

    def _check(self, first: pl.Schema, other: pl.Schema, file: str) -> None:
        different = sorted(set(first) ^ set(other))
        if different:
            verb = "is missing" if different[0] in first else "is new"
            raise DataError(
                f"{file}: column {different[0]!r} {verb} here, compared with {self.files[0]}; "
                "all files must have the same columns"
            )
        for name in first:
            if pl.Null not in (first[name], other[name]) and sort_of(first[name]) != sort_of(other[name]):
                raise DataError(
                    f"{file}: column {name!r} is {other[name]} here and {first[name]} in {self.files[0]}; "
                    "store it as one type"
                )

    def rows(self) -> int | None:
        """Return the number of rows, known from the footers."""
        return sum(self._rows)

    def chunks(self, columns: Sequence[str], files: Sequence[int] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or those of some files, with these columns only."""
        for index in range(len(self.paths)) if files is None else files:
            path, file, rows = self.paths[index], self.files[index], self._rows[index]
            if not rows:
                continue
            size, start = path.stat().st_size, 0
            with reading(file):
                batches = iter(scan(path).select(list(columns)).collect_batches(chunk_size=ROWS))
            while True:
                with reading(file):
                    frame = next(batches, None)
                if frame is None:
                    break
                yield Chunk(
                    plain(frame),
                    index,
                    lambda row, file=file, start=start: f"{file}, row {start + row + 1}",  # type: ignore[misc]
                    size * frame.height // rows,
                )
                start += frame.height
            if start != rows:
                raise DataError(f"{file}: {start} rows could be read, its footer says {rows}; is it damaged?")

    def fingerprint(self) -> list[list[Any]]:
        """Return name, size and content hash of every file."""
        return [[path.name, path.stat().st_size, hash_file(path)] for path in self.paths]


def sort_of(dtype: pl.DataType) -> Any:
    """Return what two types must have in common for their values to be compared."""
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return "text"
    return "number" if dtype.is_numeric() else dtype


def plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Return dictionary-encoded columns as the text they stand for."""
    coded = [name for name, dtype in frame.schema.items() if dtype in (pl.Categorical, pl.Enum)]
    return frame.with_columns(pl.col(coded).cast(pl.String)) if coded else frame


def scan(path: Path) -> pl.LazyFrame:
    """Open a Parquet file by its exact name."""
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


class TableSource(Source):
    """A table in memory: polars, pandas, Arrow, or anything with the Arrow stream protocol."""

    def __init__(self, table: Any) -> None:
        self.frame = as_frame(table)
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
                plain(frame),
                0,
                lambda row, start=start: f"the table, row {start + row + 1}",  # type: ignore[misc]
                self.size * frame.height // self.frame.height,
            )

    def fingerprint(self) -> list[list[Any]]:
        """Return the names, types and a hash of the content."""
        digest = hashlib.sha256(repr(self.frame.schema).encode())
        for start in range(0, self.frame.height, ROWS):
            for column in self.frame.slice(start, ROWS):
                digest.update(content(column))
        return [["table", self.frame.height, digest.hexdigest()]]


def content(column: pl.Series) -> bytes:
    """Return bytes that change with the content of a column."""
    try:
        return column.hash().to_numpy().tobytes()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return repr(column.to_list()).encode()


def as_frame(table: Any) -> pl.DataFrame:
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
