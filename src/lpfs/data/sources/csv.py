"""Rows of CSV and TSV files, plain, gzip or zstd.

One block of CSV text -> a frame of text columns, with the line of every row.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lpfs.data.remote import LogFile
from lpfs.data.sources.base import Chunk, FileSource, Piece
from lpfs.data.sources.blocks import (
    BLOCK,
    LineBlocks,
    convert_read_errors,
    inside_quotes,
    is_compressed,
    open_bytes,
)
from lpfs.errors import DataError

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Dialect:
    """How a text table is written."""

    separator: str = ","
    quote: str | None = '"'

    @property
    def quote_byte(self) -> bytes | None:
        """The quote as a byte."""
        return self.quote.encode() if self.quote else None


@dataclass(frozen=True)
class Parsed:
    """Rows of a block: text columns, the line of a row, bytes used, and lines in those bytes."""

    frame: pl.DataFrame
    line: Callable[[int], int]
    bytes_used: int


def parse(
    block: bytes,
    names: Sequence[str],
    wanted: Sequence[str],
    dialect: Dialect,
    *,
    file: str,
    first: int,
    last: bool,
) -> Parsed:
    """Parse a block that begins at line ``first``; every row must have as many columns as ``names``.

    polars does the work. It lets short rows pass and cannot say where it failed, so the separators are
    counted first, and whatever looks odd is read again, slowly, by the csv module.
    """
    import polars as pl

    rows = regular_rows(block, len(names), dialect)
    if rows is not None:
        columns = [f"column_{index + 1}" for index in range(len(names))]
        chosen = [columns[names.index(name)] for name in wanted]
        try:
            frame = pl.read_csv(
                block,
                has_header=False,
                schema=dict.fromkeys(columns, pl.String),
                columns=chosen,
                separator=dialect.separator,
                quote_char=dialect.quote,
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            frame = None
        if frame is not None and frame.height == rows:
            frame = frame.select(chosen)
            frame.columns = list(wanted)
            if dialect.quote and dialect.quote_byte in block:  # type: ignore[operator]
                frame = frame.with_columns(
                    pl.when(pl.col(pl.String) == "").then(None).otherwise(pl.col(pl.String)).name.keep()
                )
                return Parsed(frame, lambda row: first + quoted_line(block, row, dialect), len(block))
            return Parsed(frame, lambda row: first + row, len(block))
    return parse_with_csv_module(block, names, wanted, dialect, file=file, first=first, last=last)


def regular_rows(block: bytes, columns: int, dialect: Dialect) -> int | None:
    """Return how many rows the block has if its separators and line ends add up, else None."""
    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return None
    separator, quote = dialect.separator.encode(), dialect.quote_byte
    values = np.frombuffer(block, np.uint8)
    if quote is None or quote not in block:
        rows = block.count(b"\n") + (not block.endswith(b"\n"))
        return rows if int(np.count_nonzero(values == separator[0])) == rows * (columns - 1) else None
    outside = ~inside_quotes(values, quote)
    if not outside[-1] or not _quotes_are_regular(values, separator[0], quote[0]):
        return None
    rows = int(np.count_nonzero((values == 10) & outside)) + (not block.endswith(b"\n"))
    found = int(np.count_nonzero((values == separator[0]) & outside))
    return rows if found == rows * (columns - 1) else None


def _quotes_are_regular(values: npt.NDArray[np.uint8], separator: int, quote: int) -> bool:
    """Whether every quote opens or closes a value, or is one of two that stand for a quote inside one.

    In 5" pipe it does not. polars then finds other rows when it reads other columns.
    """
    at = np.flatnonzero(values == quote)
    before = values[at[::2][at[::2] > 0] - 1]
    after = values[at[1::2][at[1::2] < len(values) - 1] + 1]
    opened = (before == separator) | (before == 10) | (before == quote)
    closed = (after == separator) | (after == 10) | (after == 13) | (after == quote)
    return bool(opened.all() and closed.all())


def quoted_line(block: bytes, row: int, dialect: Dialect) -> int:
    """Return how many lines of the block lie before a row, where quotes may hold line ends."""
    values = np.frombuffer(block, np.uint8)
    ends = values == 10
    quote = dialect.quote_byte
    rows = np.flatnonzero(ends & ~inside_quotes(values, quote)) if quote else np.flatnonzero(ends)
    return int(np.count_nonzero(ends[: rows[row - 1] + 1])) if row else 0


def decode(block: bytes, *, file: str, first: int) -> str:
    """Decode UTF-8 or say on which line it is not."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first + block.count(b"\n", 0, error.start)
        found = block[error.start : error.start + 4]
        raise DataError(
            f"{file}, line {line}: {found!r} is not UTF-8 text; "
            "convert the file first, for example: iconv -f latin1 -t utf-8"
        ) from None


