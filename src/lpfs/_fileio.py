"""Files that are complete or absent: atomic writes, fsync, checksums, JSON, staging directories."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lpfs.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

try:
    import fcntl
except ImportError:  # not a POSIX system: staging directories of killed processes are not removed
    fcntl = None  # type: ignore[assignment]

FSYNC_THREADS = 16
STALE_SECONDS = 60.0  # a younger staging directory may not be locked yet
CHECKSUM_BYTES = 1 << 20  # bytes of a file that one checksum covers
DATASET_FILES = ("dataset.json", "truth.json")
SPECIAL_FILES = {  # reading one of these fails or may wait forever
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "directory",
}


@contextmanager
def replace_atomic(path: Path, suffix: str = ".new") -> Iterator[Path]:
    """Yield the path of a hidden file, which is renamed to ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file for writing that replaces ``path`` when the block ends without an error."""
    with replace_atomic(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text; a reader sees the old or the new file, never a part. Make missing parent directories."""
    with open_atomic(path) as file:
        file.write(text.encode())


def write_json_atomic(path: Path, values: Any, *, allow_nan: bool = False) -> None:
    """Write JSON atomically; raise ValueError for NaN and infinity unless ``allow_nan`` is set."""
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=allow_nan, default=plain_value)
    write_text_atomic(path, text + "\n")


def write_array_atomic(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a NumPy array as ``.npy`` atomically."""
    import numpy as np

    with open_atomic(path) as file:
        np.save(file, array)


def read_json(path: Path) -> Any:
    """Return the values of a JSON file; None if the file does not exist. Raise ValueError for invalid JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON in place, neither atomic nor synced: for staging directories. ASCII, one line per key.

    Indented JSON of 10,000 fields takes ten times as long.
    """
    lines = (f"{json.dumps(str(key))}: {json.dumps(value)}" for key, value in values.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def plain_value(value: Any) -> Any:
    """Return a NumPy or torch scalar as a number and any other object as text: ``default`` of ``json.dumps``."""
    return value.item() if hasattr(value, "item") else str(value)


def check_regular_file(path: Path) -> None:
    """Raise DataError if a path is a pipe, a socket, a device or a directory; OSError if there is nothing."""
    kind = SPECIAL_FILES.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise DataError(f"{path} is a {kind}, not a regular file; write its content to a file, or name another file")


def safe_child(folder: Path, name: str) -> Path:
    """Return the path of a file below ``folder`` whose name comes from a file; raise DataError if it is elsewhere.

    The name is relative, with ``/`` between its parts; ``..``, absolute names, drive letters, backslashes and
    symbolic links that leave the folder are refused.
    """
    parts = name.split("/") if isinstance(name, str) else []
    is_plain = bool(parts) and all(part not in ("", ".", "..") and part.isprintable() for part in parts)
    if not is_plain or "\\" in name or ":" in name:
        raise DataError(
            f"{folder} names the file {str(name)[:200]!r}; only names of files inside the folder are allowed"
        )
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path} is a link that leaves {folder}; only files inside the folder are allowed")
    return path


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of each MiB of a file in hex, one after another, so that parts can be checked alone."""
    with path.open("rb") as file:
        checksums = [zlib.crc32(file.read(CHECKSUM_BYTES))]
        while block := file.read(CHECKSUM_BYTES):
            checksums.append(zlib.crc32(block))
    return "".join(f"{checksum:08x}" for checksum in checksums)


def json_checksum(values: Mapping[str, Any]) -> str:
    """Return the CRC-32 of JSON values in hex, independent of the order of their keys."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush everything below a directory to disk, several files at a time: first files, then directories."""
    paths = sorted(directory.rglob("*"), reverse=True)  # a directory comes after its content
    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        list(pool.map(fsync_path, (path for path in paths if not path.is_dir())))
        list(pool.map(fsync_path, (path for path in paths if path.is_dir())))


class StagingDirectory:
    """A temporary directory beside ``out`` that :meth:`commit` renames to ``out``.

    ``path`` is the directory to fill; a ``with`` block yields it, and commits it unless an error is raised. It is
    locked while its process lives. A killed process leaves it behind without the lock, and the next staging
    directory for the same ``out`` removes it.

    Args:
        out: the final directory.
        replace: whether ``out`` may exist and contain one of ``markers``.
        markers: files of which one must be in a directory that is replaced.
    """

    def __init__(self, out: Path, *, replace: bool = False, markers: Collection[str] = DATASET_FILES) -> None:
        self.out, self.replace, self.markers = out, replace, markers
        check_output_dir(out, replace=replace, markers=markers)
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_staging(out)
        self.path = self._make_directory()
        self._lock = _lock_dir(self.path)

    def _make_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=_staging_prefix(self.out), suffix=".tmp", dir=self.out.parent))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def commit(self) -> None:
        """Rename the directory to ``out``; what was there before is removed, or restored if this fails."""
        check_output_dir(self.out, replace=self.replace, markers=self.markers)
        umask = os.umask(0)
        os.umask(umask)
        self.path.chmod(0o777 & ~umask)
        old = self._make_directory() if self.out.exists() else None
        try:
            if old is not None:
                self.out.rename(old / "old")
            self.path.rename(self.out)
            fsync_path(self.out.parent)
        finally:
            if old is not None:
                if not self.out.exists():
                    (old / "old").rename(self.out)
                shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory if it still exists, and release the lock. Safe after :meth:`commit`."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_output_dir(out: Path, *, replace: bool, markers: Collection[str] = DATASET_FILES) -> None:
    """Raise DataError if ``out`` is not empty, unless it may be replaced and contains one of ``markers``."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise DataError(f"{out} exists and is not a directory; choose another path")
    names = {path.name for path in out.iterdir()}
    if names and not replace:
        raise DataError(f"{out} exists and is not empty; choose another path, or replace it (--replace, replace=True)")
    if names and not names & set(markers):
        raise DataError(f"{out} contains none of {', '.join(markers)} and is not replaced; choose another path")


def remove_stale_staging(out: Path) -> None:
    """Remove staging directories for ``out`` whose process was killed."""
    for path in out.parent.iterdir():
        if not (path.name.startswith(_staging_prefix(out)) and path.name.endswith(".tmp") and path.is_dir()):
            continue
        is_stale = time.time() - path.stat().st_mtime >= STALE_SECONDS
        if is_stale and (descriptor := _lock_dir(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _staging_prefix(out: Path) -> str:
    return f".{out.name[:80]}.lpfs-"


def _lock_dir(path: Path) -> int | None:
    """Lock a directory until the process ends; return None if it is locked already or cannot be locked."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
