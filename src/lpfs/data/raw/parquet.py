"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import polars as pl

from lpfs.data.raw.cast import first_line, plain
from lpfs.data.sources.parquet import check_pages
from lpfs.data.remote import LogFile, local
from lpfs.data.sources.base import ROWS, Chunk, FileSource
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


class ParquetSource(FileSource):
    """Parquet files of one layout, read one after the other."""

    def __init__(self, paths: Sequence[LogFile]) -> None:
        super().__init__(paths)
        self._rows: list[int] = []
        schemas = []
        for path, file in zip(self.paths, self.files, strict=True):
            with reading(file):
                check_pages(local(path))
                lazy = scan(path)
                schemas.append(lazy.collect_schema())
                self._rows.append(int(lazy.select(pl.len()).collect().item()))
            self._check(schemas[0], schemas[-1], file)
        self.names = tuple(schemas[0])
        if not self.names or not any(self._rows):
            raise DataError(f"{self.files[0]}: the source is empty; it needs at least one row")

    def _check(self, first: pl.Schema, other: pl.Schema, file: str) -> None:
        self.check_names(first, other, file)
        for name in first:
            if pl.Null not in (first[name], other[name]) and sort_of(first[name]) != sort_of(other[name]):
                raise DataError(
                    f"{file}: column {name!r} is {other[name]} here and {first[name]} in {self.files[0]}; "
                    "store it as one type"
                )

    def rows(self) -> int | None:
        """Return the number of rows, known from the footers."""
        return sum(self._rows)

    def _file(self, index: int, columns: Sequence[str]) -> Iterator[Chunk]:
        path, file, rows = self.paths[index], self.files[index], self._rows[index]
        if not rows:
            return
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


def sort_of(dtype: pl.DataType) -> Any:
    """Return what two types must have in common for their values to be compared."""
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return "text"
    return "number" if dtype.is_numeric() else dtype


def scan(path: LogFile) -> pl.LazyFrame:
    """Open a Parquet file by its exact name."""
    return pl.scan_parquet(local(path), glob=False, hive_partitioning=False)
