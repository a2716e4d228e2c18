"""Rows of a table in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import polars as pl

from lpfs.data.raw.cast import first_line, plain
from lpfs.data.sources.base import ROWS, Chunk, Source, Told
from lpfs.errors import DataError, InputError


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

    def fingerprint(self, told: Told) -> list[list[Any]]:
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
