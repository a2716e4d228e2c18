"""Rows of CSV and TSV files, plain, gzip or zstd: parsing of blocks, detection of separator and header."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.parsing import replace_missing_marks, strip_blanks
from lpfs.data.remote import LogFile
from lpfs.data.sources.base import Chunk, FileSource, Piece
from lpfs.data.sources.blocks import BLOCK, BOM, QUOTE, LineBlocks, inside_quotes, is_splittable, open_bytes
from lpfs.errors import DataError

SEPARATORS = (",", "\t", ";", "|", "\x01")
PIECE_BLOCKS = 8  # blocks of a piece
HEAD = 1 << 20  # bytes in which the first record must end


@dataclass(frozen=True)
class Dialect:
    """Separator of a text table, and whether values may be quoted; if not, quotes are plain text."""

    separator: str = ","
    quoted: bool = True


@dataclass(frozen=True)
class ParsedBlock:
    """Rows of a block: text columns, the location of a row, and the number of bytes parsed."""

    frame: pl.DataFrame
    locate: Callable[[int], str]
    bytes_used: int


def parse(
    block: bytes, names: Sequence[str], selected: Sequence[str], dialect: Dialect, *, file: str, first: int, last: bool
) -> ParsedBlock:
    """Parse a block that starts at line ``first``; every row must have as many columns as ``names``.

    polars parses the block. It accepts short rows and does not report where it failed, so the separators are
    counted first, and an irregular block is parsed again by the csv module, which is slow.
    """
    # polars removes a byte order mark from every block; it is one at the start of the file only
    rows = None if block.startswith(BOM) else regular_rows(block, len(names), dialect)
    if rows is not None:
        schema = {f"column_{index}": pl.String for index in range(len(names))}
        positions = {name: index for index, name in enumerate(names)}
        columns = [f"column_{positions[name]}" for name in selected]
        quote, separator = '"' if dialect.quoted else None, dialect.separator
        try:
            frame = pl.read_csv(
                block, has_header=False, schema=schema, columns=columns, separator=separator, quote_char=quote
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            frame = None
        if frame is not None and frame.height == rows:
            frame = frame.select(columns)
            frame.columns = list(selected)
            if not dialect.quoted or QUOTE not in block:
                return ParsedBlock(frame, lambda row: f"{file}, line {first + row}", len(block))
            frame = replace_missing_marks(frame, [""])
            return ParsedBlock(frame, lambda row: f"{file}, line {first + quoted_line(block, row)}", len(block))
    return parse_with_csv_module(block, names, selected, dialect, file=file, first=first, last=last)


def regular_rows(block: bytes, columns: int, dialect: Dialect) -> int | None:
    """Return the number of rows of a block if all have the same number of separators, else None."""
    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return None
    separator, values = ord(dialect.separator), np.frombuffer(block, np.uint8)
    is_end, is_separator = values == 10, values == separator
    if dialect.quoted and QUOTE in block:
        outside = ~inside_quotes(values)
        if not outside[-1] or not _quotes_are_regular(values, separator):
            return None
        is_end, is_separator = is_end & outside, is_separator & outside
    ends, separators = np.flatnonzero(is_end), np.flatnonzero(is_separator)
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    count = columns - 1  # separators of a row
    if len(separators) != len(ends) * count:
        return None
    # a short row and a long one have the right total: compare the last separator of each row, and the next one
    if count and ((separators[count - 1 :: count] > ends).any() or (separators[count::count] < ends[:-1]).any()):
        return None
    return len(ends)


def _quotes_are_regular(values: npt.NDArray[np.uint8], separator: int) -> bool:
    """Return whether every quote opens or closes a value, or is part of a doubled quote inside one.

    In 5" pipe it does not: polars would then return different rows for different columns.
    """
    quote = QUOTE[0]
    positions = np.flatnonzero(values == quote)
    opening, closing = positions[::2], positions[1::2]
    before = values[opening[opening > 0] - 1]
    after = values[closing[closing < len(values) - 1] + 1]
    return bool(np.isin(before, (separator, 10, quote)).all() and np.isin(after, (separator, 10, 13, quote)).all())


def quoted_line(block: bytes, row: int) -> int:
    """Return the number of lines of a block before a row, where quotes may contain line ends."""
    values = np.frombuffer(block, np.uint8)
    ends = values == 10
    rows = np.flatnonzero(ends & ~inside_quotes(values))
    return int(np.count_nonzero(ends[: rows[row - 1] + 1])) if row else 0


def decode(block: bytes, *, file: str, first: int) -> str:
    """Decode UTF-8; raise DataError with the line if it is not valid."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first + block.count(b"\n", 0, error.start)
        raise DataError(
            f"{file}, line {line}: {block[error.start : error.start + 4]!r} is not UTF-8 text; "
            "convert the file first, for example: iconv -f latin1 -t utf-8"
        ) from None


def records(text: str, dialect: Dialect, *, file: str, first: int, last: bool) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (line, lines parsed so far, values) of each record; stop before an incomplete one."""
    lines = io.StringIO(text, newline="\n").readlines()
    reader = csv.reader(
        lines, delimiter=dialect.separator, quoting=csv.QUOTE_MINIMAL if dialect.quoted else csv.QUOTE_NONE, strict=True
    )
    parsed = 0
    try:
        for record in reader:
            yield first + parsed, reader.line_num, record
            parsed = reader.line_num
    except csv.Error as error:
        if "unexpected end of data" not in str(error):
            row = reader.line_num - 1
            raise DataError(f"{file}, line {first + row}: {error}: {lines[row].strip()[:60]!r}") from None
        if last or not parsed:
            raise DataError(
                f"{file}, line {first + parsed}: a quote is opened and never closed: "
                f"{lines[parsed].strip()[:60]!r}; close it; a quote inside of a quoted value is written twice"
            ) from None


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
    positions = {name: index for index, name in enumerate(names)}
    columns = [pl.Series(name, [row[positions[name]] or None for row in rows], pl.String) for name in selected]
    size = _size_of_lines(block, lines)
    return ParsedBlock(pl.DataFrame(columns), lambda row: f"{file}, line {line_numbers[row]}", size)


def _size_of_lines(block: bytes, lines: int) -> int:
    """Return the number of bytes of the first ``lines`` lines."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    return int(ends[lines - 1]) + 1 if 0 < lines <= len(ends) else len(block)


