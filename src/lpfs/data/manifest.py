"""What ``dataset.json`` says, checked when a Dataset is opened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lpfs
from lpfs.data.format import (
    FORMAT,
    HEADER,
    VERSION,
    day_folder,
    file_checksum,
    json_checksum,
)
from lpfs.errors import DataError, InputError
from lpfs.schema import Schema


@dataclass(frozen=True)
class Day:
    """One day of a Dataset."""

    index: int
    name: str
    rows: int
    positives: int
    negative_rate: float  # the share of its negatives that was kept
    files: dict[str, tuple[np.dtype[Any], int]]  # of each column: type, number of items


class Manifest:
    """The contents of a Dataset folder, and whether it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path} is not a folder: no Dataset there; make one with prepare or simulate")
        values = self._load("dataset.json", f"{path} is not a Dataset: it has no dataset.json")
        self._check_version(values)
        self.values = values
        kept = {name: value for name, value in values.items() if name != "checksum"}
        if json_checksum(kept) != values.get("checksum"):
            raise damaged(path / "dataset.json", "its checksum does not match")
        for name, entry in values["files"].items():
            check_file(path / name, entry, whole=True)
        for file, entry in self.files():
            check_file(file, entry, whole=False)
        try:
            self.schema = Schema.from_json(self.load("schema.json"))
        except (InputError, KeyError, TypeError) as error:
            raise damaged(path / "schema.json", str(error)) from error
        self.days = [day(index, entry) for index, entry in enumerate(values["days"])]

    def _check_version(self, values: Any) -> None:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise DataError(f"{self.path / 'dataset.json'} was not written by lpfs; this is no Dataset")
        version = values.get("version")
        if version != VERSION:
            raise DataError(
                f"{self.path} has format version {version!r} (written by lpfs {values.get('lpfs')!r}); "
                f"lpfs {lpfs.__version__} reads version {VERSION}: prepare the log again with this lpfs"
            )

    def load(self, name: str) -> Any:
        """Return the JSON values of a small file."""
        return self._load(name, f"{self.path / name} is missing: the Dataset is damaged")

    def _load(self, name: str, absent: str) -> Any:
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except FileNotFoundError:
            raise DataError(f"{absent}; prepare it again") from None
        except (ValueError, RecursionError) as error:
            raise damaged(self.path / name, str(error)) from error
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error

    def files(self) -> list[tuple[Path, dict[str, Any]]]:
        """List the large files with their entries."""
        columns = [
            (self.path / day_folder(index) / name, entry)
            for index, day in enumerate(self.values["days"])
            for name, entry in day["files"].items()
        ]
        return columns + [(self.path / name, entry) for name, entry in self.values["vocabularies"].items()]


def day(index: int, entry: dict[str, Any]) -> Day:
    """Read the entry of one day."""
    files = {}
    for name, file in entry["files"].items():
        dtype = np.dtype(file["dtype"])
        files[name] = dtype, (file["bytes"] - HEADER) // dtype.itemsize
    return Day(index, entry["name"], entry["rows"], entry["positives"], entry["negative_rate"], files)


def check_file(path: Path, entry: dict[str, Any], *, whole: bool) -> None:
    """Compare a file with its entry: its size, and its bytes when ``whole``."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise damaged(path, f"it has {size} bytes instead of {entry['bytes']}")
        if whole and file_checksum(path) != entry["checksum"]:
            raise damaged(path, "its checksum does not match")
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def damaged(path: Path, why: str) -> DataError:
    """Build the error for a file that is not as it was written."""
    return DataError(f"{path} is damaged: {why}; prepare or simulate the Dataset again")
