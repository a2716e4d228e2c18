"""Raw rows of a stream or a request as a Batch, encoded as a Dataset was; rows that cannot be encoded are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.batch import Batch, RowBlock
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import encode_texts, is_text_vocabulary
from lpfs.data.parsing import cast_column, decode_dictionary_columns, first_line, replace_missing_marks, strip_blanks
from lpfs.data.passes import WRITER_ARGUMENTS, read_label
from lpfs.data.planning import build_options
from lpfs.data.reencode import Like, gather_columns, open_reference, reference_encoders
from lpfs.data.store.format import UNSEEN_ID
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, FieldError, InputError
from lpfs.schema import Schema

Rows = Sequence[Mapping[str, object]] | pl.DataFrame
Columns = dict[str, dict[str, Any]]  # {argument of ``DayWriter.append``: {field: array}}
Reader = Callable[[pl.Series], Any]
SCALARS = (str, int, float, bool)
READ_ERRORS = (DataError, TypeError, ValueError, OverflowError, pl.exceptions.PolarsError)


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be encoded: its position in the input, the field, and what is wrong."""

    row: int
    field: str
    reason: str


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows, and what was refused.

    Args:
        batch: the accepted rows, in their order; labels are 0 where no labels were requested.
        accepted: (B,) positions of these rows in the input.
        refused: the other rows, in their order; the first invalid field of each.
        unseen: number of values by field that share the id of unseen values.
    """

    batch: Batch
    accepted: npt.NDArray[np.int64]
    refused: tuple[RefusedRow, ...]
    unseen: Mapping[str, int]


class RawRowEncoder:
    """Encodes raw rows with the vocabularies, scales, bins and hashes of a Dataset; invalid rows do not stop it.

    Args:
        like: a Dataset that ``prepare`` made, its path, or a folder that ``save`` wrote.
        fields: only these of its fields, in its order; the others may be absent from the rows.

    An accepted row gets bit for bit the ids and numbers that ``prepare(…, like=…)`` stores for the same raw values.
    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        self.like = open_reference(like)
        self._encoders = reference_encoders(self.like, fields)
        reference = self.like.schema
        self.schema = Schema(tuple(encoder.field for encoder in self._encoders), reference.label, reference.tasks)
        self._options = build_options(self.like.settings["options"])
        self._texts = [encoder for encoder in self._encoders if is_text_vocabulary(encoder)]

    def subset(self, fields: Sequence[str]) -> RawRowEncoder:
        """Return an encoder of some of the fields, which shares the vocabularies of this one."""
        part = object.__new__(RawRowEncoder)
        part.__dict__.update(self.__dict__, schema=self.schema.subset(fields))
        part._encoders = tuple(encoder for encoder in self._encoders if encoder.name in part.schema.names)
        part._texts = [encoder for encoder in self._texts if encoder.name in part.schema.names]
        if not part._encoders:
            raise FieldError("no field is requested; name at least one")
        return part

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields whose texts are looked up in a vocabulary as they are."""
        return () if self._options.strip else tuple(encoder.name for encoder in self._texts)

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """Texts that mean a missing value."""
        return tuple(self._options.missing)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that is needed to encode rows to a new folder: a Dataset of these fields with one row."""
        like, schema = self.like, self.schema
        settings = {**like.settings, "fields": {name: like.settings["fields"][name] for name in schema.names}}
        with DatasetWriter(folder, schema, fingerprint=like.fingerprint, settings=settings) as writer:
            for name in schema.names:
                if (values := like.vocabulary(name)) is not None:
                    writer.vocabulary(name, values, **like.vocabulary_about(name))
            empty, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
            columns: Columns = {"ids": {}, "dense": {}, "bags": {}}
            for field in schema:
                value = (empty, zero) if field.kind == "multi" else zero
                columns[WRITER_ARGUMENTS[field.kind]][field.name] = (
                    np.zeros((1, field.dim)) if field.kind == "numeric" else value
                )
            labels = dict.fromkeys((schema.label, *schema.tasks), zero)
            writer.day("none").append(**columns, labels=labels)

    def encode(self, rows: Rows, *, labelled: bool = False) -> EncodedRows:
        """Encode rows: mappings from field to raw value (None: missing), or a polars frame.

        With ``labelled`` the label and the tasks are read too. A row without one of the fields is refused.
        """
        targets = (self.schema.label, *self.schema.tasks) if labelled else ()
        problems: dict[int, RefusedRow] = {}

        def refuse(row: int, field: str, reason: str) -> None:
            problems.setdefault(row, RefusedRow(row, field, reason))

        is_table = isinstance(rows, pl.DataFrame)
        frame = self._select(rows, targets) if is_table else self._tabulate(rows, targets, refuse)  # type: ignore[arg-type]
        frame = replace_missing_marks(strip_blanks(frame) if self._options.strip else frame, self._options.missing)
        accepted = np.arange(frame.height)
        if problems:
            accepted = np.delete(accepted, list(problems))
        labels, columns, failed = self._encode(frame[accepted] if problems else frame, targets)
        if failed:
            for name, read in failed.items():
                for row, reason in find_invalid(frame[name], read).items():
                    refuse(row, name, reason)
            accepted = np.delete(np.arange(frame.height), list(problems))
            if not len(accepted):  # a column of a wrong type cannot even be read without rows
                frame = frame.with_columns(pl.lit(None).alias(name) for name in failed)
            labels, columns, _ = self._encode(frame[accepted], targets)
        unseen = {encoder.name: count for encoder in self._encoders if (count := count_unseen(encoder, columns))}
        block: RowBlock = gather_columns(self.schema, columns, labels)
        return EncodedRows(block.batch(), accepted, tuple(problems[row] for row in sorted(problems)), unseen)

    def _encode(self, frame: pl.DataFrame, targets: Sequence[str]) -> tuple[dict[str, Any], Columns, dict[str, Reader]]:
        """Return labels, encoded columns, and {column: how it is read} of those with a row that cannot be read."""
        columns: Columns = {"ids": {}, "dense": {}, "bags": {}}
        labels: dict[str, Any] = {
            name: np.zeros(frame.height, np.uint8) for name in (self.schema.label, *self.schema.tasks)
        }
        texts = [encoder for encoder in self._texts if frame[encoder.name].dtype == pl.String]
        if texts:
            ids = encode_texts(texts, [frame[encoder.name] for encoder in texts])
            columns["ids"] = {encoder.name: values for encoder, values in zip(texts, ids, strict=True)}
        readers: list[tuple[str, dict[str, Any], Reader]] = [
            (encoder.name, columns[WRITER_ARGUMENTS[encoder.kind]], partial(encoder.encode, locate=_no_location))
            for encoder in self._encoders
            if encoder.name not in columns["ids"]
        ]
        read_target: Reader = partial(read_label, options=self._options, locate=_no_location)
        readers += [(name, labels, read_target) for name in targets]
        failed: dict[str, Reader] = {}
        for name, results, read in readers:
            try:
                results[name] = read(frame[name])
            except READ_ERRORS:
                failed[name] = read
        return labels, columns, failed

    def _select(self, frame: pl.DataFrame, targets: Sequence[str]) -> pl.DataFrame:
        required = (*self.schema.names, *targets)
        if missing := [name for name in required if name not in frame.columns]:
            raise DataError(f"the rows have no column {missing[0]!r}; they have {', '.join(map(repr, frame.columns))}")
        return decode_dictionary_columns(frame.select(required))

    def _tabulate(
        self, rows: Sequence[Mapping[str, object]], targets: Sequence[str], refuse: Callable[[int, str, str], None]
    ) -> pl.DataFrame:
        """Return mappings as a table, one type per column; null where a value is refused."""
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Sequence):
            raise InputError(f"rows must be a list of objects or a polars frame, found {type(rows).__name__}")
        if any(not isinstance(row, Mapping) for row in rows):
            for position, row in enumerate(rows):
                if not isinstance(row, Mapping):
                    refuse(position, "", f"a row must be an object of field and value, found {type(row).__name__}")
            rows = [row if isinstance(row, Mapping) else {} for row in rows]
        lists = {encoder.name: _takes_lists(encoder) for encoder in self._encoders}
        columns = []
        for name in (*self.schema.names, *targets):
            try:
                values = [row[name] for row in rows]
            except KeyError:
                for position, row in enumerate(rows):
                    if name not in row:
                        refuse(position, name, "the field is absent; give null for a missing value")
                values = [row.get(name) for row in rows]
            columns.append(make_column(name, values, lists.get(name, False), refuse))
        return pl.DataFrame(columns)


