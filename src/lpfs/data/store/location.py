"""Where a Dataset is: a folder of this machine, or an object store with a folder here for what was fetched.

A finished Dataset to an object store: dataset.json goes last, without it nobody takes the rest for one.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lpfs._fileio import file_checksum
from lpfs.data.remote import as_url, cache_dir, convert_remote_errors, file_system
from lpfs.errors import DataError

MARK = "remote.json"  # in a folder of fetched files: where the others are
PARALLEL_TRANSFERS = 16  # files fetched at a time


class DatasetLocation:
    """A folder with all files of a Dataset in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return f"{self.folder}/{name}"

    def fetch(self, names: Iterable[str]) -> None:
        """Have files at hand; they are."""

    def expect(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Be told the size and the checksum of every file."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where that cannot be told without fetching it."""
        return os.stat(self.file(name)).st_size


class RemoteLocation(DatasetLocation):
    """Files of an object store, each fetched when it is first used and checked against its checksum.

    Processes of one machine share what was fetched. Another Dataset at the same URL gets another folder.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url
        self._system, self._root = file_system(url)
        self._entries: Mapping[str, Mapping[str, Any]] = {}
        self._here: set[str] = set()
        self._sizes: dict[str, int] | None = None

    @classmethod
    def opened(cls, url: str) -> RemoteLocation:
        """Return the place of a URL, with a folder for the Dataset that is there now."""
        system, root = file_system(url)
        with convert_remote_errors(f"{url}/dataset.json"):
            says = bytes(system.cat_file(f"{root}/dataset.json"))
        folder = cache_dir() / hashlib.sha256(url.encode() + b"\0" + says).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (("dataset.json", says), (MARK, json.dumps({"url": url}).encode())):
            if not (folder / name).exists():
                aside = folder / f".{uuid.uuid4().hex}"
                aside.write_bytes(data)
                aside.replace(folder / name)
        return cls(url, folder)

    def expect(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Be told the size and the checksum of every file."""
        self._entries = entries

    def file(self, name: str) -> str:
        """Return the path of a file here, fetched if need be."""
        path = super().file(name)
        if name not in self._here:
            if not os.path.exists(path):
                self._fetch(name, Path(path))
            self._here.add(name)
        return path

    def fetch(self, names: Iterable[str]) -> None:
        """Fetch what is not here yet, many files at a time."""
        missing = [name for name in names if name not in self._here]
        if missing:
            with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
                list(pool.map(self.file, missing))

    def _fetch(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
        try:
            with convert_remote_errors(f"{self.url}/{name}"):
                self._system.get_file(f"{self._root}/{name}", str(aside))
            entry = self._entries.get(name)
            if entry is not None and file_checksum(aside) != entry["checksum"]:
                raise DataError(
                    f"{self.url}/{name} is not what its dataset.json says: it is damaged, or another Dataset was "
                    "put there; open it again"
                )
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file as the store lists them; None where it cannot list."""
        if self._sizes is None:
            try:
                found = self._system.find(self._root, detail=True)
                self._sizes = {path[len(self._root) + 1 :]: int(info["size"]) for path, info in found.items()}
            except Exception:  # a plain web server has no listing; files are checked when they are fetched
                self._sizes = {}
        if not self._sizes:
            return None
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return self._sizes[name]


def locate_dataset(path: str | os.PathLike[str]) -> DatasetLocation:
    """Return the place of a path, of a URL, or of the folder of what was fetched from one."""
    url = as_url(path)
    if url is not None:
        return RemoteLocation.opened(url)
    folder = Path(path)
    mark = folder / MARK
    if mark.exists():
        return RemoteLocation(json.loads(mark.read_text())["url"], folder)
    return DatasetLocation(folder)


def dataset_exists(path: str | os.PathLike[str]) -> bool:
    """Whether a Dataset is at a path or a URL."""
    url = as_url(path)
    if url is None:
        return (Path(path) / "dataset.json").exists()
    system, root = file_system(url)
    with convert_remote_errors(url):
        return bool(system.exists(f"{root}/dataset.json"))


def check_remote_target(url: str, *, replace: bool) -> None:
    """Refuse a target that holds anything, except a Dataset that may be replaced."""
    system, root = file_system(url)
    with convert_remote_errors(url):
        names = {path[len(root) + 1 :] for path in system.find(root)} if system.exists(root) else set()
    if names and not replace:
        raise DataError(
            f"{url} exists and is not empty; choose another place, or replace it (--replace, replace=True)"
        )
    if names and "dataset.json" not in names:
        raise DataError(f"{url} holds something else than a Dataset and is left alone; choose another place")


def upload_dataset(folder: Path, url: str, *, replace: bool) -> None:
    """Copy a Dataset to a URL; files of an older one there go first, its dataset.json before all others."""
    check_remote_target(url, replace=replace)
    system, root = file_system(url)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with convert_remote_errors(url):
        if system.exists(f"{root}/dataset.json"):
            system.rm_file(f"{root}/dataset.json")
            for path in system.find(root):
                system.rm_file(path)
        for parent in sorted({f"{root}/{name}".rpartition("/")[0] for name in names}):
            system.makedirs(parent, exist_ok=True)
        names.remove("dataset.json")
        with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
            list(pool.map(lambda name: system.put_file(str(folder / name), f"{root}/{name}"), names))
        system.put_file(str(folder / "dataset.json"), f"{root}/dataset.json")
