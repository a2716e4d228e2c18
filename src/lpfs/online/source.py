"""Sources of events: the protocol; segment files in a folder, a Kafka topic, a Redis stream.

A position says which events were read, as JSON values. After ``seek(position)`` a source returns exactly the events
that follow it, in the same order; a position that is no longer available raises DataError, so that no event is
skipped silently.
"""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import polars as pl

from lpfs._fileio import parse_json
from lpfs._imports import import_optional
from lpfs.errors import DataError, InputError

FORMATS = (".parquet", ".csv", ".jsonl", ".ndjson")
ORDER_ADVICE = "give a new segment a name that comes after those of all earlier ones, and rename this one"
MAX_TEXT = 2000  # characters of a malformed event that are kept
KAFKA_POLL_SECONDS = 0.1  # a poll waits so long for as many events as were asked for
KAFKA_REQUEST_SECONDS = 20.0
REDIS_JSON = b"json"
REDIS_START = "0-0"  # id before the first entry
REDIS_RETRIES = 60  # of a request while the server is down or starts; up to a second each


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
        return None

    def close(self) -> None:
        """Release connections and files."""


def parse_event(data: bytes) -> Event:
    """Return a row from JSON text."""
    try:
        row = parse_json(data)
        problem = "" if isinstance(row, dict) else "it is not an object of field and value"
    except ValueError as error:
        row, problem = {}, str(error)
    return Malformed(data.decode(errors="replace")[:MAX_TEXT], problem) if problem else row


class SegmentSource(EventSource):
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
        self.seek(None)

    def seek(self, position: Any) -> None:
        self._segment = ""  # the one that is read, or was read last; empty at the start
        self._row = 0  # rows of it that were returned
        self._rows: Events | None = None
        self._seen: set[str] = set()  # segments that existed when one was last opened
        if position is None:
            return
        path = self.folder / position["segment"]
        if not path.is_file():
            raise DataError(
                f"{path} is missing, but the trainer has read only {position['row']} rows of it; restore it"
            )
        self._segment, self._row = position["segment"], position["row"]
        self._seen = {name for name in self.segments() if name <= self._segment}
        if len(self._seen) > position.get("segments", len(self._seen)):
            raise DataError(
                f"{len(self._seen) - position['segments']} segments with names before {self._segment!r} were published "
                f"in {self.folder} after it had been read; {ORDER_ADVICE}"
            )
        self._rows = read_segment(path)
        if len(self._rows) < self._row:
            raise DataError(f"{path} has {len(self._rows)} rows, but {self._row} of it were read; restore it")

    def segments(self) -> list[str]:
        """Return the names of the segments in order."""
        with os.scandir(self.folder) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(FORMATS) and entry.name[0] not in "._")

    def poll(self, max_rows: int) -> Events:
        while True:
            if self._rows is None and self._segment:
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
        late = [name for name in names if name < self._segment and name not in self._seen]
        if late:
            raise DataError(f"segment {late[0]!r} was published after {self._segment!r} had been read; {ORDER_ADVICE}")
        self._seen = set(names)
        return next((name for name in names if name > self._segment), None)

    def position(self) -> Any:
        """Return the segment, the number of its rows that were read, and of segments up to it; None at the start."""
        if not self._segment:
            return None
        return {
            "segment": self._segment,
            "row": self._row,
            "segments": sum(name <= self._segment for name in self._seen),
        }

    def lag(self) -> int | None:
        """Return the number of segments that were not read completely."""
        waiting = sum(name > self._segment for name in self.segments())
        return waiting + bool(self._rows is not None and self._row < len(self._rows))

    def close(self) -> None:
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
    except (OSError, csv.Error, pl.exceptions.PolarsError) as error:
        raise DataError(f"cannot read the segment {path}: {error}; replace it by a valid one") from error


def _read_csv(path: Path) -> Events:
    """Return a CSV segment as a table of text; value by value if not all lines have as many commas as the header."""
    lines = path.read_bytes().splitlines()
    if not lines:
        return []
    commas = lines[0].count(b",")
    if all(line.count(b",") == commas and b'"' not in line for line in lines):
        return pl.read_csv(path, infer_schema=False)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header, *rows = csv.reader(file)
    return [
        {name: value or None for name, value in zip(header, row, strict=True)}
        if len(row) == len(header)
        else Malformed(",".join(row)[:MAX_TEXT], f"it has {len(row)} values, the header has {len(header)} names")
        for row in rows
        if row
    ]


