"""The layout of a Dataset on disk: names of files, column files, vocabularies, and the manifest ``dataset.json``.

::

    out/
      dataset.json    version, fingerprint, settings; the columns; size and checksums (of each MiB) of every file
      schema.json     the fields in order, the label, the tasks
      vocab/          raw values of the fields in id order
        vNNNN.npy           numbers, or UTF-8 text of all values
        vNNNN.ends.npy      of text: value i is text[ends[i]:ends[i + 1]]
      days/NNNN/      one directory per day, in time order
        fNNNN.npy           ids (smallest unsigned type), or numbers (float32; (n, w) if the width w > 1)
        fNNNN.missing.npy   1 where a number is missing (the number is 0.0 there); absent if none is missing
        fNNNN.offsets.npy   of a bag: row i holds values[offsets[i]:offsets[i + 1]]
        yNNNN.npy           label (0000) and tasks (0001 …), uint8, or float32 if not all are integers 0 to 255

A column of fewer than 64 KiB has no file of its own: it is a part of ``columns.npy`` in the same directory, from the
byte ``start`` that ``dataset.json`` gives. Names of fields and days are user input and never become part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import lpfs
from lpfs._fileio import file_checksum, json_checksum, pause_garbage_collection, read_json
from lpfs.data.store.columns import NPY_HEADER_BYTES, PACKED
from lpfs.data.store.location import DatasetLocation, damaged_file_error
from lpfs.errors import DataError, InputError, LpfsError
from lpfs.schema import Field, Schema

FORMAT, VERSION = "lpfs dataset", 2
MISSING_ID = 0  # id of a missing value
UNSEEN_ID = 1  # id of a value that is not in the vocabulary
FIRST_ID = 2  # id of the first value of the vocabulary
COLUMN_PARTS = ("", "missing", "offsets")  # the columns that a field may have per day, see field_column
VOCABULARIES = "vocab"  # directory
FILE_NAME = re.compile(
    r"[A-Za-z0-9_-]+\.json|(days/\d{4,}|vocab)/(columns|[fvy]\d{4,}(\.(missing|offsets|ends))?)\.npy", re.ASCII
)
NUMBER_TYPE = re.compile(r"\|[biu]1|<[iu][248]|<f[248]")  # dtype.str of the columns; no object can be among them
MAX_MANIFEST_BYTES = 1 << 30  # of dataset.json, which has an entry for every column

AnyArray = npt.NDArray[Any]


@cache
def field_column(index: int, part: str = "") -> str:
    """Return the name of a column of field ``index``; ``part`` is one of ``COLUMN_PARTS``."""
    return f"f{index:04d}.{part}" if part else f"f{index:04d}"


def label_column(index: int) -> str:
    """Return the name of the column of the label (0) or of task ``index - 1``."""
    return f"y{index:04d}"


def vocabulary_column(index: int, part: str = "") -> str:
    """Return the name of the vocabulary of field ``index``; ``part`` is "ends" for the ends of text values."""
    return f"v{index:04d}.{part}" if part else f"v{index:04d}"


def day_folder(index: int) -> str:
    """Return the path of a day, relative to the Dataset."""
    return f"days/{index:04d}"


@lru_cache(maxsize=1 << 16)
def id_dtype(largest: int) -> np.dtype[Any]:
    """Return the smallest unsigned type for ids up to ``largest``."""
    if largest >= 2**31:
        raise DataError(f"an id must be below 2**31, found {largest}; cap the vocabulary or hash the field")
    return np.min_scalar_type(max(int(largest), 0))


def encode_vocabulary(values: Any) -> dict[str, AnyArray]:
    """Return raw values as columns: an array of numbers unchanged, other values as UTF-8 text and its ends."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
        return {"": values.astype(values.dtype.newbyteorder("<"))}
    encoded = [str(value).encode("utf-8", "surrogatepass") for value in values]
    return {"": np.frombuffer(b"".join(encoded), np.uint8), "ends": np.cumsum([0, *map(len, encoded)], dtype=np.int64)}


