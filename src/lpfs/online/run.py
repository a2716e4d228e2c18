"""The loop of ``lpfs online``: poll, filter, encode, predict, learn, commit, publish."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from lpfs._console import Console
from lpfs._validation import check_int, check_options
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.data.reencode import Like
from lpfs.errors import InputError
from lpfs.online import bundle
from lpfs.online.drift import DriftMonitor
from lpfs.online.gates import Decision
from lpfs.online.learner import LearnerSettings, OnlineLearner
from lpfs.online.source import Events, EventSource, Malformed
from lpfs.online.state import BUNDLES, Commit, StateStore
from lpfs.train.intervals import auc_interval
from lpfs.train.metrics import calibration, logloss, row_losses

SAMPLES = 32  # raw rows that are stored in a bundle and checked by the server
MIN_TIMES = 3  # of a batch, below which its median is not used
POLL_SECONDS = 0.2  # wait after a poll without events


@dataclass(frozen=True)
class OnlineSettings:
    """Settings of a run; all of them are fixed for its whole life."""

    learner: LearnerSettings = field(default_factory=LearnerSettings)  # model, optimizer, gates
    batch: int = 1024  # events per training step
    commit_every: int = 40  # batches per commit; metrics, alarms and the publication follow commits
    publish_every: int = 5  # commits between two bundles; a changed selection is published at once. 0: no bundles
    keep_bundles: int = 5  # bundles that are kept
    key: str | None = None  # column that identifies an event; a duplicate has the key of one of the last ``window``
    window: int = 100_000
    time: str | None = None  # column with the time of an event: a number, a date, or text of ISO 8601
    lateness: float | None = None  # an event this much (seconds, or the unit of numbers) before the median is late

    def __post_init__(self) -> None:
        check_options(self, count=("commit_every", "keep_bundles", "window"))
        check_int("batch", self.batch, 2)
        check_int("publish_every", self.publish_every, 0)
        if (self.time is None) != (self.lateness is None):
            raise InputError("give time and lateness together: the column, and how late an event may be")


@dataclass(frozen=True)
class OnlineResult:
    """What a run has done so far, also before it was resumed."""

    rows: int
    learned: int
    refused: dict[str, int]
    commits: int
    kept: tuple[str, ...]


class EventFilter:
    """Finds duplicate and late events; remembers the keys of the last ``window`` accepted ones."""

    def __init__(self, settings: OnlineSettings) -> None:
        self.settings = settings
        self.keys: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self.latest = -math.inf  # the largest median of the times of a batch: one wrong clock does not move it

    def check(self, keys: Sequence[Any], times: Sequence[Any]) -> list[str]:
        """Return for each event why it is refused; an empty text if it is accepted."""
        reasons, codes = [""] * len(keys), set[int]()
        for at, key in enumerate(keys if self.settings.key is not None else ()):
            code = key_code(key)
            if key is None:
                reasons[at] = f"malformed: the key {self.settings.key!r} is missing"
            elif code in self.keys or code in codes:
                reasons[at] = f"duplicate: the key {key!r} was seen before"
            codes.add(code)
        if self.settings.lateness is not None:
            seconds = [parse_time(value) for value in times]
            known = [value for value, reason in zip(seconds, reasons, strict=True) if value is not None and not reason]
            if len(known) >= MIN_TIMES:
                self.latest = max(self.latest, statistics.median_low(known))
            for at, value in enumerate(seconds):
                reasons[at] = reasons[at] or self._check_time(value, times[at], self.settings.lateness)
        return reasons

    def _check_time(self, seconds: float | None, value: Any, lateness: float) -> str:
        if seconds is None:
            return f"malformed: the time {value!r:.60} is no date, finite number or text of ISO 8601"
        is_late = seconds < self.latest - lateness
        return f"late: by {self.latest - seconds:g}, at most {lateness:g} is allowed" if is_late else ""

    def remember(self, keys: Iterable[Any]) -> None:
        """Add the keys of accepted events; forget the oldest ones."""
        self.keys.update(dict.fromkeys(map(key_code, keys)))
        while len(self.keys) > self.settings.window:
            self.keys.popitem(last=False)

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        return {"keys": torch.tensor(list(self.keys), dtype=torch.int64), "latest": self.latest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.keys, self.latest = OrderedDict.fromkeys(state["keys"].tolist()), state["latest"]


def parse_time(value: Any) -> float | None:
    """Return the time of an event in seconds; None if it is no date, finite number or text of ISO 8601."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        seconds = value.timestamp() if isinstance(value, datetime) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