def records(
    text: str, dialect: Dialect, *, file: str, first: int, last: bool
) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (line, lines used so far, values) of each record; stop before one that is not complete."""
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    reader = csv.reader(
        lines,
        delimiter=dialect.separator,
        quotechar=dialect.quote,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        strict=True,
    )
    used = 0
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                if not last and used:
                    return
                raise DataError(
                    f"{file}, line {first + used}: a quote is opened and never closed: "
                    f"{lines[used].strip()[:60]!r}; close it, or switch quotes off"
                ) from None
            raise DataError(
                f"{file}, line {first + reader.line_num - 1}: {error}: {lines[reader.line_num - 1].strip()[:60]!r}"
            ) from None
        yield first + used, reader.line_num, record
        used = reader.line_num


def parse_with_csv_module(
    block: bytes,
    names: Sequence[str],
    wanted: Sequence[str],
    dialect: Dialect,
    *,
    file: str,
    first: int,
    last: bool,
) -> Parsed:
    """Parse with the csv module: blank lines are skipped, other irregular rows are errors with their line."""
    import polars as pl

    text = decode(block, file=file, first=first)
    rows: list[list[str]] = []
    at: list[int] = []
    used = 0
    for line, used, record in records(text, dialect, file=file, first=first, last=last):  # noqa: B007
        if not record:
            continue
        if len(record) != len(names):
            raise DataError(
                f"{file}, line {line}: {len(record)} columns, expected {len(names)}: "
                f"{dialect.separator.join(record)[:60]!r}; repair the line, or give the right separator"
            )
        rows.append(record)
        at.append(line)
    places = [names.index(name) for name in wanted]
    columns = {
        name: pl.Series(name, [row[place] or None for row in rows], pl.String)
        for name, place in zip(wanted, places, strict=True)
    }
    size = len(block) if block.count(b"\n") <= used else _offset_of_line(block, used)
    return Parsed(pl.DataFrame(columns), at.__getitem__, size)


def _offset_of_line(block: bytes, lines: int) -> int:
    """Return where the given number of lines ends."""
    return int(np.flatnonzero(np.frombuffer(block, np.uint8) == 10)[lines - 1]) + 1


SEPARATORS = (",", "\t", ";", "|", "\x01")
BLOCKS = 8  # blocks of a piece
HEAD = 1 << 20  # bytes in which the first record must end


class CsvSource(FileSource):
    """Text tables of one layout, read one after the other.

    Args:
        paths: the files, in order.
        separator: one character; found from the first line when None.
        header: True (the first line names the columns), False (column_1 …), or the names.

    """

    block = BLOCK  # bytes read at a time; where chunks end shows in the last digits of means

    def __init__(
        self, paths: Sequence[LogFile], *, separator: str | None = None, header: bool | Sequence[str] = True
    ) -> None:
        super().__init__(paths)
        self.header = header is True
        first, dialect = first_record(self.paths[0], separator)
        self.dialect = dialect
        if header is True:
            self.names = column_names(first, self.files[0])
        elif header is False:
            self.names = tuple(f"column_{index + 1}" for index in range(len(first)))
        else:
            self.names = tuple(header)
            if len(first) != len(self.names):
                raise DataError(
                    f"{self.files[0]}, line 1: {len(first)} columns, expected {len(self.names)} "
                    f"({', '.join(self.names[:3])} …): {dialect.separator.join(first)[:60]!r}"
                )

    def pieces(self, index: int) -> list[Piece]:
        """Cut a file after every so many blocks, unless it is packed or has quotes, in which lines may end."""
        path, quote = self.paths[index], self.dialect.quote_byte
        count = -(-path.stat().st_size // self.block)
        if count <= BLOCKS or is_compressed(path) or (quote is not None and _contains_byte(path, quote)):
            return [Piece(index)]
        starts = range(0, count, BLOCKS)
        return [Piece(index, first, None if first == starts[-1] else first + BLOCKS) for first in starts]

    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece; where it is not the first of its file, lines are counted from its start."""
        return self._blocks(piece, columns)

    def _file(self, index: int, columns: Sequence[str]) -> Iterator[Chunk]:
        return self._blocks(Piece(index), columns)

    def _blocks(self, piece: Piece, columns: Sequence[str]) -> Iterator[Chunk]:
        index, path, file = piece.file, self.paths[piece.file], self.files[piece.file]
        names, line, rows, before = self.names, 1, 0, piece.first * self.block
        if piece.first:
            file += f", from the line of byte {before:,} on"
        with open_bytes(path) as (stream, tell):
            begun = not self.header
            if piece.first and self.header:
                begun, names = True, self._names(path)
            blocks = LineBlocks(
                stream, path, quote=self.dialect.quote_byte, size=self.block, first=piece.first, stop=piece.stop
            )
            while block := blocks.next():
                if not begun:
                    begun = True
                    names, used, lines = self._header(block, path, last=blocks.ended)
                    line += lines
                    block = block[used:]
                    if not block:
                        continue
                parsed = parse(block, names, columns, self.dialect, file=file, first=line, last=blocks.ended)
                if parsed.bytes_used < len(block):
                    blocks.put_back(block[parsed.bytes_used :])
                line += block.count(b"\n", 0, parsed.bytes_used)
                position = tell()
                rows += parsed.frame.height
                of_row = parsed.line
                yield Chunk(
                    parsed.frame,
                    index,
                    lambda row, of_row=of_row: f"{file}, line {of_row(row)}",  # type: ignore[misc]
                    position - before,
                )
                before = position
        if not rows and piece == Piece(index):
            what = "has a header and no rows" if begun and self.header else "is empty"
            raise DataError(f"{file}: the file {what}; remove it or put rows in it")

    def _names(self, path: LogFile) -> tuple[str, ...]:
        """Return the names of one file, to read it from the middle."""
        with open_bytes(path) as (stream, _):
            blocks = LineBlocks(stream, path, quote=self.dialect.quote_byte, size=self.block)
            return self._header(blocks.next(), path, last=blocks.ended)[0]

    def _header(self, block: bytes, path: LogFile, *, last: bool) -> tuple[tuple[str, ...], int, int]:
        """Read the names of one file, which must be those of the first file in any order."""
        text = decode(block[:HEAD], file=str(path), first=1) if len(block) <= HEAD else _decode_head(block, path)
        _, lines, values = next(records(text, self.dialect, file=str(path), first=1, last=last))
        names = column_names(values, str(path))
        self.check_names(self.names, names, f"{path}, line 1")
        used = len(block) if block.count(b"\n") < lines else _offset_of_line(block, lines)
        return names, used, lines


