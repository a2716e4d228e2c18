"""What a client sends: limits, JSON rows, Arrow streams. Anything else is an error of the client in one line."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from lpfs._validation import check_options
from lpfs.data.parsing import first_line
from lpfs.data.raw_rows import READ_ERRORS, RefusedRow
from lpfs.errors import LpfsError

if TYPE_CHECKING:
    from starlette.requests import Request

JSON_TYPE, ARROW_TYPE = "application/json", "application/vnd.apache.arrow.stream"
SCHEMA_MESSAGE, RECORD_BATCH = 1, 3  # of Arrow; 2 is a dictionary
CONTINUATION = 0xFFFFFFFF
READ_FAILURES = (*READ_ERRORS, OSError, pl.exceptions.PanicException)


@dataclass(frozen=True)
class Limits:
    """The largest request that is answered."""

    max_bytes: int = 4 << 20  # of a body
    max_rows: int = 10_000  # of a request
    max_seconds: float = 10.0  # to receive and answer a request
    inline_rows: int = 64  # requests of more rows are computed in a thread, so that the others need not wait
    max_watchers: int = 32  # open live pages

    def __post_init__(self) -> None:
        check_options(self, positive=("max_seconds",), count=("max_bytes", "max_rows", "inline_rows", "max_watchers"))


class RequestError(LpfsError):
    """A request that is not answered: the status, one line, and the rows that are wrong."""

    def __init__(self, status: int, message: str, refused: Sequence[RefusedRow] = ()) -> None:
        super().__init__(message)
        self.status, self.refused = status, tuple(refused)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body; raise RequestError as soon as it is too long."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise too_long(limits)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.max_bytes:
            raise too_long(limits)
    return bytes(body)


def too_long(limits: Limits) -> RequestError:
    """Return the error of a body that is too long."""
    return RequestError(413, f"the body has more than {limits.max_bytes:,} bytes; send fewer rows in one request")


def parse_rows(content_type: str, body: bytes, limits: Limits) -> list[Any] | pl.DataFrame:
    """Return the rows of a body by its content type: JSON values, or a table."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        return parse_json_rows(body, limits)
    if kind == ARROW_TYPE:
        return parse_arrow_rows(body, limits)
    raise RequestError(415, f"the content type must be {JSON_TYPE} or {ARROW_TYPE}, found {kind[:80]!r}")


def parse_json_rows(body: bytes, limits: Limits) -> list[Any]:
    """Return the rows of ``{"rows": [{"field": value, …}, …]}``."""
    try:
        values = json.loads(body, parse_constant=refuse_constant)  # 1e999 becomes infinity, which counts as missing
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {first_line(error)}") from None
    rows = values.get("rows") if isinstance(values, dict) else None
    if not isinstance(rows, list):
        raise RequestError(400, 'the body must be an object {"rows": [{"field": value, …}, …]}')
    if unknown := sorted(values.keys() - {"rows"}):
        raise RequestError(400, f"unknown key {unknown[0][:80]!r}; the body has one key, 'rows'")
    check_count(len(rows), limits)
    return rows


def refuse_constant(text: str) -> Any:
    """Raise ValueError for NaN and infinity."""
    raise ValueError(f"{text} is not a number; give null")


def check_count(rows: int, limits: Limits) -> None:
    """Raise RequestError if a request has no rows or too many."""
    if not 1 <= rows <= limits.max_rows:
        raise RequestError(413 if rows else 400, f"a request has 1 to {limits.max_rows:,} rows, found {rows:,}")


def parse_arrow_rows(body: bytes, limits: Limits) -> pl.DataFrame:
    """Return the table of an Arrow stream without compression and dictionaries, which could expand to any size."""
    try:
        check_count(sum(arrow_batch_rows(body)), limits)
    except (struct.error, IndexError, OverflowError):
        raise RequestError(400, "the body is not an Arrow stream") from None
    try:
        frame = pl.read_ipc_stream(io.BytesIO(body))
    except READ_FAILURES as error:
        raise RequestError(400, f"the Arrow stream cannot be read: {first_line(error)[:200]}") from None
    if frame.estimated_size() > limits.max_bytes:  # rows may share one long text
        raise too_long(limits)
    check_count(frame.height, limits)
    return frame


def arrow_batch_rows(body: bytes) -> Iterator[int]:
    """Yield the number of rows of each batch of an Arrow stream; raise RequestError for what is not read.

    A message is a flatbuffer: fields by number are kind (1), content (2) and the length of the buffers that follow (3);
    those of a batch are rows (0), lengths of columns (1) and compression (3).
    """
    position = 0
    while position < len(body):
        [size] = struct.unpack_from("<I", body, position)
        position += 4
        if size == CONTINUATION:
            [size] = struct.unpack_from("<I", body, position)
            position += 4
        if size == 0:
            return
        message = body[position : position + size]
        root = struct.unpack_from("<I", message)[0]
        length, kind = read_field(message, root, 3, "<q") or 0, read_field(message, root, 1, "<B")
        position += size
        if not 0 <= length <= len(body) - position:
            raise RequestError(400, "the Arrow stream is truncated")
        position += length
        if kind == SCHEMA_MESSAGE:
            continue
        batch = follow_field(message, root, 2)
        if kind != RECORD_BATCH or batch is None:
            raise RequestError(400, "the Arrow stream has a dictionary; send plain text columns")
        if follow_field(message, batch, 3) is not None:
            raise RequestError(400, "the Arrow stream is compressed; send it without compression")
        start = follow_field(message, batch, 1)
        count = 0 if start is None else struct.unpack_from("<I", message, start)[0]
        columns = message[start + 4 : start + 4 + 16 * count] if start is not None else b""
        rows = read_field(message, batch, 0, "<q") or 0
        if rows < 0 or any(not 0 <= column <= len(body) for column, _ in struct.iter_unpack("<qq", columns)):
            raise RequestError(400, "a column of the Arrow stream is longer than the stream")
        yield rows


def field_position(data: bytes, table: int, number: int) -> int | None:
    """Return where a field of a table in a flatbuffer is; None if it is absent. ``struct`` checks positions."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0:
        raise IndexError
    entry, [size] = 4 + 2 * number, struct.unpack_from("<H", data, fields)
    [offset] = struct.unpack_from("<H", data, fields + entry) if entry < size else [0]
    return table + offset if offset else None


def read_field(data: bytes, table: int, number: int, layout: str) -> int | None:
    """Return a number in a flatbuffer."""
    position = field_position(data, table, number)
    return None if position is None else int(struct.unpack_from(layout, data, position)[0])


def follow_field(data: bytes, table: int, number: int) -> int | None:
    """Return where the table or vector in a field of a flatbuffer is."""
    position = field_position(data, table, number)
    return None if position is None else position + struct.unpack_from("<I", data, position)[0]
