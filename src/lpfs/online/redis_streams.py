"""Events from a Redis stream: entries with a field ``json`` that holds the row, or whose fields are the row."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from lpfs._imports import import_optional
from lpfs.errors import DataError, InputError
from lpfs.online.source import Event, parse_event

JSON_FIELD = b"json"
START = "0-0"  # id before the first entry
RETRIES = 60  # of a request while the server is down or starts; up to a second each


class RedisSource:
    """A Redis stream, read by ids without a consumer group.

    The last entry that was read must stay in the stream: without it, entries after it may have been trimmed, or the
    server has lost entries, and DataError is raised.

    Args:
        url: address of the server, as redis-py takes it.
        stream: key of the stream.
    """

    def __init__(self, url: str, stream: str) -> None:
        redis = import_optional("redis", "redis", "the Redis source")
        errors, retry = redis.exceptions, import_optional("redis.retry", "redis", "the Redis source")
        backoff = import_optional("redis.backoff", "redis", "the Redis source").ExponentialBackoff(cap=1.0, base=0.05)
        lost = (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError)
        self._errors, self.stream = errors, stream
        self._client = redis.Redis.from_url(
            url, retry=retry.Retry(backoff, RETRIES, lost), retry_on_error=list(lost), socket_timeout=20
        )
        self._last = START

    @classmethod
    def from_url(cls, url: str) -> RedisSource:
        """Return the source of ``redis://host:port/stream``, or ``redis://host:port/database/stream``."""
        parts = urlsplit(url)
        database, _, stream = parts.path.strip("/").rpartition("/")
        if not stream:
            raise InputError(f"a Redis source is redis://HOST:PORT/STREAM, found {url!r}")
        return cls(parts._replace(path=f"/{database or 0}").geturl(), stream)

    def poll(self, max_rows: int) -> list[Event]:
        """Return the next events."""
        entries = self._after_last(max_rows)
        if entries:
            self._last = entries[-1][0].decode()
        return [_event(values) for _, values in entries]

    def _after_last(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries after the last one, which is read again: if it is gone, later ones may be gone too."""
        started = self._last != START
        entries: list[Any] = self._request("xrange", self.stream, self._last, "+", count + started)
        if not started:
            return entries
        if not entries or entries[0][0].decode() != self._last:
            raise DataError(
                f"the Redis stream {self.stream!r} no longer has the entry {self._last}, the last one that was "
                "read, so that later ones may be lost too; do not trim entries that the trainer has not committed, use "
                "appendfsync always, or start another run"
            )
        return entries[1:]

    def _request(self, command: str, *arguments: Any) -> Any:
        try:
            return getattr(self._client, command)(*arguments)
        except self._errors.RedisError as error:
            raise DataError(f"cannot read the Redis stream {self.stream!r}: {error}") from error

    def position(self) -> Any:
        """Return the id of the last entry that was read."""
        return {"id": self._last}

    def seek(self, position: Any) -> None:
        """Continue after an entry."""
        self._last = START if position is None else position["id"]
        self._after_last(1)

    def lag(self) -> int | None:
        """Return None: Redis does not count the entries after an id."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _event(values: dict[bytes, bytes]) -> Event:
    if set(values) == {JSON_FIELD}:
        return parse_event(values[JSON_FIELD])
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in values.items()}