class KafkaSource(EventSource):
    """All partitions of a Kafka topic, one JSON object per message; by ``assign`` and ``seek``, without a group.

    The order of events is that of their partition; between partitions Kafka does not define one. If retention has
    deleted events after the position, DataError is raised instead of a jump to the ones that are left.

    Args:
        servers: bootstrap servers, ``host:port,…``.
        topic: the topic.
        config: further settings of librdkafka, for example for TLS.
    """

    def __init__(self, servers: str, topic: str, config: dict[str, Any] | None = None) -> None:
        self._kafka = import_optional("confluent_kafka", "kafka", "the Kafka source")
        self.topic, self._name = topic, f"Kafka topic {topic!r}"
        fixed = {"group.id": "lpfs", "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._consumer = self._kafka.Consumer({"bootstrap.servers": servers, **(config or {}), **fixed})
        self._offsets: dict[int, int] = {}  # next offset of each partition

    def poll(self, max_rows: int) -> list[Event]:
        events, codes = [], self._kafka.KafkaError
        for message in self._consumer.consume(max_rows, KAFKA_POLL_SECONDS):
            if (error := message.error()) is not None:
                if error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                    raise DataError(f"{self._name}, {message.partition()}: events after the last commit were deleted")
                if error.retriable() or error.code() == codes._ALL_BROKERS_DOWN:
                    continue
                raise DataError(f"{self._name}: {error.str()}")
            partition, offset = message.partition(), message.offset()
            if offset > self._offsets[partition]:  # a gap: of a compacted topic or a transaction, or deleted events
                self._check_available(partition, self._offsets[partition])
            self._offsets[partition] = offset + 1
            events.append(parse_event(message.value() or b""))
        return events

    def position(self) -> Any:
        """Return the next offset of each partition."""
        return {str(partition): offset for partition, offset in sorted(self._offsets.items())}

    def seek(self, position: Any) -> None:
        """Continue at these offsets; new partitions, and all of them without a position, start at their beginning."""
        try:
            topic = self._consumer.list_topics(self.topic, KAFKA_REQUEST_SECONDS).topics[self.topic]
        except self._kafka.KafkaException as error:
            raise DataError(f"{self._name} cannot be read: {error}") from error
        if topic.error is not None:
            raise DataError(f"{self._name} cannot be read: {topic.error.str()}")
        offsets = {int(partition): offset for partition, offset in (position or {}).items()}
        if missing := sorted(set(offsets) - set(topic.partitions)):
            raise DataError(f"{self._name} no longer has the partition {missing[0]}")
        for partition in topic.partitions:
            if partition in offsets:
                self._check_available(partition, offsets[partition])
            else:
                offsets[partition] = self._limits(partition)[0]
        self._offsets = offsets
        part = self._kafka.TopicPartition
        self._consumer.assign([part(self.topic, partition, offset) for partition, offset in offsets.items()])

    def _limits(self, partition: int) -> tuple[int, int]:
        """Return the first offset of a partition and the one after the last."""
        part = self._kafka.TopicPartition(self.topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(part, KAFKA_REQUEST_SECONDS)
        except (self._kafka.KafkaException, TypeError) as error:
            raise DataError(f"{self._name}, {partition}: its offsets cannot be read: {error}") from error
        return low, high

    def _check_available(self, partition: int, offset: int) -> None:
        low, high = self._limits(partition)
        if not low <= offset <= high:
            raise DataError(
                f"{self._name}, {partition}: offset {offset} of the last commit is not available, only {low} to "
                f"{high}; raise the retention, or start another run"
            )

    def lag(self) -> int | None:
        """Return the number of events after the position, as far as the client knows."""
        part, total = self._kafka.TopicPartition, 0
        for partition, offset in self._offsets.items():
            _, high = self._consumer.get_watermark_offsets(part(self.topic, partition), cached=True)
            total += max(0, high - offset)
        return total

    def close(self) -> None:
        thread = threading.Thread(target=self._consumer.close, daemon=True)
        thread.start()
        thread.join(KAFKA_REQUEST_SECONDS)  # librdkafka may wait without end for a broker that is gone


class RedisSource(EventSource):
    """A Redis stream, read by ids without a consumer group.

    An entry has a field ``json`` that holds the row, or its fields are the row. The last entry that was read must stay
    in the stream: without it, entries after it may have been trimmed or lost, and DataError is raised.

    Args:
        url: address of the server, as redis-py takes it.
        stream: key of the stream.
    """

    def __init__(self, url: str, stream: str) -> None:
        redis = import_optional("redis", "redis", "the Redis source")
        self.stream, self._last, self._error = stream, REDIS_START, redis.RedisError
        lost = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)
        retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=1.0, base=0.05), REDIS_RETRIES, lost)
        self._client = redis.Redis.from_url(url, retry=retry, retry_on_error=list(lost), socket_timeout=20)

    def poll(self, max_rows: int) -> list[Event]:
        entries = self._after_last(max_rows)
        if entries:
            self._last = entries[-1][0].decode()
        return [
            parse_event(values[REDIS_JSON])
            if set(values) == {REDIS_JSON}
            else {name.decode(errors="replace"): value.decode(errors="replace") for name, value in values.items()}
            for _, values in entries
        ]

    def _after_last(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries after the last one, which is read again: if it is gone, later ones may be gone too."""
        started = self._last != REDIS_START
        try:
            entries: list[Any] = self._client.xrange(self.stream, self._last, "+", count + started)
        except self._error as error:
            raise DataError(f"cannot read the Redis stream {self.stream!r}: {error}") from error
        if not started:
            return entries
        if not entries or entries[0][0].decode() != self._last:
            raise DataError(
                f"the Redis stream {self.stream!r} no longer has the entry {self._last}, the last one that was "
                "read, so that later ones may be lost too; do not trim entries that the trainer has not committed, use "
                "appendfsync always, or start another run"
            )
        return entries[1:]

    def position(self) -> Any:
        """Return the id of the last entry that was read."""
        return {"id": self._last}

    def seek(self, position: Any) -> None:
        self._last = REDIS_START if position is None else position["id"]
        self._after_last(1)

    def close(self) -> None:
        self._client.close()


def open_source(url: str) -> EventSource:
    """Return the source of an address: a folder, ``kafka://host:port/topic``, ``redis://host:port[/database]/stream``."""
    parts = urlsplit(url)
    database, _, name = parts.path.strip("/").rpartition("/")
    if parts.scheme not in ("kafka", "redis", "rediss", "unix"):
        return SegmentSource(url.removeprefix("file://"))
    if not name or not parts.netloc + database:
        raise InputError(f"a source is a folder, kafka://HOST:PORT/TOPIC or redis://HOST:PORT/STREAM, found {url!r}")
    if parts.scheme == "kafka":
        return KafkaSource(parts.netloc, name)
    return RedisSource(parts._replace(path=f"/{database or 0}").geturl(), name)