def make_column(name: str, values: list[Any], takes_lists: bool, refuse: Callable[[int, str, str], None]) -> pl.Series:
    """Return raw values as a column of one type: numbers, or text where the types are mixed."""
    types = set(map(type, values)) - {type(None)}
    allowed = (*SCALARS, list, tuple) if takes_lists else SCALARS
    if not types <= set(allowed):
        expected = "a list or one value" if takes_lists else "one value: text, a number, true, false or null"
        for row, value in enumerate(values):
            if value is not None and type(value) not in allowed:
                refuse(row, name, f"{type(value).__name__} cannot be used; give {expected}")
        values = [value if type(value) in allowed else None for value in values]
        types &= set(allowed)
    if types & {list, tuple}:
        parts = []
        for row, value in enumerate(values):
            is_list = isinstance(value, (list, tuple))
            if value is not None and not (is_list and all(item is None or type(item) in SCALARS for item in value)):
                refuse(row, name, f"{value!r:.60} cannot be used; give a list of texts or numbers in all rows")
                is_list = False
            parts.append(value if is_list else None)
        flat = make_column(name, [item for value in parts if value for item in value], False, refuse)
        lengths = [None if value is None else len(value) for value in parts]
        return _split_list(name, flat, lengths)
    if len(types) > 1:
        values = _to_floats(values) if types == {int, float} else [_to_text(value) for value in values]
    try:
        return pl.Series(name, values, strict=True)
    except (TypeError, OverflowError, ValueError, pl.exceptions.PolarsError):
        texts = [None if value is None else _to_text(value) for value in values]  # integers of more than 64 bits
        return pl.Series(name, texts, pl.String)


