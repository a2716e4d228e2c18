"""Watch: signs of life between ranks, so that one that dies or hangs is named and waited for no longer.

A thread of every rank writes into the shared store, about once a second, how many meetings its main thread has
come to and what it is doing, and reads what the others wrote. A rank whose sign does not change is dead or
stopped; one whose sign does change but that does not come to a meeting hangs. Clocks are never compared between
machines.
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

BEATS_PER_LIMIT = 60  # signs of life within the limit
MANY = 64  # ranks from which on they give signs more rarely: everyone reads everyone's
NOTHING = "0 0 starting"  # a sign of one that has not given any
STOPPED = "KeyboardInterrupt"  # how the word of a rank begins that was asked to end
MISSED_BEATS = 5  # signs that must be missing before a rank is called dead after a broken connection
GRACE = 0.3  # of the limit: after it a rank that no error frees from a collective ends itself
END_WAIT = 3.0  # seconds that rank 0 waits, after an error of its own, for the word of the others
ADVICE = (
    "The last checkpoint is intact: start again with --resume, or let torchrun do it by itself with --max-restarts"
)


class Heartbeat:
    """What one rank knows of the others' lives.

    Args:
        store: shared by all ranks.
        rank, world: who we are.
        limit: seconds after which one that is missing is given up.

    """

    def __init__(self, store: Store, rank: int, world: int, limit: float) -> None:
        # a connection of its own for the main thread, and one for the thread: a store waits for its answers
        self.store: Any = store.clone()  # type: ignore[attr-defined]
        self._signs: Any = store.clone()  # type: ignore[attr-defined]
        self.rank, self.world, self.limit = rank, world, limit
        self.pause = limit / BEATS_PER_LIMIT * max(1.0, world / MANY)
        self.meetings, self.doing, self.since = 0, "starting", time.monotonic()
        self._meets = False
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lpfs-watch", daemon=True)

    def begin(self) -> None:
        """Give the first sign, and go on giving them."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        self._seen = {rank: (NOTHING, time.monotonic()) for rank in others}
        self._sign()
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.pause)

    # ---------------------------------------------------------------------------------------- the main thread

    def enter_collective(self, what: str) -> None:
        """Say that this rank comes to a meeting."""
        self.meetings += 1
        self.doing, self.since, self._meets = what, time.monotonic(), True

    def waits(self, what: str) -> None:
        """Say that this rank waits for another one, for as long as it takes."""
        self.doing, self.since = what, time.monotonic()

    def leave_collective(self) -> None:
        """Say that the meeting is over."""
        self._meets = False
        self.doing, self.since = "working", time.monotonic()

    def announce_end(self) -> None:
        """Say that this rank is done; rank 0, in whose process the store may be, waits until all are."""
        self.store.set(f"done/{self.rank}", "1")
        latest = time.monotonic() + self.limit
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and time.monotonic() < latest:
                if self.store.check([f"done/{each}" for each in range(self.world)]):
                    return
                time.sleep(self.pause / 10)

    def report_error(self, error: BaseException) -> bool:
        """Leave word of why this rank ends; say whether no other has said the same."""
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            if not isinstance(error, RankError):  # who ends because of another is not the one to name
                self.store.set(f"ended/{self.rank}", text)
            return bool(self.store.add(f"told/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1)
        return True

    def wait_for_peers(self) -> None:
        """Give the others a moment to find the same error: the store with their words may end with rank 0."""
        latest = time.monotonic() + END_WAIT
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and time.monotonic() < latest:
                if self.store.check([f"ended/{each}" for each in range(self.world)]):
                    return
                time.sleep(self.pause / 10)

    def check_alive(self, rank: int, what: str) -> None:
        """Raise if a rank that is waited for gives no sign of life any more."""
        quiet = self.silence().get(rank, 0.0)
        if quiet > self.limit:
            raise RuntimeError(f"rank {rank} has been silent for {quiet:.0f} s ({what})")
        if self.store.check([f"ended/{rank}"]):
            raise RuntimeError(f"rank {rank} has ended ({what})")

    def explain_interrupt(self, error: BaseException) -> BaseException:
        """Return the error to raise after a meeting broke off: one that names the rank that is gone or hangs."""
        if isinstance(error, RankError):
            return error
        stopped = isinstance(error, KeyboardInterrupt)
        if stopped:
            self.report_error(error)
        found = self._blamed()
        if not found and stopped:
            return error  # nobody is missing: somebody wants us to stop
        text = found or f"the ranks lost each other while {self.doing} ({str(error).splitlines()[0][:200]})"
        with contextlib.suppress(RuntimeError):
            self.store.set("lost", text)  # so that all say the same
        return RankError(f"{text}. {ADVICE}")

    def _blamed(self) -> str:
        """Say who is missing, and how; empty if nobody is."""
        latest = time.monotonic() + MISSED_BEATS * self.pause
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # being asked to end is no reason not to say why
                try:
                    found = self._missing(final=time.monotonic() > latest)
                except RuntimeError:
                    return "rank 0, at whose machine the ranks meet, is gone"
                if found or time.monotonic() > latest:
                    return found
                time.sleep(self.pause / 4)

    def _missing(self, *, final: bool) -> str:
        if self.store.check(["lost"]):
            return str(self.store.get("lost").decode())
        words = {rank: self._word(rank) for rank in range(self.world) if rank != self.rank}
        for rank, word in words.items():
            if word and not word.startswith(STOPPED):
                return f"rank {rank} ended: {word}"
        if not final:
            return ""
        quiet = {rank: each for rank, each in self.silence().items() if not words[rank]}
        gone = [rank for rank, each in quiet.items() if each > (MISSED_BEATS - 1) * self.pause]
        if gone:
            what = "is dead or stopped" if len(gone) == 1 else "are dead or stopped"
            return f"{_named(gone)} {what}: no sign of life for {max(quiet[each] for each in gone):.0f} s"
        behind = {rank: sign.split(" ", 2) for rank, (sign, _) in list(self._seen.items())}
        late = [rank for rank, sign in behind.items() if int(sign[1]) < self.meetings and not words[rank]]
        if late:
            waited = time.monotonic() - self.since
            return (
                f"{_named(late)} did not come to meeting {self.meetings} ({self.doing}) within {waited:.0f} s: "
                f"alive, but hangs after meeting {behind[late[0]][1]} ({behind[late[0]][2]})"
            )
        return ""

    def _word(self, rank: int) -> str:
        """Return what a rank said when it ended; empty if it did not."""
        key = f"ended/{rank}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def silence(self) -> dict[int, float]:
        """Return for how many seconds every other rank has given no sign of life."""
        now = time.monotonic()
        return {rank: now - when for rank, (_, when) in list(self._seen.items())}

    # --------------------------------------------------------------------------------------------- the thread

    def _sign(self) -> None:
        self._beats += 1
        self._signs.set(f"sign/{self.rank}", f"{self._beats} {self.meetings} {self.doing}")

    def _beat(self) -> None:
        while not self._end.wait(self.pause):
            try:
                self._sign()
                for rank, (before, _) in list(self._seen.items()):
                    key = f"sign/{rank}"
                    if before != NOTHING or self._signs.check([key]):
                        sign = self._signs.get(key).decode()
                        if sign != before:
                            self._seen[rank] = sign, time.monotonic()
            except RuntimeError:
                pass  # the store is gone: the silence of all says so
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the process where its main thread cannot: in a collective that no error frees it from."""
        stuck = self._meets and time.monotonic() - self.since > (1 + GRACE) * self.limit
        deserted = min(self.silence().values()) > (1 + 2 * GRACE) * self.limit
        if (stuck or deserted) and not self._end.is_set():
            error = self.explain_interrupt(RuntimeError("no answer"))
            print(f"lpfs: error: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
