"""Locks between processes: one process at a time writes to a directory, or does one piece of shared work.

A lock is ``flock`` on a file, so the kernel releases it when its process ends, even by ``kill -9``. It also works
between machines that share a file system with ``flock``, such as NFS. On other file systems nothing is locked.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lpfs.errors import LockedError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.5  # between two attempts to get a lock


class FileLock:
    """Hold the lock of a file until :meth:`release`, the end of a ``with`` block, or the end of the process.

    The file names its holder and is removed by :meth:`release`, and so is its directory if it was made for the lock
    and is empty. A file without a holder is what a killed process leaves; it locks nothing.

    Args:
        path: the file.
        subject: what is locked, for the message of :class:`LockedError`.
        on_wait: if given, called once if another process holds the lock, which is then waited for.
    """

    def __init__(self, path: Path, subject: object, on_wait: Callable[[], None] | None = None) -> None:
        self.path, self.is_exclusive, self._descriptor = path, False, -1
        self._made_directory = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        while not self._acquire():
            if on_wait is None:
                raise LockedError(
                    f"{subject} is in use by another lpfs process{_describe_holder(path)}; wait until it ends, or "
                    "choose another directory"
                )
            on_wait()
            on_wait = _do_nothing
            time.sleep(POLL_SECONDS)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and release the lock. Safe to call twice."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self.path.unlink()  # first: another process could lock the file between release and removal
            os.close(self._descriptor)
            self._descriptor = -1
            if self._made_directory:
                with suppress(OSError):  # it is not empty
                    self.path.parent.rmdir()

    def _acquire(self) -> bool:
        """Return whether this process holds the lock now."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            self.is_exclusive = _flock(descriptor)
            is_current = os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except (BlockingIOError, FileNotFoundError) as error:  # held; or removed by its holder just now
            os.close(descriptor)
            return isinstance(error, FileNotFoundError) and self._acquire()
        if not is_current:
            os.close(descriptor)
            return self._acquire()
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder).encode())
        self._descriptor = descriptor
        return True


def _flock(descriptor: int) -> bool:
    """Lock a file; return False if its file system has no locks. Raise BlockingIOError if it is locked already."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return " (pid {pid:d} on {host!a:.80}, since {started!a:.40})".format(**holder).replace("'", "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # released just now, or not written yet
        return ""


def _do_nothing() -> None:
    pass
