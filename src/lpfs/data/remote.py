"""Files of a log that are on an object store, read where they are."""

from __future__ import annotations

import hashlib
import posixpath
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from lpfs.data.urls import cache, file_system, reaching
from lpfs.errors import DataError


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
        with reaching(self.url):
            return int(system.size(path))

    def stat(self) -> Any:
        """Return the size, as ``st_size``."""
        return SimpleNamespace(st_size=self._size)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading; parts are fetched as they are read."""
        system, path = file_system(self.url)
        with reaching(self.url):
            opened: BinaryIO = system.open(path, mode)
            return opened


LogFile = Path | RemoteFile


def local(file: LogFile) -> Path:
    """Return the path of a file, fetched first where it is remote; a reader that jumps about needs it near."""
    if isinstance(file, Path):
        return file
    mark = hashlib.sha256(f"{file.url} {file.stat().st_size}".encode()).hexdigest()[:32]
    path = cache() / "raw" / mark / file.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{uuid.uuid4().hex}")
        system, there = file_system(file.url)
        try:
            with reaching(file.url):
                system.get_file(there, str(aside))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path


def find_remote(url: str) -> list[RemoteFile]:
    """Return the file at a URL, all in a folder, or those that match a pattern."""
    system, path = file_system(url)
    with reaching(url):
        if any(mark in path for mark in "*?["):
            found = [each for each in system.glob(path) if system.isfile(each)]
        elif system.isdir(path):
            found = [str(each) for each in system.ls(path, detail=False) if system.isfile(each)]
        else:
            found = [path] if system.exists(path) else []
    if not found:
        raise DataError(f"{url}: there is no such file or folder, and no file matches it as a pattern")
    return [RemoteFile(str(system.unstrip_protocol(each))) for each in found]
