"""What ``dataset.json`` says, checked when a Dataset is opened.

The layout of a prepared Dataset on disk: names of files, versions, checksums.

::

    out/
      dataset.json    version, fingerprint, settings, and of every file its size and checksum
      schema.json     the fields in order, the label, the tasks
      vocab/NNNN.npz  raw values of field NNNN in id order (numbers, or UTF-8 text)
      days/NNNN/      one folder a day, in time order, one .npy file a column
        fNNNN.npy           ids (smallest unsigned type), or numbers (float32; (n, w) when w > 1)
        fNNNN.missing.npy   1 where a number is missing (the number is 0.0 there); absent when none is
        fNNNN.offsets.npy   of a bag: row i holds values[offsets[i]:offsets[i + 1]]
        yNNNN.npy           label (0000) and tasks (0001 …), uint8, or float32 when not all are whole

Names of fields and days are text from outside and never become part of a path.

One column of one day, written chunk by chunk into a .npy file.
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
from lpfs.schema import Schema

FORMAT = "lpfs dataset"
VERSION = 1
MISSING_ID = 0
UNSEEN_ID = 1
FIRST_ID = 2

AnyArray = npt.NDArray[Any]


def field_file(index: int, part: str = "") -> str:
    """Name of a column file of field ``index``; ``part`` is ``""``, ``"missing"`` or ``"offsets"``."""
    return f"f{index:04d}.{part}.npy" if part else f"f{index:04d}.npy"


def label_file(index: int) -> str:
    """Name of the file of the label (0) or of task ``index - 1``."""
    return f"y{index:04d}.npy"


def day_folder(index: int) -> str:
    """Path of a day, relative to the Dataset."""
    return f"days/{index:04d}"


def vocabulary_file(index: int) -> str:
    """Path of the vocabulary of field ``index``, relative to the Dataset."""
    return f"vocab/{index:04d}.npz"


def id_dtype(largest: int) -> np.dtype[Any]:
    """Smallest unsigned type that holds ids up to ``largest``."""
    if largest >= 2**31:
        raise DataError(f"an id must be below 2**31, found {largest}; cap the vocabulary or hash the field")
    return np.min_scalar_type(max(int(largest), 0))


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Header of a version 1.0 .npy file, always ``NPY_HEADER_BYTES`` bytes long."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    body = text.ljust(NPY_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode("latin1")


def save_vocabulary(file: BinaryIO, values: Any) -> None:
    """Write raw values in id order: numbers as they are, anything else as UTF-8 text."""
    array = values if isinstance(values, np.ndarray) else None
    if array is not None and array.dtype.kind in "iufb":
        np.savez(file, numbers=array)
        return
    encoded = [str(value).encode("utf-8", "surrogatepass") for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    np.savez(file, text=np.frombuffer(b"".join(encoded), np.uint8), ends=ends)


def load_vocabulary(path: Path) -> AnyArray | list[str]:
    """Read what ``save_vocabulary`` wrote: an array of numbers or a list of text."""
    with np.load(path, allow_pickle=False) as stored:
        if "numbers" in stored:
            return np.asarray(stored["numbers"])
        data, ends = stored["text"].tobytes(), stored["ends"].tolist()
    return [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(ends)]


COPY = 1 << 20  # items moved at a time when a column gets a wider type


class ColumnWriter:
    """A .npy file that grows by chunks and widens its type when a chunk needs it.

    No file stays open between two chunks, so that a thousand columns of many days can grow side by side.
    The checksum runs along: CRC-32 of the data, then of the header, which is known only at the end.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], width: int = 1) -> None:
        self.path, self.dtype, self.width = path, dtype, width
        self.items = 0
        self.before = 0  # items that were there before the last chunk
        self._crc = 0
        path.write_bytes(b"\0" * NPY_HEADER_BYTES)

    def append(self, values: AnyArray) -> None:
        """Add values, (n,) or (n, width), of a type that the column can hold or widen to."""
        if values.dtype != self.dtype:
            wide = np.promote_types(values.dtype, self.dtype)
            if wide != self.dtype:
                self._widen(wide)
            values = values.astype(self.dtype)
        data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        with self.path.open("ab") as file:
            file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.before = self.items
        self.items += values.size

    def append_zeros(self, items: int) -> None:
        """Add as many zeros, without holding them all."""
        for start in range(0, items, COPY):
            self.append(np.zeros(min(COPY, items - start), self.dtype))

    def _widen(self, dtype: np.dtype[Any]) -> None:
        old, aside = self.path, self.path.with_suffix(".wider")
        self._crc = 0
        with old.open("rb") as source, aside.open("wb") as target:
            target.write(source.read(NPY_HEADER_BYTES))
            while chunk := source.read(COPY * self.dtype.itemsize):
                data = np.frombuffer(chunk, self.dtype).astype(dtype).tobytes()
                self._crc = zlib.crc32(data, self._crc)
                target.write(data)
        aside.replace(old)
        self.dtype = dtype

    def close(self) -> dict[str, Any]:
        """Write the header; return size, checksum and type for ``dataset.json``."""
        rows = self.items // self.width
        header = npy_header(self.dtype, (rows,) if self.width == 1 else (rows, self.width))
        with self.path.open("r+b") as file:
            file.write(header)
        size = NPY_HEADER_BYTES + self.items * self.dtype.itemsize
        return {"bytes": size, "checksum": f"{zlib.crc32(header, self._crc):08x}", "dtype": self.dtype.str}


