"""Claims: who is doing what, so that several processes or machines can share a folder.

A claim is a file that only one can create. Its holder touches it now and then; one that was not touched for a
while, or whose process is gone from this machine, is stale and may be taken over. Results are written whole and
keyed by what they are of, so that work done twice, after a long sleep, costs time and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOUCH, STALE = 20.0, 300.0  # seconds


class LockedError(Exception):
    """Somebody else is doing it."""


class WorkLocks:
    """The claims in a folder, and those that this process holds."""

    def __init__(self, folder: Path, *, touch: float = TOUCH, stale: float = STALE) -> None:
        self.folder, self.touch, self.stale = folder, touch, stale
        self.held: set[Path] = set()
        self._end: threading.Event | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def acquire(self, name: str) -> Iterator[None]:
        """Within this block nobody else does it; raises :class:`BusyError` where somebody does already."""
        path = self.folder / f"{name}.claim"
        if not (self._create(path) or (self._clear(path) and self._create(path))):
            raise LockedError(name)
        self._hold(path)
        try:
            yield
        finally:
            self._let_go(path)

    def _create(self, path: Path) -> bool:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            json.dump({"machine": machine(), "pid": os.getpid(), "host": socket.gethostname()}, file)
        return True

    def _clear(self, path: Path) -> bool:
        """Remove a stale claim; one at a time, so that a fresh one that took its place is not removed."""
        guard = path.with_suffix(".guard")
        if not self._create(guard):
            if self._old(guard):
                guard.unlink(missing_ok=True)
            return False
        try:
            stale = self._stale(path)
            if stale:
                path.unlink(missing_ok=True)
            return stale
        finally:
            guard.unlink(missing_ok=True)

    def _stale(self, path: Path) -> bool:
        try:
            values = json.loads(path.read_text())
            if values["machine"] == machine() and not alive(values["pid"]):
                return True
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError):
            pass  # just being written, or damaged: its age decides
        return self._old(path)

    def _old(self, path: Path) -> bool:
        """Whether a file was not touched for a while, by the clock of the disk: machines may disagree on time."""
        probe = self.folder / f".{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime > self.stale
        except FileNotFoundError:
            return True
        finally:
            probe.unlink()

    def _hold(self, path: Path) -> None:
        self.held.add(path)
        if self._end is None:
            self._end = threading.Event()
            threading.Thread(target=self._keep_touching, args=(self._end,), daemon=True).start()

    def _let_go(self, path: Path) -> None:
        self.held.discard(path)
        path.unlink(missing_ok=True)
        if not self.held and self._end is not None:
            self._end.set()
            self._end = None

    def _keep_touching(self, end: threading.Event) -> None:
        while not end.wait(self.touch):
            for path in list(self.held):
                with suppress(OSError):
                    os.utime(path)


def machine() -> str:
    """Return what tells this machine, and this container on it, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
