"""What ``dataset.json`` says, checked when a Dataset is opened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lpfs
from lpfs.data.store.format import FORMAT, HEADER, VERSION, day_folder, field_file, file_checksum, json_checksum, label_file
from lpfs.data.store.location import Place
from lpfs.errors import DataError, InputError, LpfsError
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

    def __init__(self, place: Place) -> None:
        self.place, self.path = place, place.folder
        path = self.path
        if not path.is_dir():
            raise DataError(f"{path} is not a folder: no Dataset there; make one with prepare or simulate")
        values = self._load("dataset.json", f"{path} is not a Dataset: it has no dataset.json")
        self._check_version(values)
        self.values = values
        kept = {name: value for name, value in values.items() if name != "checksum"}
        if json_checksum(kept) != values.get("checksum"):
            raise damaged(path / "dataset.json", "its checksum does not match")
        try:
            self._read(values)
        except LpfsError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise damaged(path / "dataset.json", f"it says something that cannot be ({error!r})") from error

    def _read(self, values: dict[str, Any]) -> None:
        self.place.expect({**values["files"], **dict(self.files())})
        for name, entry in values["files"].items():
            check_file(self.place, name, entry, whole=True)
        for name, entry in self.files():
            check_file(self.place, name, entry, whole=False)
        try:
            self.schema = Schema.from_json(self.load("schema.json"))
        except (InputError, LookupError, TypeError, AttributeError) as error:
            raise damaged(self.path / "schema.json", str(error)) from error
        for field in self.schema:
            if type(field.dim) is not int or type(field.cardinality) is not int:
                raise damaged(self.path / "schema.json", f"field {field.name!r} has a size that is no number")
        self.days = [day(index, entry) for index, entry in enumerate(values["days"])]
        for each in self.days:
            check_columns(self.path, each, self.schema)
        if not isinstance(values["fingerprint"], str) or not isinstance(values["settings"], dict) or not self.days:
            raise damaged(self.path / "dataset.json", "fingerprint, settings or days are missing")

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
            return json.loads(Path(self.place.file(name)).read_text("utf-8"))
        except FileNotFoundError:
            raise DataError(f"{absent}; prepare it again") from None
        except (ValueError, RecursionError) as error:
            raise damaged(self.path / name, str(error)) from error
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error

    def files(self) -> list[tuple[str, dict[str, Any]]]:
        """List the large files with their entries."""
        columns = [
            (f"{day_folder(index)}/{name}", entry)
            for index, day in enumerate(self.values["days"])
            for name, entry in day["files"].items()
        ]
        return [*columns, *self.values["vocabularies"].items()]


def day(index: int, entry: dict[str, Any]) -> Day:
    """Read the entry of one day."""
    files = {}
    for name, file in entry["files"].items():
        dtype = np.dtype(file["dtype"])
        files[name] = dtype, (file["bytes"] - HEADER) // dtype.itemsize
    return Day(index, entry["name"], entry["rows"], entry["positives"], entry["negative_rate"], files)


def check_columns(path: Path, day: Day, schema: Schema) -> None:
    """Compare the files of a day with the schema: all there, of a fitting type, with as many rows."""
    if type(day.rows) is not int or day.rows < 1 or not isinstance(day.name, str):
        raise damaged(path / "dataset.json", f"day {day.name!r} has {day.rows!r} rows")
    wanted = {label_file(index): ("uf", day.rows) for index in range(1 + len(schema.tasks))}
    for index, field in enumerate(schema):
        if field.kind == "multi":
            wanted[field_file(index, "offsets")] = ("i", day.rows + 1)
            wanted[field_file(index)] = ("u", -1)
        else:
            kinds = "f" if field.kind == "numeric" else "u"
            wanted[field_file(index)] = (kinds, day.rows * (field.dim if field.kind == "numeric" else 1))
    for name, (kinds, items) in wanted.items():
        dtype, found = day.files.get(name, (None, 0))
        if dtype is None or dtype.kind not in kinds or items not in (-1, found):
            raise damaged(path / day_folder(day.index) / name, f"day {day.name!r} needs {items} items in it")


def check_file(place: Place, name: str, entry: dict[str, Any], *, whole: bool) -> None:
    """Compare a file with its entry: its size, and its bytes when ``whole``."""
    path, expected, checksum = place.folder / name, entry["bytes"], entry["checksum"]
    try:
        size = place.size(name)
        if size not in (None, expected):
            raise damaged(path, f"it has {size} bytes instead of {expected}")
        if whole and file_checksum(Path(place.file(name))) != checksum:
            raise damaged(path, "its checksum does not match")
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def damaged(path: Path, why: str) -> DataError:
    """Build the error for a file that is not as it was written."""
    return DataError(f"{path} is damaged: {why}; prepare or simulate the Dataset again")