def decode_vocabulary(values: AnyArray, ends: AnyArray | None) -> AnyArray | list[str]:
    """Return the raw values of ``encode_vocabulary``: an array of numbers or a list of text."""
    if ends is None:
        return values
    data = values.tobytes()
    return [data[start:stop].decode("utf-8", "surrogatepass") for start, stop in pairwise(ends.tolist())]


class Column(NamedTuple):
    """Numbers of one type that follow each other in a file."""

    file: str  # relative to the Dataset
    start: int  # first byte
    dtype: np.dtype[Any]
    items: int

    def read(self, location: DatasetLocation, first: int, count: int) -> AnyArray:
        """Return ``count`` items from item ``first``; raise DataError if they are damaged."""
        if not 0 <= first <= first + count <= self.items:
            reason = f"items {first} to {first + count} are needed, it has {self.items}"
            raise damaged_file_error(location.folder / self.file, reason)
        size, start = self.dtype.itemsize, self.start + first * self.dtype.itemsize
        return location.read(self.file, start, start + count * size).view(self.dtype)


@dataclass(frozen=True)
class DayInfo:
    """One day of a Dataset, as ``dataset.json`` describes it."""

    index: int
    name: str
    rows: int
    positives: int  # rows with a non-zero label
    negative_rate: float  # fraction of the negatives that was kept
    columns: dict[str, Column]


