"""The location of a Dataset: a local directory, or a URL with a local cache; upload to a URL."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs._fileio import CHECKSUM_BYTES, file_checksum, open_atomic, read_json, replace_atomic, safe_child
from lpfs.data.remote import as_url, cache_dir, remote_access
from lpfs.errors import DataError, InputError

URL_FILE = "remote.json"  # in a cache directory: the URL of the Dataset
PARALLEL_TRANSFERS = 16  # files transferred at a time


class DatasetLocation:
    """A local directory with all files of a Dataset. Each MiB of a file is checked when it is first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: Mapping[str, Mapping[str, Any]] = {}
        self._paths: dict[str, str] = {}
        self._checked: dict[str, set[int]] = {}  # of each file, the blocks whose checksums were compared

    def file(self, name: str) -> str:
        """Return the local path of a file; raise DataError if it is outside the directory."""
        if name not in self._paths:
            self._paths[name] = str(safe_child(self.folder, name))
        return self._paths[name]

    def fetch(self, names: Iterable[str]) -> None:
        """Make files available locally; a local directory has them."""

    def set_entries(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the entry of every file in ``dataset.json``: size and checksum."""
        self._entries = entries

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it is not known without fetching the file."""
        return os.stat(self.file(name)).st_size

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return bytes ``start`` to ``stop`` (exclusive) of a file; raise DataError if they are damaged.

        Blocks that were not read before are read completely and compared with their checksums.
        """
        path, entry = self.file(name), self._entries[name]
        checked = self._checked.setdefault(name, set())
        blocks = [block for block in range(start // CHECKSUM_BYTES, -(-stop // CHECKSUM_BYTES)) if block not in checked]
        low, high = start, stop
        if blocks:
            low = min(start, blocks[0] * CHECKSUM_BYTES)
            high = max(stop, min((blocks[-1] + 1) * CHECKSUM_BYTES, entry["bytes"]))
        data = np.empty(high - low, np.uint8)
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                size = os.preadv(handle, [data.data], low) if data.size else 0
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; prepare the Dataset again") from error
        if size != data.size:
            raise damaged_file_error(path, "it ends early")
        for block in blocks:
            first = block * CHECKSUM_BYTES
            checksum = zlib.crc32(data[first - low : first - low + CHECKSUM_BYTES].data)
            if f"{checksum:08x}" != entry["checksum"][8 * block : 8 * block + 8]:
                raise damaged_file_error(path, "its checksum does not match")
            checked.add(block)
        return data[start - low : stop - low]


class RemoteLocation(DatasetLocation):
    """The files at a URL; each is fetched into a cache directory on first use and checked against its checksum.

    The processes of one machine share the cache. Another Dataset at the same URL gets another directory.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url
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
    if folder.resolve().parent != cache_dir().resolve():  # elsewhere, the file may come from somebody else
        return DatasetLocation(folder)
    try:
        stored = read_json(
            folder / URL_FILE, {"url": str}, advice=f"remove {folder} and open the URL again", missing_ok=True
        )
    except InputError as error:
        raise DataError(str(error)) from None
    return DatasetLocation(folder) if stored is None else RemoteLocation(stored["url"], folder)


def damaged_file_error(path: str | os.PathLike[str], reason: str) -> DataError:
    """Return the error for a file that differs from what was written."""
    return DataError(f"{path} is damaged: {reason}; prepare or simulate the Dataset again")


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
