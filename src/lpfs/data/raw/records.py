"""One block of CSV text -> a frame of text columns, with the line of every row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lpfs.data.sources.blocks import inside_quotes
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
    used: int


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
    return parse_slowly(block, names, wanted, dialect, file=file, first=first, last=last)


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
    if not outside[-1] or not quotes_enclose(values, separator[0], quote[0]):
        return None
    rows = int(np.count_nonzero((values == 10) & outside)) + (not block.endswith(b"\n"))
    found = int(np.count_nonzero((values == separator[0]) & outside))
    return rows if found == rows * (columns - 1) else None


def quotes_enclose(values: npt.NDArray[np.uint8], separator: int, quote: int) -> bool:
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


def parse_slowly(
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
    size = len(block) if block.count(b"\n") <= used else nth_line_end(block, used)
    return Parsed(pl.DataFrame(columns), at.__getitem__, size)


def nth_line_end(block: bytes, lines: int) -> int:
    """Return where the given number of lines ends."""
    return int(np.flatnonzero(np.frombuffer(block, np.uint8) == 10)[lines - 1]) + 1
