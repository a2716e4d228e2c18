"""Sources of events: the protocol, and segment files in a folder, which need no server.

A position says which events were read, as JSON values. After ``seek(position)`` a source returns exactly the events
that follow it, in the same order; a position that is no longer available raises DataError, so that no event is
skipped silently.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import polars as pl

from lpfs._fileio import parse_json
from lpfs.errors import DataError, InputError

FORMATS = (".parquet", ".csv", ".jsonl", ".ndjson")
MAX_TEXT = 2000  # characters of a malformed event that are kept


@dataclass(frozen=True)
class Malformed:
    """An event that is no row."""

    text: str
    reason: str


Event = Mapping[str, Any] | Malformed
Events = Sequence[Event] | pl.DataFrame


class EventSource(Protocol):
    """Where events come from."""

    def poll(self, max_rows: int) -> Events:
        """Return the next events, at most ``max_rows``; fewer or none if there are no more at present."""

    def position(self) -> Any:
        """Return the position after the events that were returned, as JSON values."""

    def seek(self, position: Any) -> None:
        """Continue after a position that ``position`` returned; raise DataError if events after it are lost."""

    def lag(self) -> int | None:
        """Return how much is waiting: events, or segments; None if it is unknown."""

    def close(self) -> None:
        """Release connections and files."""


def parse_event(data: bytes | str) -> Event:
    """Return a row from JSON text."""
    try:
        row = parse_json(data)
        problem = "" if isinstance(row, dict) else "it is not an object of field and value"
    except ValueError as error:
        row, problem = {}, str(error)
    text = data if isinstance(data, str) else data.decode(errors="replace")
    return Malformed(text[:MAX_TEXT], problem) if problem else row


class SegmentSource:
    """Segment files in a folder (.parquet, .csv, .jsonl), read in the order of their names.

    A segment is published by a rename and never changes afterwards; names that start with a dot or an underscore are
    ignored. Its name must come after those of all earlier segments.

    Args:
        folder: the folder; it may be empty at first.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"no folder {self.folder}; give the folder into which segments are renamed")
        self._segment: str | None = None  # the one that is read, or was read last
        self._row = 0  # rows of it that were returned
        self._rows: Events | None = None
        self._seen: set[str] = set()

    def segments(self) -> list[str]:
        """Return the names of the segments in order."""
        with os.scandir(self.folder) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(FORMATS) and entry.name[0] not in "._")

    def poll(self, max_rows: int) -> Events:
        """Return the next rows of the current segment, or of the next one."""
        while True:
            if self._rows is None and self._segment is not None:
                self._rows = read_segment(self.folder / self._segment)
            if self._rows is not None and self._row < len(self._rows):
                rows = self._rows[self._row : self._row + max_rows]
                self._row += len(rows)
                return rows
            following = self._next_segment()
            if following is None:
                return []
            self._segment, self._row, self._rows = following, 0, None

    def _next_segment(self) -> str | None:
        names = self.segments()
        if self._segment is None:
            self._seen.update(names)
            return names[0] if names else None
        late = [name for name in names if name < self._segment and name not in self._seen]
        if late and self._seen:
            raise DataError(
                f"segment {late[0]!r} was published after {self._segment!r} had been read; give a new segment a name "
                "that comes after those of all earlier ones, and rename this one"
            )
        self._seen.update(names)
        return next((name for name in names if name > self._segment), None)

    def position(self) -> Any:
        """Return the name of the segment and the number of its rows that were read; None at the start."""
        return None if self._segment is None else {"segment": self._segment, "row": self._row}

    def seek(self, position: Any) -> None:
        """Continue after a position."""
        self._segment, self._row, self._rows = None, 0, None
        self._seen = set()
        if position is None:
            return
        path = self.folder / position["segment"]
        if not path.is_file():
            raise DataError(
                f"{path} is missing, but the trainer has read only {position['row']} rows of it; restore it"
            )
        self._segment, self._row = position["segment"], position["row"]
        self._rows = read_segment(path)
        if len(self._rows) < self._row:
            raise DataError(f"{path} has {len(self._rows)} rows, but {self._row} of it were read; restore it")

    def lag(self) -> int | None:
        """Return the number of segments that were not read completely."""
        waiting = sum(1 for name in self.segments() if self._segment is None or name > self._segment)
        return waiting + bool(self._rows is not None and self._row < len(self._rows))

    def close(self) -> None:
        """Release the rows of the current segment."""
        self._rows = None


def read_segment(path: Path) -> Events:
    """Return the rows of a segment; a line that cannot be read becomes Malformed."""
    try:
        if path.suffix == ".parquet":
            return pl.read_parquet(path)
        if path.suffix == ".csv":
            return _read_csv(path)
        return [parse_event(line) for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        raise DataError(f"{path} is missing, although it was not read yet; restore it") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"cannot read the segment {path}: {error}; replace it by a valid one") from error


def _read_csv(path: Path) -> Events:
    """Return a CSV segment as a table of text; value by value if not all lines have as many commas as the header."""
    lines = path.read_bytes().splitlines()
    if not lines:
        return []
    commas = lines[0].count(b",")
    if all(line.count(b",") == commas and b'"' not in line for line in lines):
        return pl.read_csv(path, infer_schema=False)
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header, *rows = csv.reader(file)
    return [
        {name: value or None for name, value in zip(header, row, strict=True)}
        if len(row) == len(header)
        else Malformed(",".join(row)[:MAX_TEXT], f"it has {len(row)} values, the header has {len(header)} names")
        for row in rows
        if row
    ]


def open_source(url: str) -> EventSource:
    """Return the source of an address: a folder, ``kafka://host:port/topic``, ``redis://host:port[/database]/stream``."""
    parts = urlsplit(url)
    database, _, name = parts.path.strip("/").rpartition("/")
    if parts.scheme in ("kafka", "redis", "rediss", "unix") and (not name or not parts.netloc + database):
        raise InputError(f"a source is a folder, kafka://HOST:PORT/TOPIC or redis://HOST:PORT/STREAM, found {url!r}")
    if parts.scheme == "kafka":
        from lpfs.online.kafka import KafkaSource

        return KafkaSource(parts.netloc, name)
    if parts.scheme in ("redis", "rediss", "unix"):
        from lpfs.online.redis_streams import RedisSource

        return RedisSource(parts._replace(path=f"/{database or 0}").geturl(), name)
    return SegmentSource(url.removeprefix("file://"))
