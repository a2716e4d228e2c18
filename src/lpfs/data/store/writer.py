"""DatasetWriter: write a Dataset in chunks of columns; the directory appears only when it is complete."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import lpfs
from lpfs._fileio import (
    StagingDirectory,
    file_checksum,
    fsync_tree,
    json_checksum,
    pause_garbage_collection,
    write_json,
)
from lpfs.data.store.columns import FolderWriter, WriteBuffer
from lpfs.data.store.format import (
    COLUMN_PARTS,
    FILE_NAME,
    FORMAT,
    VERSION,
    VOCABULARIES,
    AnyArray,
    day_folder,
    encode_vocabulary,
    field_column,
    id_dtype,
    id_range_error,
    label_column,
    vocabulary_column,
)
from lpfs.errors import DataError, FieldError, StateError
from lpfs.schema import Field, Schema

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OFFSETS_SUFFIX, MISSING_SUFFIX = ".offsets", ".missing"  # see field_column


class DatasetWriter:
    """Write a Dataset in chunks; the directory appears at ``out`` when the block ends without an error.

    Args:
        out: the directory to create. It must not exist or be empty, unless ``replace``.
        schema: the fields. Cardinalities may be 0 at first: assign ``writer.schema`` before the block ends.
            The final schema may omit fields (constant ones, for example) and change everything but their kinds.
        fingerprint: text that identifies source and settings.
        settings: JSON values stored with the Dataset, for example how it was made.
        replace: replace a Dataset that exists at ``out``.

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
        self.schema = self._initial_schema = schema
        self.fingerprint, self.settings = fingerprint, dict(settings or {})
        self._replace = replace
        self._days: dict[str, DayWriter] = {}
        self._buffer = WriteBuffer()
        self._metadata: dict[str, dict[str, Any]] = {}  # of the vocabularies
        self._staging: StagingDirectory | None = None
        for field in schema:
            if field.kind == "cross":
                raise FieldError(f"field {field.name!r}: a cross is computed by the model and cannot be stored")

    def __enter__(self) -> DatasetWriter:
        with convert_write_errors(self.out):
            self._staging = StagingDirectory(self.out, replace=self._replace)
            (self.folder / "days").mkdir()
            (self.folder / VOCABULARIES).mkdir()
        self._vocabularies = FolderWriter(self.folder / VOCABULARIES, self._buffer)
        return self

    @property
    def folder(self) -> Path:
        """The temporary directory that is being written."""
        if self._staging is None:
            raise StateError("a DatasetWriter can only write inside its `with` block")
        return self._staging.path

    def day(self, name: str, *, negative_rate: float = 1.0) -> DayWriter:
        """Add the next day, in time order; several days may be written in parallel.

        ``negative_rate`` is the fraction of the negatives that was kept, for calibration.
        """
        if name in self._days:
            raise DataError(f"day {name!r} was opened twice; append to the first one")
        with convert_write_errors(self.out):
            folder = self.folder / day_folder(len(self._days))
            folder.mkdir()
        self._days[name] = DayWriter(name, FolderWriter(folder, self._buffer), self._initial_schema, negative_rate)
        return self._days[name]

    def vocabulary(self, name: str, values: Any, **metadata: Any) -> None:
        """Store the raw values of a field in id order, and JSON values that describe them."""
        index = self._initial_schema.index(name)
        if name in self._metadata:
            raise DataError(f"the vocabulary of field {name!r} was stored twice; store it once")
        with convert_write_errors(self.out):
            for part, column in encode_vocabulary(values).items():
                self._vocabularies.append(vocabulary_column(index, part), column)
        self._metadata[name] = metadata

    def attach(self, name: str, values: Any) -> None:
        """Store JSON values in a separate file next to ``dataset.json``."""
        if "/" in name or not FILE_NAME.fullmatch(name) or name in ("dataset.json", "schema.json"):
            raise DataError(f"cannot attach a file named {name!r}; use a plain name such as 'report.json'")
        with convert_write_errors(self.out):
            write_json(self.folder / name, values)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._staging is None:
            return
        try:
            if kind is None:
                with convert_write_errors(self.out):
                    self._finish()
                    self._staging.commit()
        finally:
            self._staging.discard()
            self._staging = None
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            with convert_write_errors(self.out):
                raise error

    @pause_garbage_collection()
    def _finish(self) -> None:
        final, initial = self.schema, self._initial_schema
        for field in final:
            if field.kind != (kind := initial[field.name].kind):
                raise FieldError(
                    f"field {field.name!r} was written as {kind}, but the final schema says {field.kind}; keep the kind"
                )
        days = [day.close(final) for day in self._days.values()]
        new_names: dict[str, str] = {}
        metadata: dict[str, dict[str, Any]] = {}
        kept = set(final.names)
        for old, name in enumerate(initial.names):
            if name in self._metadata and name in kept:
                new = final.index(name)
                metadata[vocabulary_column(new)] = self._metadata[name]
                new_names.update({vocabulary_column(old, part): vocabulary_column(new, part) for part in ("", "ends")})
        new_names = {old: new for old, new in new_names.items() if old in self._vocabularies.columns}
        metadata = json.loads(json.dumps(metadata))  # the checksum is that of the values in the file
        vocabularies = {"columns": self._vocabularies.close(new_names), "metadata": metadata}
        write_json(self.folder / "schema.json", final.to_json())
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "lpfs": lpfs.__version__,
            "fingerprint": self.fingerprint,
            "settings": json.loads(json.dumps(self.settings)),
            "days": days,
            "vocabularies": vocabularies,
            "files": {
                path.relative_to(self.folder).as_posix(): {
                    "bytes": path.stat().st_size,
                    "checksum": file_checksum(path),
                }
                for path in paths
            },
        }
        write_json(self.folder / "dataset.json", {**manifest, "checksum": json_checksum(manifest)})
        fsync_tree(self.folder)


