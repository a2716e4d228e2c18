"""Rows of CSV and TSV files, plain, gzip or zstd: parsing of blocks, detection of separator and header."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.remote import LogFile
from lpfs.data.sources.base import Chunk, FileSource, Piece
from lpfs.data.sources.blocks import BLOCK, LineBlocks, convert_read_errors, inside_quotes, is_compressed, open_bytes
from lpfs.errors import DataError

SEPARATORS = (",", "\t", ";", "|", "\x01")
PIECE_BLOCKS = 8  # blocks of a piece
HEAD = 1 << 20  # bytes in which the first record must end


@dataclass(frozen=True)
class Dialect:
    """Separator and quote of a text table; no quote: quotes are plain text."""

    separator: str = ","
    quote: str | None = '"'

    @property
    def quote_byte(self) -> bytes | None:
        """The quote as a byte."""
        return self.quote.encode() if self.quote else None


@dataclass(frozen=True)
class ParsedBlock:
    """Rows of a block: text columns, the line number of a row, and the number of bytes parsed."""

    frame: pl.DataFrame
    line: Callable[[int], int]
    bytes_used: int


def parse(
    block: bytes, names: Sequence[str], selected: Sequence[str], dialect: Dialect, *, file: str, first: int, last: bool
) -> ParsedBlock:
    """Parse a block that starts at line ``first``; every row must have as many columns as ``names``.

    polars parses the block. It accepts short rows and does not report where it failed, so the separators are
    counted first, and an irregular block is parsed again by the csv module, which is slow.
    """
    rows = regular_rows(block, len(names), dialect)
    if rows is not None:
        columns = [f"column_{index + 1}" for index in range(len(names))]
        positions = [columns[names.index(name)] for name in selected]
        try:
            frame = pl.read_csv(
                block,
                has_header=False,
                schema=dict.fromkeys(columns, pl.String),
                columns=positions,
                separator=dialect.separator,
                quote_char=dialect.quote,
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            frame = None
        if frame is not None and frame.height == rows:
            frame = frame.select(positions)
            frame.columns = list(selected)
            if dialect.quote and dialect.quote_byte in block:  # type: ignore[operator]
                frame = frame.with_columns(
                    pl.when(pl.col(pl.String) == "").then(None).otherwise(pl.col(pl.String)).name.keep()
                )
                return ParsedBlock(frame, lambda row: first + quoted_line(block, row, dialect), len(block))
            return ParsedBlock(frame, lambda row: first + row, len(block))
    return parse_with_csv_module(block, names, selected, dialect, file=file, first=first, last=last)


def regular_rows(block: bytes, columns: int, dialect: Dialect) -> int | None:
    """Return the number of rows of a block if its separators and line ends are consistent, else None."""
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
    separators = int(np.count_nonzero((values == separator[0]) & outside))
    return rows if separators == rows * (columns - 1) else None


def _quotes_are_regular(values: npt.NDArray[np.uint8], separator: int, quote: int) -> bool:
    """Return whether every quote opens or closes a value, or is part of a doubled quote inside one.

    In 5" pipe it does not: polars would then return different rows for different columns.
    """
    positions = np.flatnonzero(values == quote)
    opening, closing = positions[::2], positions[1::2]
    before = values[opening[opening > 0] - 1]
    after = values[closing[closing < len(values) - 1] + 1]
    valid_before = (before == separator) | (before == 10) | (before == quote)
    valid_after = (after == separator) | (after == 10) | (after == 13) | (after == quote)
    return bool(valid_before.all() and valid_after.all())


def quoted_line(block: bytes, row: int, dialect: Dialect) -> int:
    """Return the number of lines of a block before a row, where quotes may contain line ends."""
    values = np.frombuffer(block, np.uint8)
    ends = values == 10
    quote = dialect.quote_byte
    rows = np.flatnonzero(ends & ~inside_quotes(values, quote)) if quote else np.flatnonzero(ends)
    return int(np.count_nonzero(ends[: rows[row - 1] + 1])) if row else 0


def decode(block: bytes, *, file: str, first: int) -> str:
    """Decode UTF-8; raise DataError with the line if it is not valid."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first + block.count(b"\n", 0, error.start)
        invalid = block[error.start : error.start + 4]
        raise DataError(
            f"{file}, line {line}: {invalid!r} is not UTF-8 text; "
            "convert the file first, for example: iconv -f latin1 -t utf-8"
        ) from None


