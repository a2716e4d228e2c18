"""Events from a Redis stream: entries with a field ``json`` that holds the row, or whose fields are the row."""

from __future__ import annotations

from typing import Any

from lpfs._imports import import_optional
from lpfs.errors import DataError
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

    def poll(self, max_rows: int) -> list[Event]:
        """Return the next events."""
        entries = self._after_last(max_rows)
        if entries:
            self._last = entries[-1][0].decode()
        return [
            parse_event(values[JSON_FIELD])
            if set(values) == {JSON_FIELD}
            else {name.decode(errors="replace"): value.decode(errors="replace") for name, value in values.items()}
            for _, values in entries
        ]

    def _after_last(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries after the last one, which is read again: if it is gone, later ones may be gone too."""
        started = self._last != START
        try:
            entries: list[Any] = self._client.xrange(self.stream, self._last, "+", count + started)
        except self._errors.RedisError as error:
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
        """Continue after an entry."""
        self._last = START if position is None else position["id"]
        self._after_last(1)

    def lag(self) -> int | None:
        """Return None: Redis does not count the entries after an id."""
        return None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