class DayWriter:
    """Write the rows of one day; created by ``DatasetWriter.day``."""

    def __init__(self, name: str, folder: FolderWriter, schema: Schema, negative_rate: float) -> None:
        if not 0.0 < negative_rate <= 1.0:
            raise DataError(f"day {name!r}: negative_rate must be in (0, 1], found {negative_rate!r}")
        self.name, self.folder, self.schema, self.negative_rate = name, folder, schema, negative_rate
        self.rows = self.positives = 0
        self._largest: dict[str, int] = {}
        self._closed = False

    @pause_garbage_collection()
    def append(
        self,
        *,
        ids: Mapping[str, AnyArray] | None = None,
        dense: Mapping[str, AnyArray] | None = None,
        bags: Mapping[str, tuple[AnyArray, AnyArray]] | None = None,
        labels: Mapping[str, AnyArray],
    ) -> None:
        """Append rows: every field of the schema and every label, all with the same number of rows.

        Args:
            ids: (n,) integers for each categorical field.
            dense: (n,) or (n, w) numbers for each numeric field; NaN is a missing number.
            bags: for each multi field its ids, row after row, and the (n,) lengths of the rows.
            labels: (n,) numbers for the label and for each task.

        All columns are checked before anything is written.
        """
        if self._closed:
            raise StateError(f"day {self.name!r} is closed; append rows before the `with` block ends")
        ids, dense, bags = ids or {}, dense or {}, bags or {}
        self._check_names({**ids, **dense, **bags}, labels)
        rows = len(np.asarray(labels[self.schema.label]))
        parts: dict[str, AnyArray] = {}
        arguments: dict[str, Mapping[str, Any]] = {"categorical": ids, "numeric": dense, "multi": bags}
        for index, field in enumerate(self.schema):
            column = arguments[field.kind].get(field.name)
            if column is None:
                raise FieldError(
                    f"field {field.name!r} is {field.kind}, but was passed as another kind; "
                    "pass categorical fields in ids, numeric ones in dense, multi ones in bags"
                )
            if field.kind == "multi":
                values, lengths = np.asarray(column[0]), self._check_rows(field.name, column[1], rows)
                self._check_bag(field, values, lengths)
                parts[field_column(index)] = self._check_ids(field, values)
                parts[field_column(index, "offsets")] = np.cumsum(lengths, dtype=np.int64)
            elif field.kind == "numeric":
                values = self._check_numbers(field, np.asarray(column), rows)
                missing = parts[field_column(index, "missing")] = np.isnan(values)
                values[missing] = 0.0
                parts[field_column(index)] = values
            else:
                parts[field_column(index)] = self._check_ids(field, self._check_rows(field.name, column, rows))
        for index, name in enumerate((self.schema.label, *self.schema.tasks)):
            parts[label_column(index)] = self._check_labels(name, self._check_rows(name, labels[name], rows))
        for name, part in parts.items():
            self._write(name, part)
        self.rows += rows
        self.positives += int(np.count_nonzero(parts[label_column(0)]))

    def _write(self, name: str, part: AnyArray) -> None:
        """Append checked values to a column; create it when it is first needed."""
        is_new = name not in self.folder.columns
        width = part.shape[1] if part.ndim == 2 else 1
        if name.endswith(MISSING_SUFFIX):
            if is_new and not part.any():
                return
            part = part.view(np.uint8)
            if is_new:
                self.folder.append_zeros(name, self.rows * width, width)
        elif name.endswith(OFFSETS_SUFFIX):
            if is_new:
                self.folder.append(name, np.zeros(1, np.int64))
            values = self.folder.columns[name.removesuffix(OFFSETS_SUFFIX)]
            part = part + (values.items - (part[-1] if part.size else 0))
        self.folder.append(name, part, width)

    def _check_names(self, columns: Mapping[str, Any], labels: Mapping[str, Any]) -> None:
        targets = (self.schema.label, *self.schema.tasks)
        for kind, names, expected in (("field", columns, self.schema.names), ("label", labels, targets)):
            if different := names.keys() ^ set(expected):
                name = next(name for name in (*expected, *names) if name in different)
                problem = "is not in the schema" if name in names else "is missing"
                raise FieldError(f"day {self.name!r}: {kind} {name!r} {problem}")

    def _check_rows(self, name: str, column: Any, rows: int) -> AnyArray:
        values = np.asarray(column)
        if values.shape != (rows,):
            raise DataError(
                f"day {self.name!r}: {name!r} needs one value for each of {rows} rows, found shape {values.shape}"
            )
        return values

    def _check_ids(self, field: Field, values: AnyArray) -> AnyArray:
        if values.dtype.kind not in "iub":
            raise DataError(f"field {field.name!r}: ids must be integers, found {values.dtype}")
        if not values.size:
            return values.astype(np.uint8)
        if values.dtype.kind == "i" and int(values.min()) < 0:
            raise DataError(f"field {field.name!r}: an id must not be negative, found {values.min()}")
        largest = int(values.max())
        if field.cardinality and largest >= field.cardinality:
            raise id_range_error(field, largest, self.name)
        self._largest[field.name] = max(self._largest.get(field.name, 0), largest)
        return values.astype(id_dtype(max(largest, field.cardinality - 1)))

    def _check_bag(self, field: Field, values: AnyArray, lengths: AnyArray) -> None:
        if values.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise DataError(f"field {field.name!r}: a bag needs a flat array of ids and (n,) lengths >= 0")
        if int(lengths.sum()) != len(values):
            raise DataError(
                f"field {field.name!r}: the lengths add up to {lengths.sum()}, but there are {len(values)} ids"
            )

    def _check_numbers(self, field: Field, values: AnyArray, rows: int) -> AnyArray:
        if values.shape not in ((rows, field.dim), *([(rows,)] if field.dim == 1 else [])):
            raise DataError(f"field {field.name!r}: needs {rows} rows of {field.dim} numbers, found {values.shape}")
        with np.errstate(over="ignore"):
            numbers = values.reshape(rows, field.dim).astype(np.float32)
        if np.isinf(numbers).any():
            row = int(np.nonzero(np.isinf(numbers).any(1))[0][0])
            raise DataError(f"field {field.name!r}: infinite (or too large for float32) in row {row} of a chunk")
        return numbers[:, 0] if field.dim == 1 else numbers

    def _check_labels(self, name: str, values: AnyArray) -> AnyArray:
        numbers = values.astype(np.float32)
        if not np.isfinite(numbers).all():
            row = int(np.nonzero(~np.isfinite(numbers))[0][0])
            raise DataError(f"label {name!r} must be a finite number, found {values[row]!r} in row {row} of a chunk")
        small_integers = (numbers >= 0) & (numbers <= 255) & (numbers == np.floor(numbers))
        return numbers.astype(np.uint8) if small_integers.all() else numbers

    def close(self, final: Schema) -> dict[str, Any]:
        """Finish the files and name them by the final schema; return the day's entry in ``dataset.json``."""
        self._closed = True
        if not self.rows:
            raise DataError(f"day {self.name!r} has no rows; append some, or do not open the day")
        position = {name: index for index, name in enumerate(final.names)}
        new_names = {label_column(index): label_column(index) for index in range(1 + len(self.schema.tasks))}
        for index, field in enumerate(self.schema):
            if field.name not in position:
                continue
            new_index, largest = position[field.name], self._largest.get(field.name, 0)
            if field.kind != "numeric" and largest >= final.fields[new_index].cardinality:
                raise id_range_error(final.fields[new_index], largest, self.name)
            for part in COLUMN_PARTS:
                if (name := field_column(index, part)) in self.folder.columns:
                    new_names[name] = field_column(new_index, part)
        return {
            "name": self.name,
            "rows": self.rows,
            "positives": self.positives,
            "negative_rate": self.negative_rate,
            "columns": self.folder.close(new_names),
        }


@contextmanager
def convert_write_errors(out: Path) -> Iterator[None]:
    """Raise DataError with the output directory in place of an OSError."""
    try:
        yield
    except OSError as error:
        advice = "free some space or choose" if error.errno in DISK_FULL_ERRORS else "choose"
        reason = f"{error.strerror or error}; {advice} another place; nothing was written"
        raise DataError(f"cannot write {out}: {reason}") from error
