"""Call an ASGI application without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def call(
    app: Any, method: str, path: str, body: bytes | list[bytes] = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """Return the answer to one request; a body that is a list is sent in these parts."""
    parts = body if isinstance(body, list) else [body]
    given = {"host": "localhost:8000", **(headers or {})}
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "query_string": b""},
        **{"method": method, "path": path, "raw_path": path.encode(), "root_path": "", "server": ("localhost", 8000)},
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }
    sent: list[dict[str, Any]] = []
    queue = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]

    async def receive() -> dict[str, Any]:
        if queue:
            return queue.pop(0)
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    anyio.run(app, scope, receive, send)
    [start] = [message for message in sent if message["type"] == "http.response.start"]
    names = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], names, b"".join(message.get("body", b"") for message in sent))


def post_json(app: Any, path: str, values: Any, **headers: str) -> Answer:
    return call(app, "POST", path, json.dumps(values).encode(), {"content-type": "application/json", **headers})