def _contains_byte(path: LogFile, mark: bytes) -> bool:
    """Whether a file holds a byte."""
    with convert_read_errors(path), path.open("rb") as file:
        return any(mark in data for data in iter(lambda: file.read(BLOCK), b""))


def _decode_head(block: bytes, path: LogFile) -> str:
    """Decode the beginning of a block, up to a line end."""
    end = block.rfind(b"\n", 0, HEAD) + 1
    if not end:
        raise DataError(f"{path}, line 1: longer than {HEAD >> 20} MB; is it a text table?")
    return decode(block[:end], file=str(path), first=1)


def first_record(path: LogFile, separator: str | None) -> tuple[list[str], Dialect]:
    """Return the first record of a file and how it is written."""
    if separator is not None and (len(separator.encode()) != 1 or separator in '"\n\r'):
        raise DataError(f"the separator must be one ASCII character, found {separator!r}")
    with open_bytes(path) as (stream, _):
        block = LineBlocks(stream, path, quote=b'"', size=HEAD).next()
    if not block.strip():
        raise DataError(f"{path}: the file is empty; it needs at least one row")
    text = _decode_head(block, path) if len(block) > HEAD else decode(block, file=str(path), first=1)
    if separator is None:
        line = text.split("\n", 1)[0]
        separator = max(SEPARATORS, key=lambda each: (line.count(each), -SEPARATORS.index(each)))
    # A tab-separated file hardly ever quotes, but may well hold a quote as text.
    quote = None if separator in "\t\x01" and '\t"' not in text and not text.startswith('"') else '"'
    dialect = Dialect(separator, quote)
    for _, _, record in records(text, dialect, file=str(path), first=1, last=True):
        if record:
            return record, dialect
        raise DataError(f"{path}, line 1: the first line is blank; it should hold the header or the first row")
    raise DataError(f"{path}: the file is empty; it needs at least one row")


def column_names(values: Sequence[str], file: str) -> tuple[str, ...]:
    """Check the names of a header; an empty one becomes ``column_N``."""
    names: list[str] = []
    for index, value in enumerate(values):
        name = value or f"column_{index + 1}"
        if name in names:
            raise DataError(
                f"{file}, line 1: two columns are named {name!r} "
                f"(numbers {names.index(name) + 1} and {index + 1}); rename one"
            )
        names.append(name)
    return tuple(names)
