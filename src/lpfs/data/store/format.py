"""The layout of a Dataset on disk: names of files, column files, vocabularies, and the manifest ``dataset.json``.

::

    out/
      dataset.json    version, fingerprint, settings; size and checksum of every file
      schema.json     the fields in order, the label, the tasks
      vocab/NNNN.npz  raw values of field NNNN in id order (numbers, or UTF-8 text)
      days/NNNN/      one directory per day, in time order; one .npy file per column
        fNNNN.npy           ids (smallest unsigned type), or numbers (float32; (n, w) if the width w > 1)
        fNNNN.missing.npy   1 where a number is missing (the number is 0.0 there); absent if none is missing
        fNNNN.offsets.npy   of a bag: row i holds values[offsets[i]:offsets[i + 1]]
        yNNNN.npy           label (0000) and tasks (0001 …), uint8, or float32 if not all are integers 0 to 255

Names of fields and days are user input and never become part of a path.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

import lpfs
from lpfs._fileio import NPY_HEADER_BYTES, file_checksum, json_checksum
from lpfs.data.store.location import DatasetLocation
from lpfs.errors import DataError, InputError, LpfsError
from lpfs.schema import Field, Schema

FORMAT, VERSION = "lpfs dataset", 1
MISSING_ID = 0  # id of a missing value
UNSEEN_ID = 1  # id of a value that is not in the vocabulary
FIRST_ID = 2  # id of the first value of the vocabulary
COLUMN_PARTS = ("", "missing", "offsets")  # the files that a field may have per day, see field_file
COPY_ITEMS = 1 << 20  # items copied at a time

AnyArray = npt.NDArray[Any]


def field_file(index: int, part: str = "") -> str:
    """Return the name of a column file of field ``index``; ``part`` is one of ``COLUMN_PARTS``."""
    return f"f{index:04d}.{part}.npy" if part else f"f{index:04d}.npy"


def label_file(index: int) -> str:
    """Return the name of the file of the label (0) or of task ``index - 1``."""
    return f"y{index:04d}.npy"


def day_folder(index: int) -> str:
    """Return the path of a day, relative to the Dataset."""
    return f"days/{index:04d}"


def vocabulary_file(index: int) -> str:
    """Return the path of the vocabulary of field ``index``, relative to the Dataset."""
    return f"vocab/{index:04d}.npz"


def id_dtype(largest: int) -> np.dtype[Any]:
    """Return the smallest unsigned type for ids up to ``largest``."""
    if largest >= 2**31:
        raise DataError(f"an id must be below 2**31, found {largest}; cap the vocabulary or hash the field")
    return np.min_scalar_type(max(int(largest), 0))


def save_vocabulary(file: BinaryIO, values: Any) -> None:
    """Write raw values in id order: an array of numbers unchanged, other values as UTF-8 text."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
        np.savez(file, numbers=values)
        return
    encoded = [str(value).encode("utf-8", "surrogatepass") for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    np.savez(file, text=np.frombuffer(b"".join(encoded), np.uint8), ends=ends)


def load_vocabulary(path: Path) -> AnyArray | list[str]:
    """Read a file written by ``save_vocabulary``: an array of numbers or a list of text."""
    with np.load(path, allow_pickle=False) as stored:
        if "numbers" in stored:
            return np.asarray(stored["numbers"])
        data, ends = stored["text"].tobytes(), stored["ends"].tolist()
    return [data[start:stop].decode("utf-8", "surrogatepass") for start, stop in pairwise(ends)]


class ColumnWriter:
    """A .npy file that grows by chunks and changes to a wider type if a chunk needs it.

    The file is closed between two chunks, so that thousands of columns of many days can be written in parallel.
    The checksum is updated with each chunk: CRC-32 of the data, then of the header, which is known at the end.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], width: int = 1) -> None:
        self.path, self.dtype, self.width = path, dtype, width
        self.items = self.items_before = 0  # number of items, and of those before the last chunk
        self._crc = 0
        path.write_bytes(b"\0" * NPY_HEADER_BYTES)

    def append(self, values: AnyArray) -> None:
        """Append values, (n,) or (n, width); the column changes to a wider type if needed."""
        if (dtype := np.promote_types(values.dtype, self.dtype)) != self.dtype:
            self._widen(dtype)
        values = values.astype(self.dtype, copy=False)
        data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        with self.path.open("ab") as file:
            file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.items_before = self.items
        self.items += values.size

    def append_zeros(self, items: int) -> None:
        """Append zeros, in parts, so that memory stays small."""
        for start in range(0, items, COPY_ITEMS):
            self.append(np.zeros(min(COPY_ITEMS, items - start), self.dtype))

    def _widen(self, dtype: np.dtype[Any]) -> None:
        wider = self.path.with_suffix(".wider")
        self._crc = 0
        with self.path.open("rb") as source, wider.open("wb") as target:
            target.write(source.read(NPY_HEADER_BYTES))
            while chunk := source.read(COPY_ITEMS * self.dtype.itemsize):
                data = np.frombuffer(chunk, self.dtype).astype(dtype).tobytes()
                self._crc = zlib.crc32(data, self._crc)
                target.write(data)
        wider.replace(self.path)
        self.dtype = dtype

    def close(self) -> dict[str, Any]:
        """Write the header of .npy version 1.0; return size, checksum and type for ``dataset.json``."""
        rows = self.items // self.width
        shape = (rows,) if self.width == 1 else (rows, self.width)
        text = f"{{'descr': {self.dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
        body = text.ljust(NPY_HEADER_BYTES - 11) + "\n"
        header = b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode("latin1")
        with self.path.open("r+b") as file:
            file.write(header)
        size = NPY_HEADER_BYTES + self.items * self.dtype.itemsize
        return {"bytes": size, "checksum": f"{zlib.crc32(header, self._crc):08x}", "dtype": self.dtype.str}


@dataclass(frozen=True)
class DayInfo:
    """One day of a Dataset, as ``dataset.json`` describes it."""

    index: int
    name: str
    rows: int
    positives: int  # rows with a non-zero label
    negative_rate: float  # fraction of the negatives that was kept
    files: dict[str, tuple[np.dtype[Any], int]]  # type and number of items of each column file


class Manifest:
    """The contents of ``dataset.json`` and ``schema.json``, checked when a Dataset is opened."""

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
        self.location.set_entries({**values["files"], **dict(self.files())})
        for name, entry in values["files"].items():
            check_file(self.location, name, entry, checksum=True)
        for name, entry in self.files():
            check_file(self.location, name, entry, checksum=False)
        try:
            self.schema = Schema.from_json(self.load("schema.json"))
        except (InputError, LookupError, TypeError, AttributeError) as error:
            raise damaged_file_error(self.path / "schema.json", str(error)) from error
        for field in self.schema:
            if type(field.dim) is not int or type(field.cardinality) is not int:
                reason = f"field {field.name!r} has the dim {field.dim!r} and the cardinality {field.cardinality!r}"
                raise damaged_file_error(self.path / "schema.json", reason)
        self.days = [_read_day(index, entry) for index, entry in enumerate(values["days"])]
        for day in self.days:
            _check_columns(self.path, day, self.schema)
        if not isinstance(values["fingerprint"], str) or not isinstance(values["settings"], dict) or not self.days:
            raise damaged_file_error(self.path / "dataset.json", "fingerprint, settings or days are missing")

    def load(self, name: str) -> Any:
        """Return the JSON values of a small file."""
        try:
            return json.loads(Path(self.location.file(name)).read_text("utf-8"))
        except FileNotFoundError:
            raise DataError(f"{self.path} is not a complete Dataset: it has no {name}; prepare it again") from None
        except (ValueError, RecursionError) as error:
            raise damaged_file_error(self.path / name, str(error)) from error
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error

    def files(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the column and vocabulary files with their entries."""
        files = []
        for index, day in enumerate(self.values["days"]):
            files += [(f"{day_folder(index)}/{name}", entry) for name, entry in day["files"].items()]
        return [*files, *self.values["vocabularies"].items()]


def _read_day(index: int, entry: dict[str, Any]) -> DayInfo:
    files = {}
    for name, file in entry["files"].items():
        dtype = np.dtype(file["dtype"])
        files[name] = dtype, (file["bytes"] - NPY_HEADER_BYTES) // dtype.itemsize
    return DayInfo(index, entry["name"], entry["rows"], entry["positives"], entry["negative_rate"], files)


def _check_columns(path: Path, day: DayInfo, schema: Schema) -> None:
    """Raise DataError if a column file of a day is missing, or has another type or size than the schema needs."""
    if type(day.rows) is not int or day.rows < 1 or not isinstance(day.name, str):
        raise damaged_file_error(path / "dataset.json", f"day {day.name!r} has {day.rows!r} rows")
    if type(day.positives) is not int or not 0 <= day.positives <= day.rows:
        reason = f"day {day.name!r} has {day.positives!r} positives in {day.rows} rows"
        raise damaged_file_error(path / "dataset.json", reason)
    expected = {label_file(index): ("uf", day.rows) for index in range(1 + len(schema.tasks))}
    for index, field in enumerate(schema):
        columns = {"categorical": ("u", day.rows), "numeric": ("f", day.rows * field.dim), "multi": ("u", -1)}
        expected[field_file(index)] = columns[field.kind]
        if field.kind == "multi":
            expected[field_file(index, "offsets")] = ("i", day.rows + 1)
    for name, (kinds, items) in expected.items():
        dtype, size = day.files.get(name, (None, 0))
        if dtype is None or dtype.kind not in kinds or items not in (-1, size):
            reason = f"day {day.name!r} needs {items} items in it, it has {size} of type {dtype}"
            raise damaged_file_error(path / day_folder(day.index) / name, reason)


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


def damaged_file_error(path: Path, reason: str) -> DataError:
    """Return the error for a file that differs from what was written."""
    return DataError(f"{path} is damaged: {reason}; prepare or simulate the Dataset again")


def id_range_error(field: Field, value: int, day: str) -> DataError:
    """Return the error for an id that is not below the cardinality of its field."""
    return DataError(
        f"day {day!r}: field {field.name!r} has id {value}, but its cardinality is {field.cardinality} "
        f"(ids 0 to {field.cardinality - 1}); prepare the log again, or correct the schema"
    )
