"""Files of a log that are on an object store, read where they are.

Places that are not on this machine: what is a URL, and the file system it is on (through fsspec).
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from lpfs.errors import DataError, MissingPackageError

URL = re.compile(r"^([a-z][a-z0-9+.\-]+):(/+)(.*)$")


def as_url(place: Any) -> str | None:
    """Return the URL that a place is, or None for a path; ``pathlib`` takes a slash away, which is put back.

    >>> url_of("s3://logs/day_0"), url_of("s3:/logs/day_0"), url_of("logs/day_0")
    ('s3://logs/day_0', 's3://logs/day_0', None)
    """
    if not isinstance(place, str | os.PathLike):
        return None
    text = os.fspath(place)
    found = URL.match(text) if isinstance(text, str) else None
    if found is None or (found[2] == "/" and os.path.exists(text)):
        return None
    slashes = "///" if found[1] in ("file", "local") else "//"
    return f"{found[1]}:{slashes}{found[3].rstrip('/')}"


def absolute_path_or_url(place: str) -> str:
    """Return a path from the root, and a URL as it is."""
    return as_url(place) or os.path.abspath(place)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path on it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackageError(
            f"{url}: object stores need fsspec; install: pip install 'lpfs[fsspec]'"
        ) from None
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(f"{url}: {error}") from None
    except ValueError as error:
        raise DataError(f"{url}: no such kind of place ({error})") from None
    return system, str(path).rstrip("/")


@contextmanager
def convert_remote_errors(url: str) -> Iterator[None]:
    """Turn failures of an object store, whose errors are of many kinds, into a DataError that names the place."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{url}: there is nothing") from None
    except (DataError, MissingPackageError):
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be reached: {str(error)[:200] or type(error).__name__}") from error


def cache_dir() -> Path:
    """Return the folder for what is fetched: $LPFS_CACHE, or .cache/lpfs in the home folder."""
    given = os.environ.get("LPFS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "lpfs"


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL; answers as a ``Path`` does where the readers of a log ask."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return posixpath.basename(self.url)

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return posixpath.splitext(self.name)[1]

    @cached_property
    def _size(self) -> int:
        system, path = file_system(self.url)
        with convert_remote_errors(self.url):
            return int(system.size(path))

    def stat(self) -> Any:
        """Return the size, as ``st_size``."""
        return SimpleNamespace(st_size=self._size)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading; parts are fetched as they are read."""
        system, path = file_system(self.url)
        with convert_remote_errors(self.url):
            opened: BinaryIO = system.open(path, mode)
            return opened


LogFile = Path | RemoteFile


def fetch_to_local(file: LogFile) -> Path:
    """Return the path of a file, fetched first where it is remote; a reader that jumps about needs it near."""
    if isinstance(file, Path):
        return file
    mark = hashlib.sha256(f"{file.url} {file.stat().st_size}".encode()).hexdigest()[:32]
    path = cache_dir() / "raw" / mark / file.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{uuid.uuid4().hex}")
        system, there = file_system(file.url)
        try:
            with convert_remote_errors(file.url):
                system.get_file(there, str(aside))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path


def list_remote_files(url: str) -> list[RemoteFile]:
    """Return the file at a URL, all in a folder, or those that match a pattern."""
    system, path = file_system(url)
    with convert_remote_errors(url):
        if any(mark in path for mark in "*?["):
            found = [each for each in system.glob(path) if system.isfile(each)]
        elif system.isdir(path):
            found = [str(each) for each in system.ls(path, detail=False) if system.isfile(each)]
        else:
            found = [path] if system.exists(path) else []
    if not found:
        raise DataError(f"{url}: there is no such file or folder, and no file matches it as a pattern")
    return [RemoteFile(str(system.unstrip_protocol(each))) for each in found]