@dataclass(frozen=True)
class DayInfo:
    """One day of a Dataset."""

    index: int
    name: str
    rows: int
    positives: int
    negative_rate: float  # the share of its negatives that was kept
    files: dict[str, tuple[np.dtype[Any], int]]  # of each column: type, number of items


class Manifest:
    """The contents of a Dataset folder, and whether it is whole."""

    def __init__(self, place: DatasetLocation) -> None:
        self.place, self.path = place, place.folder
        path = self.path
        if not path.is_dir():
            raise DataError(f"{path} is not a folder: no Dataset there; make one with prepare or simulate")
        values = self._load("dataset.json", f"{path} is not a Dataset: it has no dataset.json")
        self._check_version(values)
        self.values = values
        kept = {name: value for name, value in values.items() if name != "checksum"}
        if json_checksum(kept) != values.get("checksum"):
            raise damaged_file_error(path / "dataset.json", "its checksum does not match")
        try:
            self._read(values)
        except LpfsError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise damaged_file_error(
                path / "dataset.json", f"it says something that cannot be ({error!r})"
            ) from error

    def _read(self, values: dict[str, Any]) -> None:
        self.place.expect({**values["files"], **dict(self.files())})
        for name, entry in values["files"].items():
            check_file(self.place, name, entry, whole=True)
        for name, entry in self.files():
            check_file(self.place, name, entry, whole=False)
        try:
            self.schema = Schema.from_json(self.load("schema.json"))
        except (InputError, LookupError, TypeError, AttributeError) as error:
            raise damaged_file_error(self.path / "schema.json", str(error)) from error
        for field in self.schema:
            if type(field.dim) is not int or type(field.cardinality) is not int:
                raise damaged_file_error(
                    self.path / "schema.json", f"field {field.name!r} has a size that is no number"
                )
        self.days = [_read_day(index, entry) for index, entry in enumerate(values["days"])]
        for each in self.days:
            check_columns(self.path, each, self.schema)
        if not isinstance(values["fingerprint"], str) or not isinstance(values["settings"], dict) or not self.days:
            raise damaged_file_error(self.path / "dataset.json", "fingerprint, settings or days are missing")

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
            raise damaged_file_error(self.path / name, str(error)) from error
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


def _read_day(index: int, entry: dict[str, Any]) -> DayInfo:
    """Read the entry of one day."""
    files = {}
    for name, file in entry["files"].items():
        dtype = np.dtype(file["dtype"])
        files[name] = dtype, (file["bytes"] - NPY_HEADER_BYTES) // dtype.itemsize
    return DayInfo(index, entry["name"], entry["rows"], entry["positives"], entry["negative_rate"], files)


def check_columns(path: Path, day: DayInfo, schema: Schema) -> None:
    """Compare the files of a day with the schema: all there, of a fitting type, with as many rows."""
    if type(day.rows) is not int or day.rows < 1 or not isinstance(day.name, str):
        raise damaged_file_error(path / "dataset.json", f"day {day.name!r} has {day.rows!r} rows")
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
            raise damaged_file_error(
                path / day_folder(day.index) / name, f"day {day.name!r} needs {items} items in it"
            )


def check_file(place: DatasetLocation, name: str, entry: dict[str, Any], *, whole: bool) -> None:
    """Compare a file with its entry: its size, and its bytes when ``whole``."""
    path, expected, checksum = place.folder / name, entry["bytes"], entry["checksum"]
    try:
        size = place.size(name)
        if size not in (None, expected):
            raise damaged_file_error(path, f"it has {size} bytes instead of {expected}")
        if whole and file_checksum(Path(place.file(name))) != checksum:
            raise damaged_file_error(path, "its checksum does not match")
    except FileNotFoundError:
        raise damaged_file_error(path, "it is missing") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def damaged_file_error(path: Path, why: str) -> DataError:
    """Build the error for a file that is not as it was written."""
    return DataError(f"{path} is damaged: {why}; prepare or simulate the Dataset again")