class Manifest:
    """The contents of ``dataset.json`` and ``schema.json``, checked when a Dataset is opened."""

    @pause_garbage_collection()
    def __init__(self, location: DatasetLocation) -> None:
        self.location, self.path = location, location.folder
        path, file = self.path, self.path / "dataset.json"
        if not path.is_dir():
            raise DataError(f"no Dataset at {path}: it is not a directory; make one with prepare or simulate")
        self.values = values = self.load("dataset.json")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise DataError(
                f"{file} was not written by lpfs, so {path} is not a Dataset; make one with prepare or simulate"
            )
        if (version := values.get("version")) != VERSION:
            raise DataError(
                f"{path} has format version {version!r} (written by lpfs {values.get('lpfs')!r}); "
                f"lpfs {lpfs.__version__} reads version {VERSION}: prepare the log again with this lpfs"
            )
        content = {name: value for name, value in values.items() if name != "checksum"}
        if json_checksum(content) != values.get("checksum"):
            raise damaged_file_error(file, "its checksum does not match")
        try:
            self._read(values)
        except LpfsError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise damaged_file_error(file, f"it has invalid contents ({error!r})") from error

    def _read(self, values: dict[str, Any]) -> None:
        self.files: dict[str, dict[str, Any]] = values["files"]
        for name, entry in self.files.items():
            if not FILE_NAME.fullmatch(name):
                raise DataError(f"{self.path / 'dataset.json'} names the file {name[:200]!r}, which no Dataset has")
            if type(entry["bytes"]) is not int or type(entry["checksum"]) is not str:
                raise damaged_file_error(self.path / "dataset.json", f"the entry of {name} is invalid")
        self.location.set_entries(self.files)
        for name, entry in self.files.items():
            check_file(self.location, name, entry, checksum=name.endswith(".json"))
        try:
            self.schema = Schema.from_json(self.load("schema.json"))
        except (InputError, LookupError, TypeError, AttributeError) as error:
            raise damaged_file_error(self.path / "schema.json", str(error)) from error
        for field in self.schema:
            if type(field.dim) is not int or type(field.cardinality) is not int:
                reason = f"field {field.name!r} has the dim {field.dim!r} and the cardinality {field.cardinality!r}"
                raise damaged_file_error(self.path / "schema.json", reason)
        self.days = [self._read_day(index, entry) for index, entry in enumerate(values["days"])]
        for day in self.days:
            _check_columns(self.path, day, self.schema)
        self.vocabularies = self._read_columns(VOCABULARIES, values["vocabularies"]["columns"])
        self.vocabulary_metadata: dict[str, dict[str, Any]] = values["vocabularies"]["metadata"]
        mappings = (values["settings"], self.vocabulary_metadata, *self.vocabulary_metadata.values())
        if not isinstance(values["fingerprint"], str) or not self.days or {type(value) for value in mappings} != {dict}:
            raise damaged_file_error(self.path / "dataset.json", "fingerprint, settings, days or metadata are invalid")

    def _read_day(self, index: int, entry: dict[str, Any]) -> DayInfo:
        columns = self._read_columns(day_folder(index), entry["columns"])
        return DayInfo(index, entry["name"], entry["rows"], entry["positives"], entry["negative_rate"], columns)

    def _read_columns(self, folder: str, entries: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of a directory; raise DataError if one is longer than its file."""
        packed, columns = f"{folder}/{PACKED}.npy", {}
        for name, entry in entries.items():
            items, start, dtype = entry["items"], entry.get("start", NPY_HEADER_BYTES), _dtype(entry["dtype"])
            file = packed if "start" in entry else f"{folder}/{name}.npy"
            stop, size = start + items * dtype.itemsize, self.files[file]["bytes"] if file in self.files else 0
            if type(items) is not int or type(start) is not int or not NPY_HEADER_BYTES <= start <= stop <= size:
                reason = f"column {name} needs {items!r} items of type {dtype} from byte {start!r}"
                raise damaged_file_error(self.path / file, f"{reason}, it has {size} bytes")
            columns[name] = Column(file, start, dtype, items)
        return columns

    def load(self, name: str) -> Any:
        """Return the JSON values of a small file."""
        try:
            return read_json(Path(self.location.file(name)), Any, verify=False, max_bytes=MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise DataError(f"{self.path} is not a complete Dataset: it has no {name}; prepare it again") from None
        except ValueError as error:
            raise damaged_file_error(self.path / name, str(error)) from error
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error


@cache
def _dtype(text: str) -> np.dtype[Any]:
    if not NUMBER_TYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a type of numbers")
    return np.dtype(text)


def _check_columns(path: Path, day: DayInfo, schema: Schema) -> None:
    """Raise DataError if a column file of a day is missing, or has another type or size than the schema needs."""
    if type(day.rows) is not int or day.rows < 1 or not isinstance(day.name, str):
        raise damaged_file_error(path / "dataset.json", f"day {day.name!r} has {day.rows!r} rows")
    if type(day.positives) is not int or not 0 <= day.positives <= day.rows:
        reason = f"day {day.name!r} has {day.positives!r} positives in {day.rows} rows"
        raise damaged_file_error(path / "dataset.json", reason)
    expected = {label_column(index): ("uf", day.rows) for index in range(1 + len(schema.tasks))}
    for index, field in enumerate(schema):
        kind = {"categorical": "u", "numeric": "f", "multi": "u"}[field.kind]
        items = {"categorical": day.rows, "numeric": day.rows * field.dim, "multi": -1}[field.kind]
        expected[field_column(index)] = kind, items
        if field.kind == "multi":
            expected[field_column(index, "offsets")] = ("i", day.rows + 1)
        elif field.kind == "numeric" and (missing := field_column(index, "missing")) in day.columns:
            expected[missing] = ("u", day.rows * field.dim)
    for name, (kinds, items) in expected.items():
        column = day.columns.get(name)
        if column is None or column.dtype.kind not in kinds or items not in (-1, column.items):
            stored = "it is missing" if column is None else f"it has {column.items} of type {column.dtype}"
            reason = f"column {name} of day {day.name!r} needs {items} items, {stored}"
            raise damaged_file_error(path / (column.file if column else day_folder(day.index)), reason)


def check_file(location: DatasetLocation, name: str, entry: dict[str, Any], *, checksum: bool) -> None:
    """Raise DataError if a file differs from its entry in size, or with ``checksum`` in content."""
    path, size = location.folder / name, entry["bytes"]
    try:
        actual = location.size(name)
        if actual not in (None, size):
            raise damaged_file_error(path, f"it has {actual} bytes instead of {size}")
        if checksum and file_checksum(Path(location.file(name))) != entry["checksum"]:
            raise damaged_file_error(path, "its checksum does not match")
    except FileNotFoundError:
        raise damaged_file_error(path, "it is missing") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def id_range_error(field: Field, value: int, day: str) -> DataError:
    """Return the error for an id that is not below the cardinality of its field."""
    return DataError(
        f"day {day!r}: field {field.name!r} has id {value}, but its cardinality is {field.cardinality} "
        f"(ids 0 to {field.cardinality - 1}); prepare the log again, or correct the schema"
    )
