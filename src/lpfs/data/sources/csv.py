"""Rows of CSV and TSV files, plain, gzip or zstd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lpfs.data.sources.blocks import BLOCK, Blocks, open_bytes, packed, telling
from lpfs.data.raw.records import Dialect, decode, nth_line_end, parse, records
from lpfs.data.remote import LogFile
from lpfs.data.sources.base import Chunk, FileSource, Piece
from lpfs.errors import DataError

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
        if count <= BLOCKS or packed(path) or (quote is not None and holds(path, quote)):
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
            blocks = Blocks(
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
                if parsed.used < len(block):
                    blocks.put_back(block[parsed.used :])
                line += block.count(b"\n", 0, parsed.used)
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
            blocks = Blocks(stream, path, quote=self.dialect.quote_byte, size=self.block)
            return self._header(blocks.next(), path, last=blocks.ended)[0]

    def _header(self, block: bytes, path: LogFile, *, last: bool) -> tuple[tuple[str, ...], int, int]:
        """Read the names of one file, which must be those of the first file in any order."""
        text = decode(block[:HEAD], file=str(path), first=1) if len(block) <= HEAD else head_text(block, path)
        _, lines, values = next(records(text, self.dialect, file=str(path), first=1, last=last))
        names = column_names(values, str(path))
        self.check_names(self.names, names, f"{path}, line 1")
        used = len(block) if block.count(b"\n") < lines else nth_line_end(block, lines)
        return names, used, lines


def holds(path: LogFile, mark: bytes) -> bool:
    """Whether a file holds a byte."""
    with telling(path), path.open("rb") as file:
        return any(mark in data for data in iter(lambda: file.read(BLOCK), b""))


def head_text(block: bytes, path: LogFile) -> str:
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
        block = Blocks(stream, path, quote=b'"', size=HEAD).next()
    if not block.strip():
        raise DataError(f"{path}: the file is empty; it needs at least one row")
    text = head_text(block, path) if len(block) > HEAD else decode(block, file=str(path), first=1)
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
