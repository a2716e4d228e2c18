"""DayWriter: the rows of one day, appended in chunks of columns.

DatasetWriter: chunks of columns in, a complete Dataset folder out, or nothing at all.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import lpfs
from lpfs._fileio import fsync_tree, json_checksum, write_json
from lpfs.data.store.format import (
    FORMAT,
    VERSION,
    AnyArray,
    ColumnWriter,
    day_folder,
    field_file,
    file_checksum,
    id_dtype,
    label_file,
    save_vocabulary,
    vocabulary_file,
)
from lpfs.data.store.temporary import Workplace
from lpfs.errors import DataError, FieldError, StateError
from lpfs.schema import Field, Schema

BYTE = np.dtype(np.uint8)
LONG = np.dtype(np.int64)
PARTS = ("", "missing", "offsets")


class DayWriter:
    """Rows of one day; made by ``DatasetWriter.day``."""

    def __init__(self, name: str, folder: Path, schema: Schema, negative_rate: float) -> None:
        if not 0.0 < negative_rate <= 1.0:
            raise DataError(f"day {name!r}: negative_rate must be in (0, 1], found {negative_rate!r}")
        self.name, self.folder, self.schema, self.negative_rate = name, folder, schema, negative_rate
        self.rows = 0
        self.positives = 0
        self._columns: dict[str, ColumnWriter] = {}
        self._largest: dict[str, int] = {}
        self._closed = False

    def append(
        self,
        *,
        ids: Mapping[str, AnyArray] | None = None,
        dense: Mapping[str, AnyArray] | None = None,
        bags: Mapping[str, tuple[AnyArray, AnyArray]] | None = None,
        labels: Mapping[str, AnyArray],
    ) -> None:
        """Add rows: every field of the schema and every label, all of one length.

        Args:
            ids: of each categorical field (n,) integers.
            dense: of each numeric field (n,) or (n, w) numbers; NaN marks a missing one.
            bags: of each multi field its ids, row after row, and the (n,) lengths of the rows.
            labels: of the label and of each task (n,) numbers.

        Everything is checked before anything is written.

        """
        if self._closed:
            raise StateError(f"day {self.name!r} is closed")
        ids, dense, bags = ids or {}, dense or {}, bags or {}
        self._check_names({**ids, **dense, **bags}, labels)
        rows = len(np.asarray(labels[self.schema.label]))
        parts: dict[str, AnyArray] = {}
        for index, field in enumerate(self.schema):
            given: Any = {"categorical": ids, "numeric": dense, "multi": bags}[field.kind].get(field.name)
            if given is None:
                raise FieldError(f"field {field.name!r} is {field.kind} and was given as something else")
            if field.kind == "multi":
                values, lengths = (np.asarray(each) for each in given)
                self._check_bag(field, values, lengths, rows)
                parts[field_file(index)] = self._ids(field, values)
                parts[field_file(index, "offsets")] = np.cumsum(lengths, dtype=np.int64)
            elif field.kind == "numeric":
                values = self._numbers(field, np.asarray(given), rows)
                parts[field_file(index, "missing")] = np.isnan(values)
                parts[field_file(index)] = np.nan_to_num(values, copy=False, nan=0.0)
            else:
                parts[field_file(index)] = self._ids(field, self._rows(field.name, np.asarray(given), rows))
        for index, name in enumerate((self.schema.label, *self.schema.tasks)):
            parts[label_file(index)] = self._labels(name, self._rows(name, np.asarray(labels[name]), rows))
        for file, part in parts.items():
            self._write(file, part)
        self.rows += rows
        self.positives += int(np.count_nonzero(parts[label_file(0)]))

    def _write(self, file: str, part: AnyArray) -> None:
        """Add a checked part to its file, which is made when it is first needed."""
        column = self._columns.get(file)
        width = part.shape[1] if part.ndim == 2 else 1
        if file.endswith(".missing.npy"):
            if column is None and not part.any():
                return
            part = part.view(np.uint8)
        if column is None:
            dtype = LONG if file.endswith(".offsets.npy") else BYTE if part.dtype == bool else part.dtype
            column = self._columns[file] = ColumnWriter(self.folder / file, dtype, width)
            if file.endswith(".offsets.npy"):
                column.append(np.zeros(1, np.int64))
            elif file.endswith(".missing.npy"):
                column.append_zeros(self.rows * width)
        if file.endswith(".offsets.npy"):
            part = part + self._columns[file.replace(".offsets", "")].before
        column.append(part)

    def _check_names(self, given: Mapping[str, Any], labels: Mapping[str, Any]) -> None:
        targets = (self.schema.label, *self.schema.tasks)
        for what, found, wanted in (("field", given, self.schema.names), ("label", labels, targets)):
            missing = [name for name in wanted if name not in found]
            unknown = [name for name in found if name not in wanted]
            if missing or unknown:
                name, problem = (missing or unknown)[0], "is missing" if missing else "is not in the schema"
                raise FieldError(f"day {self.name!r}: {what} {name!r} {problem}")

    def _rows(self, name: str, values: AnyArray, rows: int) -> AnyArray:
        if values.shape != (rows,):
            raise DataError(
                f"day {self.name!r}: {name!r} needs one value for each of {rows} rows, found {values.shape}"
            )
        return values

    def _ids(self, field: Field, values: AnyArray) -> AnyArray:
        if values.dtype.kind not in "iub":
            raise DataError(f"field {field.name!r}: ids must be integers, found {values.dtype}")
        if not values.size:
            return values.astype(np.uint8)
        if int(values.min()) < 0:
            raise DataError(f"field {field.name!r}: an id must not be negative, found {values.min()}")
        largest = int(values.max())
        if field.cardinality and largest >= field.cardinality:
            raise id_range_error(field, largest, f"day {self.name!r}")
        self._largest[field.name] = max(self._largest.get(field.name, 0), largest)
        return values.astype(id_dtype(max(largest, field.cardinality - 1)))

    def _check_bag(self, field: Field, values: AnyArray, lengths: AnyArray, rows: int) -> None:
        self._rows(field.name, lengths, rows)
        if values.ndim != 1 or lengths.dtype.kind not in "iu" or (rows and int(lengths.min()) < 0):
            raise DataError(f"field {field.name!r}: a bag is a flat array of ids and (n,) lengths >= 0")
        if int(lengths.sum()) != len(values):
            raise DataError(f"field {field.name!r}: lengths add up to {lengths.sum()}, found {len(values)} ids")

    def _numbers(self, field: Field, values: AnyArray, rows: int) -> AnyArray:
        if values.shape not in ((rows, field.dim), *([(rows,)] if field.dim == 1 else [])):
            raise DataError(
                f"field {field.name!r}: needs {rows} rows of {field.dim} numbers, found shape {values.shape}"
            )
        with np.errstate(over="ignore"):
            numbers = values.reshape(rows, field.dim).astype(np.float32)
        if np.isinf(numbers).any():
            row = int(np.nonzero(np.isinf(numbers).any(1))[0][0])
            raise DataError(f"field {field.name!r}: infinite (or too large for float32) in row {row} of a chunk")
        return numbers[:, 0] if field.dim == 1 else numbers

    def _labels(self, name: str, values: AnyArray) -> AnyArray:
        real = values.astype(np.float32)
        if not np.isfinite(real).all():
            row = int(np.nonzero(~np.isfinite(real))[0][0])
            raise DataError(f"label {name!r} must be a number, found {values[row]!r} in row {row} of a chunk")
        whole = (real >= 0) & (real <= 255) & (real == np.floor(real))
        return real.astype(np.uint8) if whole.all() else real

    def close(self, final: Schema) -> dict[str, Any]:
        """Finish the files, named by the final schema; return the entry of ``dataset.json``."""
        self._closed = True
        if not self.rows:
            raise DataError(f"day {self.name!r} has no rows")
        position = {name: index for index, name in enumerate(final.names)}
        kept: dict[str, str] = {}
        for index, field in enumerate(self.schema):
            here = [field_file(index, part) for part in PARTS]
            if field.name not in position:
                for file in here:
                    if self._columns.pop(file, None):
                        (self.folder / file).unlink()
                continue
            largest = self._largest.get(field.name, 0)
            if field.kind != "numeric" and largest >= final.fields[position[field.name]].cardinality:
                raise id_range_error(final[field.name], largest, f"day {self.name!r}")
            there = (field_file(position[field.name], part) for part in PARTS)
            kept.update(zip(here, there, strict=True))
        files = {kept.get(file, file): column.close() for file, column in self._columns.items()}
        moved = [(file, kept[file]) for file in self._columns if kept.get(file, file) != file]
        for file, new in moved:
            (self.folder / file).rename(self.folder / f"{new}.moved")
        for _, new in moved:
            (self.folder / f"{new}.moved").rename(self.folder / new)
        return {
            "name": self.name,
            "rows": self.rows,
            "positives": self.positives,
            "negative_rate": self.negative_rate,
            "files": dict(sorted(files.items())),
        }


def id_range_error(field: Field, found: int, where: str) -> DataError:
    """Build the error for an id that the schema has no room for."""
    return DataError(
        f"{where}: field {field.name!r} has id {found}, but its cardinality is {field.cardinality} "
        f"(ids 0 to {field.cardinality - 1}); prepare the log again, or correct the schema"
    )


class DatasetWriter:
    """Write a Dataset in chunks; the folder appears at ``out`` complete, at the end of the block, or never.

    Args:
        out: the folder to make. It must not exist, or be empty, unless ``replace``.
        schema: the fields. Cardinalities may still be 0: assign ``writer.schema`` before the block ends.
            The final schema may leave fields out (constant ones, say) and change anything but their kinds.
        fingerprint: text that identifies source and settings.
        settings: JSON values kept with the Dataset: how it was made.
        replace: put the new Dataset in the place of one that is already there.

    >>> import tempfile, numpy as np
    >>> from lpfs.schema import Field
    >>> out = tempfile.mkdtemp() + "/log"
    >>> schema = Schema((Field("ad", cardinality=4),), label="click")
    >>> with DatasetWriter(out, schema, fingerprint="1") as writer:
    ...     day = writer.day("2014-05-01")
    ...     day.append(ids={"ad": np.array([2, 3, 0])}, labels={"click": np.array([0, 1, 0])})

    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        schema: Schema,
        *,
        fingerprint: str,
        settings: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        self.out = Path(os.path.abspath(out))
        self.schema = schema
        self.fingerprint = fingerprint
        self.settings = dict(settings or {})
        self._first = schema
        self._replace = replace
        self._days: dict[str, DayWriter] = {}
        self._vocabularies: dict[str, dict[str, Any]] = {}
        self._attached: dict[str, dict[str, Any]] = {}
        self._place: Workplace | None = None
        for field in schema:
            if field.kind == "cross":
                raise FieldError(f"field {field.name!r}: a cross is made by the model and cannot be stored")

    def __enter__(self) -> DatasetWriter:
        with convert_write_errors(self.out):
            self._place = Workplace(self.out, replace=self._replace)
            (self.folder / "days").mkdir()
            (self.folder / "vocab").mkdir()
        return self

    @property
    def folder(self) -> Path:
        """The temporary folder that is being filled."""
        if self._place is None:
            raise StateError("a DatasetWriter writes inside its `with` block only")
        return self._place.folder

    def day(self, name: str, *, negative_rate: float = 1.0) -> DayWriter:
        """Open the next day, in time order; several days may be open at once.

        ``negative_rate`` is the share of the negatives that was kept, for calibration.
        """
        if name in self._days:
            raise DataError(f"day {name!r} is opened twice; append to the first one")
        with convert_write_errors(self.out):
            folder = self.folder / day_folder(len(self._days))
            folder.mkdir()
        self._days[name] = DayWriter(name, folder, self._first, negative_rate)
        return self._days[name]

    def vocabulary(self, name: str, values: Any, **about: Any) -> None:
        """Keep the raw values of a field in id order, and JSON values that say what they are."""
        index = self._first.names.index(self._first[name].name)
        buffer = io.BytesIO()
        save_vocabulary(buffer, values)
        self._put(vocabulary_file(index), buffer.getvalue())
        self._vocabularies[name] = {"size": len(values), "about": about}

    def attach(self, name: str, values: Any) -> None:
        """Keep JSON values in a file of their own beside ``dataset.json``."""
        if Path(name).name != name or name in ("dataset.json", "schema.json"):
            raise DataError(f"cannot attach a file named {name!r}; use a plain name such as 'report.json'")
        self._put(name, (json.dumps(values, indent=1) + "\n").encode())
        self._attached[name] = self._entry(name)

    def _put(self, relative: str, data: bytes) -> None:
        with convert_write_errors(self.out):
            (self.folder / relative).write_bytes(data)

    def _entry(self, relative: str) -> dict[str, Any]:
        path = self.folder / relative
        return {"bytes": path.stat().st_size, "checksum": file_checksum(path)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        try:
            if kind is None:
                self._place = place
                with convert_write_errors(self.out):
                    self._finish()
                    place.commit()
        finally:
            self._place = None
            place.discard()
        if isinstance(error, OSError) and error.errno in FULL:
            raise DataError(_write_error_text(self.out, error)) from error

    def _finish(self) -> None:
        final, first = self.schema, self._first
        for field in final:
            if field.kind != first[field.name].kind:
                raise FieldError(
                    f"field {field.name!r} was opened as {first[field.name].kind} and is {field.kind} now"
                )
        days = [day.close(final) for day in self._days.values()]
        vocabularies: dict[str, Any] = {}
        for old, name in enumerate(first.names):
            path = self.folder / vocabulary_file(old)
            if name not in final.names:
                path.unlink(missing_ok=True)
            elif name in self._vocabularies:
                new = vocabulary_file(final.names.index(name))
                path.rename(self.folder / f"{new}.moved")
                vocabularies[new] = self._vocabularies[name]
        for relative, about in vocabularies.items():
            (self.folder / f"{relative}.moved").rename(self.folder / relative)
            about.update(self._entry(relative))
        write_json(self.folder / "schema.json", final.to_json())
        values: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "lpfs": lpfs.__version__,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "days": days,
            "vocabularies": vocabularies,
            "files": {"schema.json": self._entry("schema.json"), **self._attached},
        }
        values = json.loads(json.dumps(values))
        write_json(self.folder / "dataset.json", {**values, "checksum": json_checksum(values)})
        fsync_tree(self.folder)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _write_error_text(out: Path, error: OSError) -> str:
    """Say that something cannot be written, and what to do."""
    reason = error.strerror or error
    cure = "free some space or choose" if error.errno in FULL else "choose"
    return f"cannot write {out}: {reason}; {cure} another place; nothing was kept"


@contextmanager
def convert_write_errors(out: Path) -> Iterator[None]:
    """Turn failures of the file system into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(_write_error_text(out, error)) from error