def find_invalid(column: pl.Series, read: Reader) -> dict[int, str]:
    """Return {row: reason} of the rows that cannot be read, by halving; without such rows two calls."""
    try:
        read(column.head(0))
    except READ_ERRORS as error:  # the type of the column
        return dict.fromkeys(range(len(column)), _reason(error))
    invalid, parts = {}, [(0, len(column))]
    while parts:
        start, rows = parts.pop()
        try:
            read(column.slice(start, rows))
        except READ_ERRORS as error:
            half = rows // 2
            if rows == 1:
                invalid[start] = _reason(error)
            else:
                parts += [(start, half), (start + half, rows - half)]
    return invalid


def count_unseen(encoder: Encoder, columns: Columns) -> int:
    """Return how many values of a field have the id of unseen values; 0 for numbers and hashed values."""
    if encoder.kind == "numeric":
        return 0
    values = columns[WRITER_ARGUMENTS[encoder.kind]][encoder.name]
    return int(np.count_nonzero((values[0] if encoder.kind == "multi" else values) == UNSEEN_ID))


def _takes_lists(encoder: Encoder) -> bool:
    return encoder.kind == "multi" or encoder.plan.width > 1


def _to_floats(values: list[Any]) -> list[float | None]:
    try:
        return [None if value is None else float(value) for value in values]
    except OverflowError:
        return [None if value is None else float(np.clip(value, -1e300, 1e300)) for value in values]


def _to_text(value: Any) -> str | None:
    """Return a value as the text that a cast of its column gives."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    text: str = cast_column(pl.Series([value]), pl.String)[0]
    return text


def _split_list(name: str, flat: pl.Series, lengths: list[int | None]) -> pl.Series:
    values, start, lists = flat.to_list(), 0, []
    for length in lengths:
        lists.append(None if length is None else values[start : start + length])
        start += length or 0
    return pl.Series(name, lists, pl.List(flat.dtype))


def _reason(error: BaseException) -> str:
    return first_line(error).removeprefix(": ")


def _no_location(_row: int) -> str:
    return ""