class OnlineTrainer:
    """Trains on a source and commits; ``run`` returns when the source is idle, or never.

    Args:
        source: where events come from.
        run: the run directory; an existing run is continued from its last commit.
        like: the Dataset whose encoding is used, with the label.
        settings: see :class:`OnlineSettings`.
        opened: fields that are open at the start of a new run; None: all.
        console: for messages.
    """

    def __init__(
        self,
        source: EventSource,
        run: str | os.PathLike[str],
        like: Like,
        settings: OnlineSettings,
        *,
        opened: list[str] | None = None,
        console: Console | None = None,
    ) -> None:
        self.source, self.settings, self.console = source, settings, console or Console()
        self.encoder = RawRowEncoder(like)
        self.learner = OnlineLearner(self.encoder.schema, settings.learner, opened)  # checks the settings
        self.drift = DriftMonitor(self.encoder.schema)
        self.filter = EventFilter(settings)
        fingerprint = self.encoder.like.fingerprint
        self.store = StateStore(run, {"settings": asdict(settings), "encoding": fingerprint, "opened": opened})
        self.bundles = Path(run) / BUNDLES
        self.rows = self.learned = 0
        self.refused: dict[str, int] = {}
        self.samples = "[]"
        self._published = self.learner.kept
        try:
            self._resume()
        except BaseException:
            self.store.close()
            raise

    def _resume(self) -> None:
        commit = self.store.load()
        if commit is not None:
            state = commit.state
            self.learner.load(state["learner"])
            self.drift.load(state["drift"])
            self.filter.load(state["filter"])
            self.rows, self.learned, self.samples = commit.rows, state["learned"], state["samples"]
            self.refused, self._published = dict(state["refused"]), tuple(state["published"])
        self._start_window()
        self.source.seek(None if commit is None else commit.position)
        if commit is not None and commit.publish:
            current = bundle.current(self.bundles)
            if current is None or current.manifest["metadata"].get("rows") != self.rows:
                self._publish()

    def _start_window(self) -> None:
        self._logits: list[Any] = []
        self._labels: list[Any] = []
        self._records: dict[str, list[dict[str, Any]]] = {"metrics": [], "changes": [], "alarms": []}
        self._window_row, self._window_time, self._window_batches = self.rows, time.monotonic(), 0

    def run(self, *, idle_seconds: float | None = None, max_rows: int | None = None) -> OnlineResult:
        """Train until the source has had no events for ``idle_seconds``, or ``max_rows`` were read.

        The last, incomplete batch is learned when the source is idle; other batches have exactly ``batch`` events,
        so that the result does not depend on when events arrive.
        """
        try:
            while max_rows is None or self.rows < max_rows:
                events = self._collect(idle_seconds)
                if events is None:
                    break
                self.process(events)
                if self._window_batches >= self.settings.commit_every:
                    self.commit()
            if self._window_batches:
                self.commit()
        finally:
            self.store.close()
        return OnlineResult(self.rows, self.learned, self.refused, self.store.last_commit, self.learner.kept)

    def _collect(self, idle_seconds: float | None) -> Events | None:
        """Return a batch of events; None if nothing is left."""
        pieces: list[Events] = []
        missing, last = self.settings.batch, time.monotonic()
        while missing:
            events = self.source.poll(missing)
            if len(events):
                pieces.append(events)
                missing -= len(events)
                last = time.monotonic()
            elif idle_seconds is not None and time.monotonic() - last >= idle_seconds:
                break
            else:
                time.sleep(POLL_SECONDS if idle_seconds is None else min(POLL_SECONDS, max(0.001, idle_seconds / 4)))
        return join_events(pieces) if pieces else None

    def process(self, events: Events) -> None:
        """Learn from one batch of events; refused ones become dead letters."""
        first, settings = self.rows, self.settings
        self.rows += len(events)
        self._window_batches += 1
        keys = _column(events, settings.key)
        reasons = self.filter.check(keys, _column(events, settings.time))
        if not isinstance(events, pl.DataFrame):
            self.encoder.build_lookup()  # halves the time of rows that are no table
            for at, event in enumerate(events):
                if isinstance(event, Malformed):
                    reasons[at] = f"malformed: {event.reason}"
        positions = [at for at, reason in enumerate(reasons) if not reason]
        rows: Any = events
        if len(positions) < len(events):
            rows = events[positions] if isinstance(events, pl.DataFrame) else [events[at] for at in positions]
        encoded = self.encoder.encode(rows, labelled=True) if positions else None
        for refused in encoded.refused if encoded else ():
            reasons[positions[refused.row]] = f"malformed: {refused.field}: {refused.reason}"
        for at, reason in enumerate(reasons):
            if reason:
                kind, _, text = reason.partition(": ")
                self.refused[kind] = self.refused.get(kind, 0) + 1
                self.store.write_letter({"row": first + at, "kind": kind, "reason": text, "event": _row(events, at)})
        if encoded is None or not len(encoded.batch):
            return
        accepted = [positions[at] for at in encoded.accepted.tolist()]
        if settings.key is not None:
            self.filter.remember(keys[at] for at in accepted)
        if self._window_batches == 1:
            self.samples = json.dumps([_row(events, at) for at in accepted[:SAMPLES]], default=str)
        before = self.learner.kept
        progress = self.learner.learn(encoded.batch)
        self.learned += len(encoded.batch)
        self._logits.append(progress.logits)
        self._labels.append(progress.labels)
        loss = float(row_losses(progress.logits, progress.labels).mean())
        alarm = self.drift.add(encoded.batch, encoded.unseen, progress.worth, loss, first)
        if alarm is not None:
            self._records["alarms"].append({"rows": self.rows, **asdict(alarm)})
        self._log_decisions(progress.decisions, set(before))

    def _log_decisions(self, decisions: Sequence[Decision], selected: set[str]) -> None:
        for decision in decisions:
            before, evidence = sorted(selected), asdict(decision.evidence)
            selected ^= {decision.field}
            change = {**evidence, "tested": evidence["rows"], "rows": self.rows, "position": self.source.position()}
            change |= {"field": decision.field, "action": decision.action, "before": before, "after": sorted(selected)}
            self._records["changes"].append(change)
            self.console.message(
                f"row {self.rows:,}: {decision.action} {decision.field!r}, gain {evidence['gain']:.5f} "
                f"[{evidence['low']:.5f}, {evidence['high']:.5f}], {len(selected)} fields"
            )

    def commit(self) -> None:
        """Close the window: metrics and alarms, one commit, and a bundle if it is due."""
        metrics, records = self._metrics(), self._records
        records["metrics"] = [{"rows": self.rows, **metrics}] if metrics else []
        alarms = self.drift.close_window(self._window_row)
        records["alarms"] += [{"rows": self.rows, **asdict(alarm)} for alarm in alarms]
        due = self.settings.publish_every
        changed = self.learner.kept != self._published or self.store.last_commit == 0
        publish = bool(due and self.samples != "[]" and (changed or (self.store.last_commit + 1) % due == 0))
        if publish:
            self._published = self.learner.kept
        seconds = max(time.monotonic() - self._window_time, 1e-9)
        state = {
            **{"learner": self.learner.state(), "drift": self.drift.state(), "filter": self.filter.state()},
            **{"learned": self.learned, "refused": self.refused, "samples": self.samples},
            "published": list(self._published),
        }
        rate, lag = (self.rows - self._window_row) / seconds, self.source.lag()
        position, kept = self.source.position(), self.learner.kept
        self.store.commit(Commit(self.rows, position, state, kept, publish, rate, lag, records))
        for alarm in records["alarms"]:
            self.console.message(f"row {self.rows:,}: drift of {alarm['field'] or 'the model'}: {alarm['message']}")
        if metrics and metrics["auc"] is not None:
            self.console.message(
                f"row {self.rows:,}: AUC {metrics['auc']:.4f}, logloss {metrics['logloss']:.4f}, "
                f"{len(self.learner.kept)} fields, {rate:,.0f} rows/s"
            )
        self._start_window()
        if publish:
            self._publish()

    def _metrics(self) -> dict[str, Any] | None:
        """Return the progressive validation of the window."""
        if not self._logits:
            return None
        logits, labels = np.concatenate(self._logits), np.concatenate(self._labels)
        interval = auc_interval(logits, labels)
        auc: dict[str, Any] = {"auc": interval.value, "low": interval.low, "high": interval.high}
        auc = auc if math.isfinite(interval.value) else dict.fromkeys(auc)  # all labels are equal
        return {**auc, "logloss": logloss(logits, labels), "calibration": calibration(logits, labels)}

    def _publish(self) -> None:
        rows = json.loads(self.samples, parse_constant=lambda _: None)  # NaN is a missing value
        pruned = self.learner.pruned(self.encoder.encode(rows).batch)
        published = bundle.publish(
            self.bundles,
            pruned.model,  # type: ignore[arg-type]
            self.encoder,  # of all fields: it is the same in all bundles, and a server reads it once
            sample_rows=rows,
            certificate=pruned.certificate,
            metadata={"rows": self.rows, "commit": self.store.last_commit, "position": self.source.position()},
            keep=self.settings.keep_bundles,
        )
        self.console.message(
            f"row {self.rows:,}: published bundle {published.version} with {len(published.fields)} fields"
        )


def join_events(pieces: list[Events]) -> Events:
    """Return pieces of a batch as one; tables are joined if they have the same columns."""
    if len(pieces) == 1:
        return pieces[0]
    tables = [piece for piece in pieces if isinstance(piece, pl.DataFrame)]
    if len(tables) == len(pieces) and all(table.schema == tables[0].schema for table in tables):
        return pl.concat(tables)
    return [event for piece in pieces for event in (piece.to_dicts() if isinstance(piece, pl.DataFrame) else piece)]


def key_code(key: Any) -> int:
    """Return a 64-bit code of a key: an integer itself, of other values a hash."""
    if type(key) is int and -(2**62) < key < 2**62:
        return key
    digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _column(events: Events, name: str | None) -> list[Any]:
    if isinstance(events, pl.DataFrame):
        return events[name].to_list() if name in events.columns else [None] * len(events)
    return [None if name is None or isinstance(event, Malformed) else event.get(name) for event in events]


def _row(events: Events, at: int) -> Any:
    if isinstance(events, pl.DataFrame):
        return events.row(at, named=True)
    event = events[at]
    return event.text if isinstance(event, Malformed) else event
