"""Locks on work, so that several processes or machines can share the directory of a comparison.

A lock is a file that only one process can create. Its owner updates the time of the file regularly. A lock that
was not updated for a while, or whose process no longer exists on this machine, is stale and is taken over. Results
are written atomically under a name that depends on their content, so work that is done twice only costs time.

``filelock.SoftFileLease`` is not used: it needs a newer filelock than torch asks for, and it takes over a lock of
another machine only after this process has watched it for the whole lease.
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

HEARTBEAT_SECONDS = 20.0  # between two updates of a lock
STALE_SECONDS = 300.0  # without an update, after which a lock is stale


class LockedError(Exception):
    """Another process does this work."""


class WorkLocks:
    """The locks in a directory, and those that this process owns."""

    def __init__(
        self, directory: Path, *, heartbeat: float = HEARTBEAT_SECONDS, stale_after: float = STALE_SECONDS
    ) -> None:
        self.directory, self.heartbeat, self.stale_after = directory, heartbeat, stale_after
        self.owned: set[Path] = set()
        self._stop: threading.Event | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def acquire(self, name: str) -> Iterator[None]:
        """Own a lock while the block runs; raise :class:`LockedError` if another process owns it."""
        path = self.directory / f"{name}.lock"
        if not (self._create(path) or (self._remove_stale(path) and self._create(path))):
            raise LockedError(name)
        self._start_heartbeat(path)
        try:
            yield
        finally:
            self._release(path)

    def _create(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump({"machine": machine_id(), "pid": os.getpid(), "host": socket.gethostname()}, file)
        return True

    def _remove_stale(self, path: Path) -> bool:
        """Remove a stale lock; one process at a time, so that a new lock of another process is not removed."""
        guard = path.with_suffix(".guard")
        if not self._create(guard):
            if self._is_old(guard):
                guard.unlink(missing_ok=True)
            return False
        try:
            stale = self._is_stale(path)
            if stale:
                path.unlink(missing_ok=True)
            return stale
        finally:
            guard.unlink(missing_ok=True)

    def _is_stale(self, path: Path) -> bool:
        try:
            owner = json.loads(path.read_text())
            if owner["machine"] == machine_id() and not process_exists(owner["pid"]):
                return True
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError):
            pass  # being written, or damaged: its age decides
        return self._is_old(path)

    def _is_old(self, path: Path) -> bool:
        """Return whether a file was not updated for a while, by the clock of the file system."""
        probe = self.directory / f".{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime > self.stale_after
        except FileNotFoundError:
            return True
        finally:
            probe.unlink()

    def _start_heartbeat(self, path: Path) -> None:
        self.owned.add(path)
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._update_locks, args=(self._stop,), daemon=True).start()

    def _release(self, path: Path) -> None:
        self.owned.discard(path)
        path.unlink(missing_ok=True)
        if not self.owned and self._stop is not None:
            self._stop.set()
            self._stop = None

    def _update_locks(self, stop: threading.Event) -> None:
        while not stop.wait(self.heartbeat):
            for path in list(self.owned):
                with suppress(OSError):
                    os.utime(path)


def machine_id() -> str:
    """Return text that distinguishes this machine, and this container on it, from others."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_exists(pid: int) -> bool:
    """Return whether this machine has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