def records(text: str, dialect: Dialect, *, file: str, first: int, last: bool) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (line, lines parsed so far, values) of each record; stop before an incomplete one."""
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    reader = csv.reader(
        lines,
        delimiter=dialect.separator,
        quotechar=dialect.quote,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        strict=True,
    )
    parsed = 0
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                if not last and parsed:
                    return
                raise DataError(
                    f"{file}, line {first + parsed}: a quote is opened and never closed: "
                    f"{lines[parsed].strip()[:60]!r}; close it, or switch quotes off"
                ) from None
            raise DataError(
                f"{file}, line {first + reader.line_num - 1}: {error}: {lines[reader.line_num - 1].strip()[:60]!r}"
            ) from None
        yield first + parsed, reader.line_num, record
        parsed = reader.line_num


def parse_with_csv_module(
    block: bytes, names: Sequence[str], selected: Sequence[str], dialect: Dialect, *, file: str, first: int, last: bool
) -> ParsedBlock:
    """Parse with the csv module: skip blank lines; raise DataError with the line for other irregular rows."""
    text = decode(block, file=file, first=first)
    rows: list[list[str]] = []
    line_numbers: list[int] = []
    lines = 0
    for line, lines, record in records(text, dialect, file=file, first=first, last=last):  # noqa: B007
        if not record:
            continue
        if len(record) != len(names):
            raise DataError(
                f"{file}, line {line}: {len(record)} columns, expected {len(names)}: "
                f"{dialect.separator.join(record)[:60]!r}; repair the line, or give the right separator"
            )
        rows.append(record)
        line_numbers.append(line)
    columns = {}
    for name in selected:
        position = names.index(name)
        columns[name] = pl.Series(name, [row[position] or None for row in rows], pl.String)
    size = len(block) if block.count(b"\n") <= lines else _offset_of_line(block, lines)
    return ParsedBlock(pl.DataFrame(columns), line_numbers.__getitem__, size)


def _offset_of_line(block: bytes, lines: int) -> int:
    """Return the position after the given number of lines."""
    return int(np.flatnonzero(np.frombuffer(block, np.uint8) == 10)[lines - 1]) + 1


class CsvSource(FileSource):
    """Text tables with the same columns, read one after the other.

    Args:
        paths: the files, in order.
        separator: one character; detected from the first line if None.
        header: True (the first line names the columns), False (column_1 …), or the names.
    """

    block = BLOCK  # bytes read at a time; the boundaries of chunks affect the last digits of means

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
        """Split a file every ``PIECE_BLOCKS`` blocks; one piece if it is compressed or contains quotes."""
        path, quote = self.paths[index], self.dialect.quote_byte
        count = -(-path.stat().st_size // self.block)
        if count <= PIECE_BLOCKS or is_compressed(path) or (quote is not None and _contains_byte(path, quote)):
            return [Piece(index)]
        starts = range(0, count, PIECE_BLOCKS)
        return [Piece(index, first, None if first == starts[-1] else first + PIECE_BLOCKS) for first in starts]

    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece; line numbers count from its start."""
        return self._blocks(piece, columns)

    def _file(self, index: int, columns: Sequence[str]) -> Iterator[Chunk]:
        return self._blocks(Piece(index), columns)

    def _blocks(self, piece: Piece, columns: Sequence[str]) -> Iterator[Chunk]:
        index, path, file = piece.file, self.paths[piece.file], self.files[piece.file]
        names, line, rows, before = self.names, 1, 0, piece.first * self.block
        if piece.first:
            file += f", from the line of byte {before:,} on"
        with open_bytes(path) as (stream, tell):
            header_pending = self.header and not piece.first
            if self.header and piece.first:
                names = self._names(path)
            blocks = LineBlocks(
                stream, path, quote=self.dialect.quote_byte, size=self.block, first=piece.first, stop=piece.stop
            )
            while block := blocks.next():
                if header_pending:
                    header_pending = False
                    names, size, lines = self._header(block, path, last=blocks.ended)
                    line += lines
                    block = block[size:]
                    if not block:
                        continue
                parsed = parse(block, names, columns, self.dialect, file=file, first=line, last=blocks.ended)
                if parsed.bytes_used < len(block):
                    blocks.put_back(block[parsed.bytes_used :])
                line += block.count(b"\n", 0, parsed.bytes_used)
                position = tell()
                rows += parsed.frame.height
                yield Chunk(
                    parsed.frame,
                    index,
                    lambda row, line_of=parsed.line: f"{file}, line {line_of(row)}",  # type: ignore[misc]
                    position - before,
                )
                before = position
        if not rows and piece == Piece(index):
            problem = "has a header and no rows" if self.header and not header_pending else "is empty"
            raise DataError(f"{file}: the file {problem}; remove it or put rows in it")

    def _names(self, path: LogFile) -> tuple[str, ...]:
        """Return the column names of a file that is read from the middle."""
        with open_bytes(path) as (stream, _):
            blocks = LineBlocks(stream, path, quote=self.dialect.quote_byte, size=self.block)
            return self._header(blocks.next(), path, last=blocks.ended)[0]

    def _header(self, block: bytes, path: LogFile, *, last: bool) -> tuple[tuple[str, ...], int, int]:
        """Return the names of a file, as in the first file, and the size of its header in bytes and lines."""
        text = decode(block[:HEAD], file=str(path), first=1) if len(block) <= HEAD else _decode_head(block, path)
        _, lines, values = next(records(text, self.dialect, file=str(path), first=1, last=last))
        names = column_names(values, str(path))
        self.check_names(self.names, names, f"{path}, line 1")
        size = len(block) if block.count(b"\n") < lines else _offset_of_line(block, lines)
        return names, size, lines


