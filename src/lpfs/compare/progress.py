"""What a comparison says while it works: what is done, what is left, and about how long."""

from __future__ import annotations

import time

from lpfs.compare.plan import Job
from lpfs.compare.store import Record
from lpfs.pipeline.tell import Teller


class Progress:
    """A line a run; the estimate counts what other processes do too."""

    def __init__(self, tell: Teller) -> None:
        self.tell, self.total, self.left, self.start, self.said = tell, 0, 0, 0.0, False

    def begin(self, total: int, left: int) -> None:
        """Say how much there is to do."""
        self.total, self.left, self.start = total, left, time.monotonic()
        done = f", {total - left} of them done already" if left < total else ""
        self.tell.say(f"{total} runs{done}")

    def done(self, job: Job, found: Record, seconds: float, left: int) -> None:
        """Say what a run gave."""
        self.said = False
        if found["status"] == "failed":
            what = f"failed: {found['reason']}"
        else:
            tried = found.get("tried", [])
            settings = f", best of {len(tried)} settings" if len(tried) > 1 else ""
            what = f"AUC {found['test']['auc']:.5f} with {len(found['kept'])} fields{settings}"
        rest = ""
        if left:
            rate = (self.left - left) / max(1e-9, time.monotonic() - self.start)
            rest = f"; about {duration(left / rate)} left" if rate > 0 else ""
        self.tell.say(f"[{self.total - left}/{self.total}] {job}: {what} ({seconds:.1f} s{rest})")

    def waiting(self, left: int) -> None:
        """Say, once, that the rest is being done elsewhere."""
        if not self.said:
            self.tell.say(f"{left} runs are being done by other processes: waiting for them")
            self.said = True


def duration(seconds: float) -> str:
    """Return a length of time in words.

    >>> duration(40), duration(400), duration(40_000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
