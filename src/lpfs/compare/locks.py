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
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HEARTBEAT_SECONDS = 20.0  # between two updates of a lock
STALE_SECONDS = 300.0  # without an update, after which a lock is stale
POLL_SECONDS = 0.5  # between two attempts to get a lock


class LockedError(Exception):
    """Another process does this work."""


class WorkLocks:
    """The locks in a directory, and those that this process owns."""

    def __init__(self, directory: Path, *, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.directory, self.heartbeat = directory, heartbeat
        self.owned: set[Path] = set()
        self._stop: threading.Event | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def acquire(self, name: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Own a lock while the block runs; raise :class:`LockedError` if another process owns it.

        With ``on_wait`` call that function once and wait for the other process instead.
        """
        path, waiting = self.directory / f"{name}.lock", False
        while not (self._create(path) or (self._remove_stale(path) and self._create(path))):
            if on_wait is None:
                raise LockedError(name)
            if not waiting:
                on_wait()
            waiting = True
            time.sleep(POLL_SECONDS)
        self.owned.add(path)
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._update_locks, args=(self._stop,), daemon=True).start()
        try:
            yield
        finally:
            self.owned.discard(path)
            path.unlink(missing_ok=True)
            if not self.owned:
                self._stop.set()
                self._stop = None

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
            stale = self._is_of_ended_process(path) or self._is_old(path)
            if stale:
                path.unlink(missing_ok=True)
            return stale
        finally:
            guard.unlink(missing_ok=True)

    def _is_of_ended_process(self, path: Path) -> bool:
        try:
            owner = json.loads(path.read_text())
            return bool(owner["machine"] == machine_id()) and not process_exists(owner["pid"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False  # removed, being written, or damaged: its age decides

    def _is_old(self, path: Path) -> bool:
        """Return whether a file was not updated for a while, by the clock of the file system."""
        probe = self.directory / f".{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            return True
        finally:
            probe.unlink()

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
        pass
    return True
