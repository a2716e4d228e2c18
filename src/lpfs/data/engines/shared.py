"""Encoded rows by way of files: a folder that all machines see moves more than Spark moves to its driver."""

from __future__ import annotations

import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpfs.data.engines.pieces import packed
from lpfs.data.urls import file_system, reaching, url_of

VARIABLE = "LPFS_SHARED"  # the folder or URL


@dataclass(frozen=True)
class Shared:
    """A folder of our own in a place that all machines see, a path or a URL."""

    place: str

    @classmethod
    def within(cls, place: str) -> Shared:
        """Return a new folder in a place."""
        return cls(f"{(url_of(place) or place).rstrip('/')}/lpfs-{uuid.uuid4().hex}")

    def put(self, value: Any) -> str:
        """Write a value; return the name it has."""
        name = uuid.uuid4().hex
        if url_of(self.place) is None:
            Path(self.place).mkdir(parents=True, exist_ok=True)
            Path(self.place, name).write_bytes(packed(value))
        else:
            system, root = file_system(self.place)
            with reaching(self.place):
                system.pipe_file(f"{root}/{name}", packed(value))
        return name

    def take(self, name: str) -> Any:
        """Return the value of a name, and remove it."""
        if url_of(self.place) is None:
            path = Path(self.place, name)
            data = path.read_bytes()
            path.unlink()
        else:
            system, root = file_system(self.place)
            with reaching(self.place):
                data = system.cat_file(f"{root}/{name}")
                system.rm_file(f"{root}/{name}")
        return pickle.loads(data)

    def clear(self) -> None:
        """Remove the folder and whatever is left in it, by tasks that were done twice for example."""
        if url_of(self.place) is None:
            shutil.rmtree(self.place, ignore_errors=True)
        else:
            system, root = file_system(self.place)
            with reaching(self.place):
                if system.exists(root):
                    system.rm(root, recursive=True)


def put_all(shared: Shared, function: Callable[[Any], Iterator[Any]], item: Any) -> list[str]:
    """Write all that a function yields for an item; return the names, in order."""
    return [shared.put(value) for value in function(item)]
