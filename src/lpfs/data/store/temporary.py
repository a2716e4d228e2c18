"""A temporary folder beside its target: renamed into place at the end, removed otherwise."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from lpfs._fileio import fsync_path
from lpfs.errors import DataError

try:
    import fcntl
except ImportError:  # not a POSIX system: leftovers of killed runs stay, nothing else changes
    fcntl = None  # type: ignore[assignment]

GRACE = 60.0  # seconds between making a folder and locking it are certainly fewer


class Workplace:
    """The folder a writer fills, on the same disk as ``out`` so that one rename ends the work.

    The folder is locked while its writer lives. A killed writer leaves its folder behind, without the lock:
    the next writer to the same target removes it.
    """

    def __init__(self, out: Path, *, replace: bool = False) -> None:
        self.out, self.replace = out, replace
        check_target(out, replace=replace)
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix(out), suffix=".tmp", dir=out.parent))
        self._lock = lock(self.folder)

    def commit(self) -> None:
        """Put the folder in its place; what was there before is removed after that."""
        check_target(self.out, replace=self.replace)
        self.folder.chmod(0o777 & ~umask())
        old = None
        if self.out.exists():
            old = Path(tempfile.mkdtemp(prefix=prefix(self.out), suffix=".tmp", dir=self.out.parent))
            self.out.rename(old / "old")
        self.folder.rename(self.out)
        fsync_path(self.out.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder if it is still there, and let go of the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_target(out: Path, *, replace: bool) -> None:
    """Refuse a target that holds anything, except a Dataset that may be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise DataError(f"{out} exists and is not a folder; choose another place")
    names = {path.name for path in out.iterdir()}
    if names and not replace:
        raise DataError(
            f"{out} exists and is not empty; choose another place, or replace it (--replace, replace=True)"
        )
    if names and not names & {"dataset.json", "truth.json"}:
        raise DataError(f"{out} holds something else than a Dataset and is left alone; choose another place")


def prefix(out: Path) -> str:
    """How the names of temporary folders for ``out`` begin."""
    return f".{out.name[:80]}.lpfs-"


def lock(folder: Path) -> int | None:
    """Lock a folder until the process ends; None where it is locked already, or cannot be."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def sweep(out: Path) -> None:
    """Remove what killed writers to the same target left behind."""
    for path in out.parent.iterdir():
        if not (path.name.startswith(prefix(out)) and path.name.endswith(".tmp") and path.is_dir()):
            continue
        if time.time() - path.stat().st_mtime < GRACE:
            continue
        handle = lock(path)
        if handle is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


def umask() -> int:
    """Return the permissions mask of the process."""
    value = os.umask(0)
    os.umask(value)
    return value
