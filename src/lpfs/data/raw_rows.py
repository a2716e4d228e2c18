"""Raw rows of a stream or a request as a Batch, encoded as a Dataset was; rows that cannot be encoded are named.

Rows are encoded as tables of polars, whose calls take longest if the rows are few. After ``build_lookup``, rows with
plain values are encoded without it: texts and integers are looked up in one hash table, numbers are scaled together,
and what polars returned for other values (bags, hashed values) of rows without labels is remembered.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs.data.batch import Batch, RowBlock, concat_rows
from lpfs.data.encoders.categorical import encode_texts, is_text_vocabulary
from lpfs.data.encoders.numeric import BinningEncoder, MomentsEncoder, NumericEncoder, stack_scales
from lpfs.data.encoders.value_table import ValueTable, read_values
from lpfs.data.parsing import cast_column, first_line
from lpfs.data.passes import WRITER_ARGUMENTS, read_label
from lpfs.data.reencode import Like, RowEncoder, gather_columns
from lpfs.data.store.format import UNSEEN_ID
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, FieldError, InputError

Rows = Sequence[Mapping[str, object]] | pl.DataFrame
Columns = dict[str, dict[str, Any]]  # {argument of ``DayWriter.append``: {field: array}}
Reader = Callable[[pl.Series], Any]
Positions = npt.NDArray[np.int64]
SCALARS = (str, int, float, bool)
READ_ERRORS = (DataError, TypeError, ValueError, OverflowError, pl.exceptions.PolarsError)
PLAIN_ERRORS = (LookupError, *READ_ERRORS)
NO_FIELDS: frozenset[str] = frozenset()
ABSENT = "the field is absent; give null for a missing value"
MAX_MEMO = 1 << 20  # remembered values of all fields together, about 150 MB
MEMO_TEXT = 256  # characters; longer texts are not remembered


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be encoded: its position in the input, the field, and what is wrong."""

    row: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}, field {self.field!r}: {self.reason}"


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows, and what was refused.

    Args:
        batch: the accepted rows, in their order; labels are 0 where no labels were requested.
        accepted: (B,) positions of these rows in the input.
        refused: the other rows, in their order; the first invalid field of each.
        unseen: number of values by field that share the id of unseen values.
        absent: the optional fields that a row did not have.
    """

    batch: Batch
    accepted: Positions
    refused: tuple[RefusedRow, ...]
    unseen: Mapping[str, int]
    absent: Collection[str] = ()

    def require_all(self, rows: str) -> Batch:
        """Return the batch; raise InputError, which says what ``rows`` they are, if one was refused."""
        if self.refused:
            raise InputError(f"{rows} cannot be encoded: {self.refused[0]}")
        return self.batch


class Refusals(dict[int, RefusedRow]):
    """The first problem of each row."""

    def add(self, row: int, field: str, reason: str) -> None:
        """Refuse a row, unless it was refused before."""
        self.setdefault(int(row), RefusedRow(int(row), field, reason))


class RawRowEncoder(RowEncoder):
    """Encodes raw rows with the vocabularies, scales, bins and hashes of a Dataset; invalid rows do not stop it.

    Args:
        like: a Dataset that ``prepare`` made, its path, or a folder that ``save`` wrote.
        fields: only these of its fields, in its order; the others may be absent from the rows.

    An accepted row gets bit for bit the ids and numbers that ``prepare(…, like=…)`` stores for the same raw values,
    whatever the other rows are.
    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        super().__init__(like, fields)
        self._table = ValueTable(self.encoders, None if self.options.strip else self.options.missing)
        self.memos: dict[str, dict[Any, Any]] = {name: {} for name in self.schema.names}
        self.memo_limit = max(1024, MAX_MEMO // len(self.schema))
        self._set_fields(self.schema.names)

    def subset(self, fields: Sequence[str]) -> RawRowEncoder:
        """Return an encoder of some of the fields, which shares the vocabularies and the memory of this one."""
        part = copy.copy(self)
        part._set_fields(fields)
        return part

    def _set_fields(self, names: Sequence[str]) -> None:
        if not names:
            raise FieldError("no field is requested; name at least one")
        self.schema = self.schema.subset(names)
        self.encoders = tuple(encoder for encoder in self.encoders if encoder.name in self.schema.names)
        self._texts = [encoder for encoder in self.encoders if is_text_vocabulary(encoder)]
        self._ids, dense = (
            [field.name for field in self.schema if field.kind == kind] for kind in ("categorical", "numeric")
        )
        self._fields = self._table.choose(self.schema.names)  # how rows are looked up
        single = [encoder for encoder in self.encoders if encoder.plan.width == 1]
        scaled = [encoder for encoder in single if isinstance(encoder, NumericEncoder)]
        self._binned = [encoder for encoder in single if isinstance(encoder, BinningEncoder)]
        self._numbers, self._scale = [item.name for item in (*scaled, *self._binned)], stack_scales(scaled)
        self._found = [*self._fields.texts, *self._fields.integers]
        self._others = [item for item in self.encoders if item.name not in {*self._found, *self._numbers}]
        in_order = self._ids == self._found and [item.name for item in scaled] == dense
        self._is_plain = in_order and not self._others

    def build_lookup(self) -> None:
        """Make the hash table for few rows; it takes memory and time like the vocabularies themselves."""
        _ = self._table.slots

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that is needed to encode rows to a new folder: a Dataset of these fields with one row."""
        like, schema = self.like, self.schema
        settings = {**like.settings, "fields": {name: like.settings["fields"][name] for name in schema.names}}
        with DatasetWriter(folder, schema, fingerprint=like.fingerprint, settings=settings) as writer:
            for name in schema.names:
                if (values := like.vocabulary(name)) is not None:
                    writer.vocabulary(name, values, **like.vocabulary_about(name))
            zero = np.zeros(1, np.int64)
            columns: Columns = {"ids": {}, "dense": {}, "bags": {}}
            for field in schema:
                rows = {"numeric": np.zeros((1, field.dim)), "multi": (np.zeros(0, np.int64), zero)}
                columns[WRITER_ARGUMENTS[field.kind]][field.name] = rows.get(field.kind, zero)
            writer.day("none").append(**columns, labels=dict.fromkeys((schema.label, *schema.tasks), zero))

    def encode(self, rows: Rows, *, labelled: bool = False, optional: Collection[str] = ()) -> EncodedRows:
        """Encode rows: mappings from field to raw value (None: missing), or a polars frame.

        With ``labelled`` the label and the tasks are read too. A row without one of the fields is refused, unless the
        field is ``optional``.
        """
        targets = (self.schema.label, *self.schema.tasks) if labelled else ()
        try:
            block = self._encode_plain(rows, targets) if self._table.is_built and isinstance(rows, list) else None
        except PLAIN_ERRORS:
            block = None
        refused, absent = Refusals(), NO_FIELDS
        if block is None:
            accepted, block = self._encode_tables(rows, targets, optional, refused)
            absent = find_absent(rows, [name for name in optional if name in self.schema.names])
        else:
            accepted = np.arange(len(block))
        unseen = {name: int(np.count_nonzero(values == UNSEEN_ID)) for name, (values, _) in block.bags.items()}
        if np.count_nonzero(is_unseen := block.ids == UNSEEN_ID):
            unseen |= dict(zip(self._ids, np.count_nonzero(is_unseen, 0).tolist(), strict=True))
        unseen = {name: count for name, count in unseen.items() if count}
        return EncodedRows(block.batch(), accepted, tuple(refused[row] for row in sorted(refused)), unseen, absent)

    def _encode_plain(self, rows: list[Any], targets: Sequence[str]) -> RowBlock | None:
        """Return rows without tables; raise one of PLAIN_ERRORS if a field is absent or has an unexpected type."""
        if not rows:
            return None
        ids, count = self._table.look_up(rows, self._fields), len(rows)
        scaled = np.empty((count, 0), np.float32)
        if self._numbers:
            numbers = np.array(read_values(rows, self._numbers, (float, int, NoneType)), np.float64)
            numbers = numbers.reshape(count, len(self._numbers))
            numbers[np.isinf(numbers)] = np.nan
            scaled = self._scale(numbers[:, : len(self._numbers) - len(self._binned)])
        labels = np.zeros((count, 1 + len(self.schema.tasks)), np.float32)
        for number, name in enumerate(targets):
            column = pl.Series(name, read_values(rows, (name,), (int, float, bool)))
            labels[:, number] = read_label(column, self.options, _no_location)
        if self._is_plain:
            if self._numbers and (missing := np.isnan(scaled)).any():
                scaled[missing] = 0.0
                return RowBlock(ids, scaled, labels, missing)
            return RowBlock(ids, scaled, labels)
        columns: Columns = {"ids": dict(zip(self._found, ids.T, strict=True)), "bags": {}}
        columns["dense"] = dict(zip(self._numbers, scaled.T, strict=False))
        for number, binning in enumerate(self._binned, scaled.shape[1]):
            columns["ids"][binning.name] = binning.bin(numbers[:, number])
        for encoder, values in zip(self._others, self._encode_others(rows, not targets), strict=True):
            columns[WRITER_ARGUMENTS[encoder.kind]][encoder.name] = values
        names = (self.schema.label, *self.schema.tasks)
        return gather_columns(self.schema, columns, dict(zip(names, labels.T, strict=True)))

    def _encode_others(self, rows: list[Any], remember: bool) -> list[Any]:
        """Return the columns of the fields that are neither looked up nor numbers, from memory if all are known."""
        names = [encoder.name for encoder in self._others]
        if remember:
            with suppress(KeyError, TypeError):
                codes = [[self.memos[name][memo_key(row[name])] for row in rows] for name in names]
                return [join_codes(encoder.kind, column) for encoder, column in zip(self._others, codes, strict=True)]
        [(_, frame), *mixed] = self._tabulate(rows, names, (), refused := Refusals())
        if refused or mixed:
            raise TypeError
        frame = self.clean(frame)
        columns = [encoder.encode(frame[encoder.name], _no_location) for encoder in self._others]
        for name, column in zip(names, columns, strict=True) if remember else ():
            if len(self.memos[name]) + len(rows) > self.memo_limit:
                self.memos[name] = {}
            for row, code in zip(rows, split_codes(column), strict=True):
                with suppress(KeyError, TypeError):
                    self.memos[name][memo_key(row[name])] = code
        return columns

    def _encode_tables(
        self, rows: Rows, targets: Sequence[str], optional: Collection[str], refused: Refusals
    ) -> tuple[Positions, RowBlock]:
        """Return the accepted rows and their positions in the input, whatever the rows are."""
        names = (*self.schema.names, *targets)
        if isinstance(rows, pl.DataFrame):
            absent = [name for name in names if name not in rows.columns]
            for name in (name for name in absent if name not in optional):
                for row in range(rows.height):
                    refused.add(row, name, ABSENT)
            frame = rows.with_columns(pl.lit(None).alias(name) for name in absent).select(names)
            frames = [(np.arange(rows.height), frame)]
        else:
            frames = self._tabulate(rows, names, optional, refused)
        parts = [self._encode_frame(positions, frame, targets, refused) for positions, frame in frames]
        accepted, block = parts[0]
        if len(parts) > 1:
            accepted = np.concatenate([positions for positions, _ in parts])
            order = np.argsort(accepted)
            accepted, block = accepted[order], concat_rows([with_missing(part) for _, part in parts]).take(order)
        return accepted, block

    def _encode_frame(
        self, positions: Positions, frame: pl.DataFrame, targets: Sequence[str], refused: Refusals
    ) -> tuple[Positions, RowBlock]:
        """Return the accepted rows of a table, and their positions in the input."""
        frame = self.clean(frame)
        labels, columns, failed = self._encode_columns(frame, targets)
        for name, read in failed.items():
            for row, reason in find_invalid(frame[name], read).items():
                refused.add(positions[row], name, reason)
        if refused:
            keep = ~np.isin(positions, list(refused))
            positions, frame = positions[keep], frame.filter(keep)
            if not len(positions):  # a column of a wrong type cannot even be read without rows
                frame = frame.with_columns(pl.lit(None).alias(name) for name in failed)
            labels, columns, _ = self._encode_columns(frame, targets)
        return positions, gather_columns(self.schema, columns, labels)

    def _encode_columns(
        self, frame: pl.DataFrame, targets: Sequence[str]
    ) -> tuple[dict[str, Any], Columns, dict[str, Reader]]:
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
            for encoder in self.encoders
            if encoder.name not in columns["ids"]
        ]
        read_target: Reader = partial(read_label, options=self.options, locate=_no_location)
        readers += [(name, labels, read_target) for name in targets]
        failed: dict[str, Reader] = {}
        for name, results, read in readers:
            try:
                results[name] = read(frame[name])
            except READ_ERRORS:
                failed[name] = read
        return labels, columns, failed

    def _tabulate(
        self, rows: Sequence[Mapping[str, object]], names: Sequence[str], optional: Collection[str], refused: Refusals
    ) -> list[tuple[Positions, pl.DataFrame]]:
        """Return mappings as tables, null where a value is refused.

        A column has one type. Rows with other types are in other tables, so that no row depends on the others.
        """
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Sequence):
            raise InputError(f"rows must be a list of objects or a polars frame, found {type(rows).__name__}")
        for position, row in enumerate(rows):
            if not isinstance(row, Mapping):
                refused.add(position, "", f"a row must be an object of field and value, found {type(row).__name__}")
        rows = [{} if position in refused else row for position, row in enumerate(rows)] if refused else rows
        encoders = {encoder.name: encoder for encoder in self.encoders}
        table, mixed = {}, []
        for name in names:
            try:
                values = [row[name] for row in rows]
            except KeyError:
                for position, row in enumerate(rows):
                    if name not in row and name not in optional:
                        refused.add(position, name, ABSENT)
                values = [row.get(name) for row in rows]
            encoder = encoders.get(name)
            takes_lists = encoder is not None and (encoder.kind == "multi" or encoder.plan.width > 1)
            values = check_values(name, values, takes_lists, refused)
            types = set(map(type, values)) - {NoneType}
            if types == {int, float} and (encoder is None or isinstance(encoder, MomentsEncoder)):
                values = [None if value is None else _to_float(value) for value in values]  # the same number
            elif len(types) > 1:
                mixed.append(name)
            table[name] = values
        groups: dict[tuple[type, ...], list[int]] = {}
        for position, types_of_row in enumerate(zip(*(map(type, table[name]) for name in mixed), strict=True)):
            groups.setdefault(types_of_row, []).append(position)
        return [
            (
                np.array(group, np.int64),
                pl.DataFrame([make_column(name, [values[row] for row in group]) for name, values in table.items()]),
            )
            for group in groups.values() or [range(len(rows))]
        ]


def find_absent(rows: Rows, names: Iterable[str]) -> frozenset[str]:
    """Return the fields that some row does not have."""
    if isinstance(rows, pl.DataFrame):
        return frozenset(names).difference(rows.columns)
    return frozenset(name for name in names if any(isinstance(row, Mapping) and name not in row for row in rows))


def memo_key(value: Any) -> Any:
    """Return a key that no value of another type has; raise KeyError for a value that is not remembered."""
    if type(value) is list:
        value = tuple(value)
    elif type(value) is not str:
        return type(value), value
    if any(type(item) is not str for item in value) or sum(map(len, value)) > MEMO_TEXT:
        raise KeyError
    return value


def split_codes(column: Any) -> list[Any]:
    """Return an encoded column row by row: ids, lists of numbers, or arrays of the ids of a bag."""
    if isinstance(column, tuple):
        values, lengths = column
        return np.split(values, np.cumsum(lengths)[:-1])
    codes: list[Any] = column.tolist()
    return codes


def join_codes(kind: str, codes: list[Any]) -> Any:
    """Return the column that ``split_codes`` took apart."""
    if kind == "multi":
        return np.concatenate(codes), np.array(list(map(len, codes)))
    return np.array(codes, np.float32 if kind == "numeric" else np.int32)


def check_values(name: str, values: list[Any], takes_lists: bool, refused: Refusals) -> list[Any]:
    """Return raw values, None where a type cannot be used."""
    types = set(map(type, values)) - {NoneType, *SCALARS}
    if not types:
        return values
    expected = "a list of texts or numbers" if takes_lists else "one value: text, a number, true, false or null"
    result = []
    for row, value in enumerate(values):
        is_list = takes_lists and type(value) in (list, tuple)
        usable = value is None or type(value) in SCALARS
        if is_list:
            usable = all(item is None or type(item) in SCALARS for item in value)
        if not usable:
            refused.add(row, name, f"{type(value).__name__} {value!r:.60} cannot be used; give {expected}")
        result.append((list(value) if is_list else value) if usable else None)
    return result


def make_column(name: str, values: list[Any]) -> pl.Series:
    """Return values of one type as a column: of their type, or as text, as integers of more than 64 bits are."""
    try:
        return pl.Series(name, values, strict=True)
    except (TypeError, OverflowError, ValueError, pl.exceptions.PolarsError):
        texts = [list(map(_to_text, value)) if isinstance(value, list) else _to_text(value) for value in values]
        return pl.Series(name, texts)


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


def with_missing(block: RowBlock) -> RowBlock:
    """Return rows that say which numbers are missing, also if none is."""
    return block if block.missing is not None else replace(block, missing=np.zeros(block.dense.shape, bool))


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float(np.clip(value, -1e300, 1e300))


def _to_text(value: Any) -> str | None:
    """Return a value as the text that a cast of its column gives."""
    if value is None or isinstance(value, str):
        return value
    text: str = str(value) if type(value) is int else cast_column(pl.Series([value]), pl.String)[0]
    return text


def _reason(error: BaseException) -> str:
    return first_line(error).removeprefix(": ")


def _no_location(_row: int) -> str:
    return ""
