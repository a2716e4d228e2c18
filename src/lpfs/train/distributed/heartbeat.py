"""Heartbeat: detects ranks that are dead or hang, so that errors name them and no rank waits forever.

A thread of every rank writes a heartbeat into the shared store about once per second, with the number of
collectives that the main thread has entered and its current activity, and reads those of the others. A rank
whose heartbeat does not change is dead or stopped; a rank with heartbeats that does not enter a collective
hangs. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from typing import Any

from torch._C._distributed_c10d import Store

from lpfs.errors import RankError

BEATS_PER_LIMIT = 60  # heartbeats within the limit
MANY_RANKS = 64  # number of ranks above which heartbeats are less frequent, because every rank reads all
NO_BEAT = "0 0 starting"  # heartbeat of a rank that has not written any
INTERRUPTED = "KeyboardInterrupt"  # start of the end message of a rank that was asked to stop
MISSED_BEATS = 5  # missing heartbeats after which a rank is dead when a connection broke
GRACE = 0.3  # fraction of the limit after which a rank stuck in a collective ends its process
END_WAIT = 3.0  # seconds that rank 0 waits after an error for the error messages of the others
ADVICE = "The last checkpoint is intact: start again with --resume, or let torchrun restart with --max-restarts"


class Heartbeat:
    """The heartbeats of one rank, and what it knows about the others; one missing for ``limit`` seconds is reported."""

    def __init__(self, store: Store, rank: int, world: int, limit: float) -> None:
        # one connection for each thread, because a request blocks its connection
        self.store: Any = store.clone()  # type: ignore[attr-defined]
        self._beat_store: Any = store.clone()  # type: ignore[attr-defined]
        self.rank, self.world, self.limit = rank, world, limit
        self.pause = limit / BEATS_PER_LIMIT * max(1.0, world / MANY_RANKS)
        self.collectives, self.activity, self.since = 0, "starting", time.monotonic()
        self._in_collective, self._beats = False, 0
        self._last_beats: dict[int, tuple[str, float]] = {}  # rank -> heartbeat, local time
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lpfs-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat and start the thread."""
        self._last_beats = {rank: (NO_BEAT, time.monotonic()) for rank in range(self.world) if rank != self.rank}
        self._write_beat()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.pause)

    def enter_collective(self, purpose: str) -> None:
        """Record that this rank enters a collective."""
        self.collectives += 1
        self.activity, self.since, self._in_collective = purpose, time.monotonic(), True

    def set_activity(self, activity: str) -> None:
        """Record an activity outside of collectives, without a time limit: working, or waiting for rank 0."""
        self.activity, self.since, self._in_collective = activity, time.monotonic(), False

    def announce_end(self) -> None:
        """Record that this rank is done; rank 0, whose process may host the store, waits for all ranks."""
        self.store.set(f"done/{self.rank}", "1")
        self.wait_for_peers("done", self.limit)

    def report_error(self, error: BaseException) -> bool:
        """Store the error that ends this rank; return whether it is the first rank with this error."""
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            if not isinstance(error, RankError):  # a RankError is caused by another rank
                self.store.set(f"ended/{self.rank}", text)
            return bool(self.store.add(f"reported/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1)
        return True

    def wait_for_peers(self, prefix: str = "ended", seconds: float = END_WAIT) -> None:
        """On rank 0, wait until every rank has set the key ``prefix/rank``; the store may end with its process."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and time.monotonic() < deadline:
                if self.store.check([f"{prefix}/{rank}" for rank in range(self.world)]):
                    return
                time.sleep(self.pause / 10)

    def check_alive(self, rank: int, purpose: str) -> None:
        """Raise RuntimeError if a rank has ended or sends no heartbeats."""
        seconds = self.silent_seconds().get(rank, 0.0)
        if seconds > self.limit:
            raise RuntimeError(f"no heartbeat of rank {rank} for {seconds:.0f} s ({purpose})")
        if self.store.check([f"ended/{rank}"]):
            raise RuntimeError(f"rank {rank} has ended ({purpose})")

    def explain_interrupt(self, error: BaseException) -> BaseException:
        """Return the error to raise after an interrupted collective; it names the rank that is dead or hangs."""
        if isinstance(error, RankError):
            return error
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted:
            self.report_error(error)
        cause = self._find_cause()
        if not cause and interrupted:
            return error  # no rank is missing: the user stops the run
        text = cause or f"the ranks lost their connection ({self.activity}: {str(error).splitlines()[0][:200]})"
        with contextlib.suppress(RuntimeError):
            self.store.set("lost", text)  # so that all ranks report the same cause
        return RankError(f"{text}. {ADVICE}")

    def _find_cause(self) -> str:
        """Return which rank ended, is dead or hangs; empty if there is none."""
        deadline = time.monotonic() + MISSED_BEATS * self.pause
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # find the cause even if this rank is asked to stop
                try:
                    cause = self._describe_failed_ranks(final=time.monotonic() > deadline)
                except RuntimeError:
                    return "rank 0, whose machine hosts the store of the ranks, is gone"
                if cause or time.monotonic() > deadline:
                    return cause
                time.sleep(self.pause / 4)

    def _describe_failed_ranks(self, *, final: bool) -> str:
        lost = self._read("lost")
        if lost:
            return lost
        messages = {rank: self._read(f"ended/{rank}") for rank in range(self.world) if rank != self.rank}
        for rank, message in messages.items():
            if message and not message.startswith(INTERRUPTED):
                return f"rank {rank} ended: {message}"
        if not final:
            return ""
        silent = {rank: seconds for rank, seconds in self.silent_seconds().items() if not messages[rank]}
        dead = [rank for rank, seconds in silent.items() if seconds > (MISSED_BEATS - 1) * self.pause]
        if dead:
            seconds = max(silent[rank] for rank in dead)
            verb = "is" if len(dead) == 1 else "are"
            return f"{_name_ranks(dead)} {verb} dead or stopped: no heartbeat for {seconds:.0f} s"
        beats = {rank: beat.split(" ", 2) for rank, (beat, _) in list(self._last_beats.items())}
        late = [rank for rank, beat in beats.items() if int(beat[1]) < self.collectives and not messages[rank]]
        if not late:
            return ""
        _, last, activity = beats[late[0]]
        return (
            f"{_name_ranks(late)} did not enter collective {self.collectives} ({self.activity}) within "
            f"{time.monotonic() - self.since:.0f} s: alive, but hangs after collective {last} ({activity})"
        )

    def _read(self, key: str) -> str:
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def silent_seconds(self) -> dict[int, float]:
        """Return the seconds since the last heartbeat of every other rank."""
        now = time.monotonic()
        return {rank: now - changed for rank, (_, changed) in list(self._last_beats.items())}

    def _write_beat(self) -> None:
        self._beats += 1
        self._beat_store.set(f"beat/{self.rank}", f"{self._beats} {self.collectives} {self.activity}")

    def _beat(self) -> None:
        while not self._end.wait(self.pause):
            try:
                self._write_beat()
                for rank, (previous, _) in list(self._last_beats.items()):
                    key = f"beat/{rank}"
                    if previous != NO_BEAT or self._beat_store.check([key]):
                        beat = self._beat_store.get(key).decode()
                        if beat != previous:
                            self._last_beats[rank] = beat, time.monotonic()
            except RuntimeError:
                pass  # the store is gone; silent_seconds will show it
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the process if the main thread is stuck in a collective that no error interrupts."""
        stuck = self._in_collective and time.monotonic() - self.since > (1 + GRACE) * self.limit
        deserted = min(self.silent_seconds().values()) > (1 + 2 * GRACE) * self.limit
        if (stuck or deserted) and not self._end.is_set():
            error = self.explain_interrupt(RuntimeError("no answer"))
            print(f"lpfs: error: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
