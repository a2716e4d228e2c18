"""DatasetWriter: chunks of columns in, a complete Dataset folder out, or nothing at all."""

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

import lpfs
from lpfs.data.store.day import DayWriter
from lpfs.data.store.format import FORMAT, VERSION, day_folder, file_checksum, json_checksum, save_vocabulary, sync_all, vocabulary_file, write_json
from lpfs.data.store.temporary import Workplace
from lpfs.errors import DataError, FieldError, StateError
from lpfs.schema import Schema


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
        with telling(self.out):
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
        with telling(self.out):
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
        with telling(self.out):
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
                with telling(self.out):
                    self._finish()
                    place.commit()
        finally:
            self._place = None
            place.discard()
        if isinstance(error, OSError) and error.errno in FULL:
            raise DataError(unwritten(self.out, error)) from error

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
        sync_all(self.folder)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritten(out: Path, error: OSError) -> str:
    """Say that something cannot be written, and what to do."""
    reason = error.strerror or error
    cure = "free some space or choose" if error.errno in FULL else "choose"
    return f"cannot write {out}: {reason}; {cure} another place; nothing was kept"


@contextmanager
def telling(out: Path) -> Iterator[None]:
    """Turn failures of the file system into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(unwritten(out, error)) from error
