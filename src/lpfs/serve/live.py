"""What the live page shows: the served model, the requests, and the state of the trainer if it is there."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from lpfs.errors import LpfsError
from lpfs.online.state import DATABASE, StateReader
from lpfs.serve.engine import ModelStore

WINDOW_SECONDS = 10.0  # of rate and latency
RECORDED = 1 << 14  # requests that are kept for them
REFRESH_SECONDS = 1.0
MAX_POINTS, MAX_EVENTS = 300, 100


class RequestLog:
    """The latest requests: when they ended, how long they took, how many rows they had."""

    def __init__(self) -> None:
        self.requests = self.failed = self.rows = 0
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=RECORDED)

    def add(self, seconds: float, rows: int, failed: bool) -> None:
        """Record a request."""
        self.requests += 1
        self.failed += failed
        self.rows += rows
        self._recent.append((time.monotonic(), seconds, rows))

    def summary(self) -> dict[str, Any]:
        """Return totals, and rate and latency of the last seconds."""
        now = time.monotonic()
        recent = [item for item in self._recent.copy() if now - item[0] < WINDOW_SECONDS]
        window = WINDOW_SECONDS if len(recent) < RECORDED else max(1e-3, now - recent[0][0])
        times = sorted(seconds for _, seconds, _ in recent)
        quantiles = {
            f"p{percent}": times[math.ceil(percent / 100 * len(times)) - 1] if times else None for percent in (50, 99)
        }
        rows = sum(rows for *_, rows in recent)
        rates = {"rate": len(recent) / window, "rows_rate": rows / window}
        return {"requests": self.requests, "failed": self.failed, "rows": self.rows, **rates, **quantiles}


def describe_model(store: ModelStore) -> dict[str, Any]:
    """Return the answer of /model: version, fields, certificate; and the bundle that was refused, if there is one."""
    served, refused = store.model, store.refused
    values: dict[str, Any] = {"version": None, "fields": []}
    if served is not None:
        manifest = served.bundle.manifest
        values = {name: manifest[name] for name in ("version", "fields", "certificate", "metadata", "created", "lpfs")}
        values |= {"label": served.encoder.schema.label, "tasks": list(served.encoder.schema.tasks)}
        values |= {"since": served.since, "load_seconds": served.load_seconds}
        values["reopened"] = sorted(served.optional())
    return {**values, "refused": refused and asdict(refused), "swaps": store.swaps}


class LivePage:
    """Snapshots for the page, one per second for all who watch."""

    def __init__(self, store: ModelStore, log: RequestLog) -> None:
        self._store, self._log = store, log
        self._state_file: Path = store.bundles.absolute().parent / DATABASE
        self._lock = anyio.Lock()
        self._time, self._snapshot, self._state = -math.inf, "", "null"

    async def snapshot(self) -> tuple[str, str]:
        """Return JSON of the model and the requests, and JSON of the state of the trainer, at most a second old."""
        async with self._lock:
            if time.monotonic() - self._time >= 0.9 * REFRESH_SECONDS:
                self._state = await anyio.to_thread.run_sync(self._read_state)
                live = {"now": time.time(), "model": describe_model(self._store), "serving": self._log.summary()}
                self._snapshot, self._time = json.dumps(live), time.monotonic()
            return self._snapshot, self._state

    def _read_state(self) -> str:
        """Return the state of the trainer; null without one, {"error": …} if it cannot be read."""
        if not self._state_file.is_file():
            return "null"
        reader = StateReader(self._state_file)
        try:
            records = reader.metrics(10 * MAX_POINTS)
            step = max(1, math.ceil(len(records) / MAX_POINTS))
            state: dict[str, Any] = {"summary": reader.summary(), "metrics": list(reversed(records[::-1][::step]))}
            state |= {"changes": reader.changes(MAX_EVENTS), "alarms": reader.alarms(MAX_EVENTS)}
            return json.dumps(state, allow_nan=False)
        except (LpfsError, OSError, ValueError, LookupError, TypeError) as error:
            return json.dumps({"error": str(error)[:300]})