class CsvSource(FileSource):
    """Text tables with the same columns, read one after the other; see ``open_source`` for the options."""

    typed = False
    block = BLOCK  # bytes read at a time; the boundaries of chunks affect the last digits of means

    def __init__(
        self,
        paths: Sequence[LogFile],
        *,
        separator: str | None = None,
        header: bool | Sequence[str] = True,
        strip: bool = False,
    ) -> None:
        super().__init__(paths)
        self.header, self.strip = header is True, strip
        first, self.dialect = first_record(self.paths[0], separator)
        if header is True:
            self.names = column_names(first, self.files[0], strip=strip)
        elif header is False:
            self.names = tuple(f"column_{index + 1}" for index in range(len(first)))
        else:
            self.names = tuple(header)
            if len(first) != len(self.names):
                raise DataError(
                    f"{self.files[0]}, line 1: {len(first)} columns, expected {len(self.names)} "
                    f"({', '.join(self.names[:3])} …): {self.dialect.separator.join(first)[:60]!r}"
                )

    def pieces(self, index: int) -> list[Piece]:
        path = self.paths[index]
        count = -(-self.sizes[index] // self.block)
        if count <= PIECE_BLOCKS or not is_splittable(path, self.dialect.quoted):
            return [Piece(index)]
        starts = range(0, count, PIECE_BLOCKS)
        return [Piece(index, first, None if first == starts[-1] else first + PIECE_BLOCKS) for first in starts]

    def piece(self, columns: Sequence[str], piece: Piece) -> Iterator[Chunk]:
        # line numbers count from the start of the piece
        index, path, file = piece.file, self.paths[piece.file], self.files[piece.file]
        names, line, rows, before = self.names, 1, 0, piece.first * self.block
        if piece.first:
            file += f", from the line of byte {before:,} on"
        with open_bytes(path) as (stream, tell):
            header_pending = self.header and not piece.first
            if self.header and piece.first:
                with open_bytes(path) as (start, _):
                    head = LineBlocks(start, path, quoted=self.dialect.quoted, size=self.block)
                    names = self._header(head.next(), path, last=head.ended)[0]
            blocks = LineBlocks(stream, path, self.dialect.quoted, size=self.block, first=piece.first, stop=piece.stop)
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
                frame = strip_blanks(parsed.frame) if self.strip else parsed.frame
                yield Chunk(frame, index, parsed.locate, position - before)
                before = position
        if not rows and piece == Piece(index):
            problem = "has a header and no rows" if self.header and not header_pending else "is empty"
            raise DataError(f"{file}: the file {problem}; remove it or put rows in it")

    def _header(self, block: bytes, path: LogFile, *, last: bool) -> tuple[tuple[str, ...], int, int]:
        """Return the names of a file, as in the first file, and the size of its header in bytes and lines."""
        text = _decode_head(block, path)
        _, lines, values = next(records(text, self.dialect, file=str(path), first=1, last=last))
        names = column_names(values, str(path), strip=self.strip)
        self.check_names(self.names, names, f"{path}, line 1")
        return names, _size_of_lines(block, lines), lines


def _decode_head(block: bytes, path: LogFile) -> str:
    """Decode a block, or the lines in its first ``HEAD`` bytes."""
    end = block.rfind(b"\n", 0, HEAD) + 1 if len(block) > HEAD else len(block)
    if not end:
        raise DataError(f"{path}, line 1: longer than {HEAD >> 20} MB; is it a text table?")
    return decode(block[:end], file=str(path), first=1)


def first_record(path: LogFile, separator: str | None) -> tuple[list[str], Dialect]:
    """Return the first record of a file, and its dialect."""
    if separator is not None and (len(separator.encode()) != 1 or separator in '"\n\r'):
        raise DataError(f"the separator must be one ASCII character, found {separator!r}")
    with open_bytes(path) as (stream, _):
        block = LineBlocks(stream, path, quoted=True, size=HEAD).next()
    if not block.strip():
        raise DataError(f"{path}: the file is empty; it needs at least one row")
    text = _decode_head(block, path)
    if separator is None:
        line = text.split("\n", 1)[0]
        separator = max(SEPARATORS, key=lambda character: (line.count(character), -SEPARATORS.index(character)))
    # Tab-separated files rarely use quoting, but may contain quotes as text.
    dialect = Dialect(separator, separator not in "\t\x01" or '\t"' in text or text.startswith('"'))
    _, _, record = next(records(text, dialect, file=str(path), first=1, last=True))
    if not record:
        raise DataError(f"{path}, line 1: the first line is blank; it should hold the header or the first row")
    return record, dialect


def column_names(values: Sequence[str], file: str, *, strip: bool = False) -> tuple[str, ...]:
    """Return the names of a header, ``column_N`` for an empty one; raise DataError for a duplicate."""
    names: dict[str, int] = {}
    for number, value in enumerate(values, start=1):
        name = (value.strip() if strip else value) or f"column_{number}"
        if name in names:
            numbers = f"numbers {names[name]} and {number}"
            raise DataError(f"{file}, line 1: two columns are named {name!r} ({numbers}); rename one")
        names[name] = number
    return tuple(names)
