"""The location of a Dataset: a local directory, or a URL with a local cache; upload to a URL."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from lpfs._fileio import file_checksum, open_atomic, replace_atomic
from lpfs.data.remote import as_url, cache_dir, remote_access
from lpfs.errors import DataError

URL_FILE = "remote.json"  # in a cache directory: the URL of the Dataset
PARALLEL_TRANSFERS = 16  # files transferred at a time


class DatasetLocation:
    """A local directory with all files of a Dataset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> str:
        """Return the local path of a file."""
        return f"{self.folder}/{name}"

    def fetch(self, names: Iterable[str]) -> None:
        """Make files available locally; a local directory has them."""

    def set_entries(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the entry of every file in ``dataset.json``: size and checksum."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it is not known without fetching the file."""
        return os.stat(self.file(name)).st_size


class RemoteLocation(DatasetLocation):
    """The files at a URL; each is fetched into a cache directory on first use and checked against its checksum.

    The processes of one machine share the cache. Another Dataset at the same URL gets another directory.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url
        self._entries: Mapping[str, Mapping[str, Any]] = {}
        self._fetched: set[str] = set()

    @classmethod
    def open(cls, url: str) -> RemoteLocation:
        """Return the location of a URL, with a cache directory for the Dataset that is there now."""
        with remote_access(f"{url}/dataset.json") as (system, path):
            manifest = bytes(system.cat_file(path))
        folder = cache_dir() / hashlib.sha256(url.encode() + b"\0" + manifest).hexdigest()[:32]
        for name, data in (("dataset.json", manifest), (URL_FILE, json.dumps({"url": url}).encode())):
            if not (folder / name).exists():
                with open_atomic(folder / name) as file:
                    file.write(data)
        return cls(url, folder)

    def set_entries(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._entries = entries

    def file(self, name: str) -> str:
        path = super().file(name)
        if name not in self._fetched:
            if not os.path.exists(path):
                self._fetch(name, Path(path))
            self._fetched.add(name)
        return path

    def fetch(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._fetched]
        if missing:
            with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
                list(pool.map(self.file, missing))

    def _fetch(self, name: str, path: Path) -> None:
        with replace_atomic(path, path.suffix) as temporary:
            with remote_access(f"{self.url}/{name}") as (system, remote_path):
                system.get_file(remote_path, str(temporary))
            entry = self._entries.get(name)
            if entry is not None and file_checksum(temporary) != entry["checksum"]:
                raise DataError(
                    f"{self.url}/{name} does not match the checksum in dataset.json: it is damaged, or the "
                    "Dataset was replaced by another one; open it again"
                )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        try:
            with remote_access(self.url) as (system, root):
                listing = system.find(root, detail=True)
                return {path[len(root) + 1 :]: int(info["size"]) for path, info in listing.items()}
        except Exception:  # a plain web server has no listing; files are checked when they are fetched
            return {}

    def size(self, name: str) -> int | None:
        if self._sizes and name not in self._sizes:
            raise FileNotFoundError(name)
        return self._sizes.get(name)


def locate_dataset(path: str | os.PathLike[str]) -> DatasetLocation:
    """Return the location of a directory, of a URL, or of the cache directory of a URL."""
    if (url := as_url(path)) is not None:
        return RemoteLocation.open(url)
    folder = Path(path)
    if (folder / URL_FILE).exists():
        return RemoteLocation(json.loads((folder / URL_FILE).read_text())["url"], folder)
    return DatasetLocation(folder)


def dataset_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory or a URL contains a Dataset."""
    if (url := as_url(path)) is None:
        return (Path(path) / "dataset.json").exists()
    with remote_access(url) as (system, root):
        return bool(system.exists(f"{root}/dataset.json"))


def check_remote_target(url: str, *, replace: bool) -> None:
    """Raise DataError if a URL is not empty, unless it contains a Dataset and ``replace`` is set."""
    with remote_access(url) as (system, root):
        names = {path[len(root) + 1 :] for path in system.find(root)} if system.exists(root) else set()
    if names and not replace:
        raise DataError(f"{url} exists and is not empty; choose another place, or replace it (--replace, replace=True)")
    if names and "dataset.json" not in names:
        raise DataError(f"{url} contains other files than a Dataset and is not replaced; choose another place")


def upload_dataset(folder: Path, url: str, *, replace: bool) -> None:
    """Copy a Dataset to a URL.

    ``dataset.json`` of an older Dataset is removed first and the new one is written last, so an incomplete upload
    is not taken for a Dataset.
    """
    check_remote_target(url, replace=replace)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with remote_access(url) as (system, root):
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