def _contains_byte(path: LogFile, byte: bytes) -> bool:
    """Return whether a file contains a byte."""
    with convert_read_errors(path), path.open("rb") as file:
        return any(byte in data for data in iter(lambda: file.read(BLOCK), b""))


def _decode_head(block: bytes, path: LogFile) -> str:
    """Decode the start of a block, up to a line end."""
    end = block.rfind(b"\n", 0, HEAD) + 1
    if not end:
        raise DataError(f"{path}, line 1: longer than {HEAD >> 20} MB; is it a text table?")
    return decode(block[:end], file=str(path), first=1)


def first_record(path: LogFile, separator: str | None) -> tuple[list[str], Dialect]:
    """Return the first record of a file, and its dialect."""
    if separator is not None and (len(separator.encode()) != 1 or separator in '"\n\r'):
        raise DataError(f"the separator must be one ASCII character, found {separator!r}")
    with open_bytes(path) as (stream, _):
        block = LineBlocks(stream, path, quote=b'"', size=HEAD).next()
    if not block.strip():
        raise DataError(f"{path}: the file is empty; it needs at least one row")
    text = _decode_head(block, path) if len(block) > HEAD else decode(block, file=str(path), first=1)
    if separator is None:
        line = text.split("\n", 1)[0]
        separator = max(SEPARATORS, key=lambda character: (line.count(character), -SEPARATORS.index(character)))
    # Tab-separated files rarely use quoting, but may contain quotes as text.
    quote = None if separator in "\t\x01" and '\t"' not in text and not text.startswith('"') else '"'
    dialect = Dialect(separator, quote)
    for _, _, record in records(text, dialect, file=str(path), first=1, last=True):
        if record:
            return record, dialect
        raise DataError(f"{path}, line 1: the first line is blank; it should hold the header or the first row")
    raise DataError(f"{path}: the file is empty; it needs at least one row")


def column_names(values: Sequence[str], file: str) -> tuple[str, ...]:
    """Return the names of a header, ``column_N`` for an empty one; raise DataError for a duplicate."""
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
