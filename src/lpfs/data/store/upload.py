"""A finished Dataset to an object store: dataset.json goes last, without it nobody takes the rest for one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lpfs.data.store.location import AT_ONCE
from lpfs.data.urls import file_system, reaching
from lpfs.errors import DataError


def check_remote(url: str, *, replace: bool) -> None:
    """Refuse a target that holds anything, except a Dataset that may be replaced."""
    system, root = file_system(url)
    with reaching(url):
        names = {path[len(root) + 1 :] for path in system.find(root)} if system.exists(root) else set()
    if names and not replace:
        raise DataError(
            f"{url} exists and is not empty; choose another place, or replace it (--replace, replace=True)"
        )
    if names and "dataset.json" not in names:
        raise DataError(f"{url} holds something else than a Dataset and is left alone; choose another place")


def upload(folder: Path, url: str, *, replace: bool) -> None:
    """Copy a Dataset to a URL; files of an older one there go first, its dataset.json before all others."""
    check_remote(url, replace=replace)
    system, root = file_system(url)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with reaching(url):
        if system.exists(f"{root}/dataset.json"):
            system.rm_file(f"{root}/dataset.json")
            for path in system.find(root):
                system.rm_file(path)
        for parent in sorted({f"{root}/{name}".rpartition("/")[0] for name in names}):
            system.makedirs(parent, exist_ok=True)
        names.remove("dataset.json")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: system.put_file(str(folder / name), f"{root}/{name}"), names))
        system.put_file(str(folder / "dataset.json"), f"{root}/dataset.json")
