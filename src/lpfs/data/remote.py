"""URLs, the fsspec file systems behind them, remote files of a log, and their local cache."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from lpfs._fileio import replace_atomic
from lpfs.errors import DataError, MissingPackageError

URL = re.compile(r"^([a-z][a-z0-9+.\-]+):(/+)(.*)$")


def as_url(path: Any) -> str | None:
    """Return a path as a URL, or None if it is a local path; restores the slash that ``pathlib`` removes.

    >>> as_url("s3://logs/day_0"), as_url("s3:/logs/day_0"), as_url("logs/day_0")
    ('s3://logs/day_0', 's3://logs/day_0', None)
    """
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    match = URL.match(text) if isinstance(text, str) else None
    if match is None or (match[2] == "/" and os.path.exists(text)):
        return None
    slashes = "///" if match[1] in ("file", "local") else "//"
    return f"{match[1]}:{slashes}{match[3].rstrip('/')}"


def absolute_path_or_url(path: str) -> str:
    """Return a local path as an absolute path, and a URL as it is."""
    return as_url(path) or os.path.abspath(path)


@contextmanager
def remote_access(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the fsspec file system of a URL and the path on it; convert its errors to a DataError with the URL."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackageError(f"{url}: object stores need fsspec; install: pip install 'lpfs[fsspec]'") from None
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(f"{url}: {error}") from None
    except ValueError as error:
        raise DataError(f"{url}: unknown kind of URL ({error})") from None
    try:
        yield system, str(path).rstrip("/")
    except FileNotFoundError:
        raise DataError(f"{url}: not found; check the URL") from None
    except (DataError, MissingPackageError):
        raise
    except Exception as error:  # the types of errors differ between object stores
        raise DataError(f"{url}: cannot be accessed: {str(error)[:200] or type(error).__name__}") from error


def cache_dir() -> Path:
    """Return the directory for downloaded files: $LPFS_CACHE, or .cache/lpfs in the home directory."""
    path = os.environ.get("LPFS_CACHE")
    return Path(path) if path else Path.home() / ".cache" / "lpfs"


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, with the attributes and methods of ``Path`` that the readers of a log use."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return posixpath.basename(self.url)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @cached_property
    def _size(self) -> int:
        with remote_access(self.url) as (system, path):
            return int(system.size(path))

    @cached_property
    def version(self) -> str:
        """Version of the file when it was first asked for."""
        return self.read_version()

    def read_version(self) -> str:
        """Return a text that changes when the file is replaced."""
        with remote_access(self.url) as (system, path):
            system.invalidate_cache(path)
            return str(system.ukey(path))

    def stat(self) -> Any:
        """Return the size, as ``st_size``."""
        return SimpleNamespace(st_size=self._size)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading; content is downloaded as it is read."""
        with remote_access(self.url) as (system, path):
            return cast(BinaryIO, system.open(path, mode))


LogFile = Path | RemoteFile


def fetch_to_local(file: LogFile) -> Path:
    """Return the local path of a file; a remote file is downloaded into the cache first, for random access."""
    if isinstance(file, Path):
        return file
    digest = hashlib.sha256(f"{file.url} {file.stat().st_size} {file.version}".encode()).hexdigest()[:32]
    path = cache_dir() / "raw" / digest / file.name
    if not path.exists():
        with replace_atomic(path) as temporary, remote_access(file.url) as (system, remote_path):
            system.get_file(remote_path, str(temporary))
            if file.read_version() != file.version:
                raise DataError(f"{file.url}: changed while it was read; try again when it is complete")
    return path


def list_remote_files(url: str) -> list[RemoteFile]:
    """Return the file at a URL, all files in a directory, or those that match a glob pattern."""
    with remote_access(url) as (system, path):
        if any(character in path for character in "*?["):
            paths = [match for match in system.glob(path) if system.isfile(match)]
        elif system.isdir(path):
            paths = [str(entry) for entry in system.ls(path, detail=False) if system.isfile(entry)]
        else:
            paths = [path] if system.exists(path) else []
    if not paths:
        raise DataError(f"{url}: no such file or directory, and no file matches it as a pattern")
    return [RemoteFile(str(system.unstrip_protocol(path))) for path in paths]
