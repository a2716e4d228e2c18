"""RequestEncoder: JSON rows to a Batch, row by row, with a memory of the values that were encoded before."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from lpfs._imports import Array, compile_loop
from lpfs.data.batch import Batch, bag_offsets
from lpfs.data.hashing import HashTable, splitmix64
from lpfs.data.parsing import first_line
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID
from lpfs.errors import InputError
from lpfs.online.rows import READ_ERRORS, RawRowEncoder, RefusedRow
from lpfs.schema import Field

MAX_MEMO = 1 << 20  # remembered values of all fields together, about 150 MB
CHUNK = 4096  # texts that are hashed while requests wait
NULL = "\0 null"  # stands for null
MAX_TEXT = 256  # longer texts are not remembered
ABSENT = "the field is absent; give null for a missing value"


class RefusedRowsError(InputError):
    """Rows of a request cannot be encoded; ``refused`` names row, field and reason of each."""

    def __init__(self, refused: Sequence[RefusedRow]) -> None:
        first = refused[0]
        super().__init__(f"row {first.row}, field {first.field!r}: {first.reason}")
        self.refused = tuple(refused)


class FieldMemo:
    """The codes of one field by raw value: an id, the numbers, or the ids of a bag."""

    def __init__(self, field: Field, encoder: RawRowEncoder, limit: int) -> None:
        self.field, self.name, self._encoder, self._limit = field, field.name, encoder.subset([field.name]), limit
        self._codes: dict[Any, Any] = {}

    def recall(self, rows: Sequence[Any]) -> list[Any] | None:
        """Return one code per row, or None if a value is new or absent."""
        codes, name = self._codes, self.name
        try:
            return [codes[value if type(value := row[name]) is str else memo_key(value)] for row in rows]
        except (KeyError, TypeError):
            return None

    def _remember(self, value: Any, code: Any) -> None:
        try:
            key = memo_key(value)
            hash(key)
        except (KeyError, TypeError):
            return
        if len(self._codes) >= self._limit:
            self._codes = {}
        self._codes[key] = code

    def encode(self, rows: Sequence[Any], absent: set[str], optional: Collection[str]) -> list[Any]:
        """Return one code per row; raise RefusedRowsError if a value cannot be encoded, or is absent.

        A value is encoded with values of its own type only, so that no row depends on the others of its request.
        """
        refused: list[RefusedRow] = []
        result: list[Any] = [None] * len(rows)
        groups: dict[type, dict[int, Any]] = {}  # type -> row -> value
        for position, row in enumerate(rows):
            if not isinstance(row, Mapping):
                refused.append(RefusedRow(position, "", f"a row must be an object, found {type(row).__name__}"))
            elif self.name not in row and self.name not in optional:
                refused.append(RefusedRow(position, self.name, ABSENT))
            else:
                value = row.get(self.name)
                groups.setdefault(type(value), {})[position] = value
                if self.name not in row:
                    absent.add(self.name)
        for values in groups.values():
            positions = list(values)
            try:
                encoded = self._encoder.encode([{self.name: value} for value in values.values()])
            except READ_ERRORS as error:  # no value of this type can be used
                refused += [RefusedRow(position, self.name, first_line(error)) for position in positions]
                continue
            refused += [RefusedRow(positions[row.row], row.field, row.reason) for row in encoded.refused]
            for number, code in zip(encoded.accepted.tolist(), read_codes(encoded.batch, self.field), strict=True):
                result[positions[number]] = code
                self._remember(values[positions[number]], code)
        if refused:
            raise RefusedRowsError(sorted(refused, key=lambda row: row.row))
        return result


def memo_key(value: Any) -> Any:
    """Return a key that no value of another type has; raise KeyError for a value that is not remembered."""
    kind = type(value)
    if kind is str:
        if len(value) > MAX_TEXT:
            raise KeyError
        return value
    if kind is list:
        if not all(type(item) is str for item in value) or sum(map(len, value)) > MAX_TEXT:
            raise KeyError
        return tuple(value)
    return None if value is None else (kind, value)


def read_codes(batch: Batch, field: Field) -> list[Any]:
    """Return the codes of the only field of a batch: ids, tuples of numbers (NaN: missing), or arrays of ids."""
    if field.kind == "numeric":
        dense = batch.dense.double().numpy()
        if batch.missing is not None:
            dense = np.where(batch.missing.numpy(), np.nan, dense)
        return [tuple(numbers) for numbers in dense.tolist()]
    if field.kind == "multi":
        values, offsets = (tensor.numpy() for tensor in batch.bags[field.name])
        return np.split(values, offsets[1:]) if len(offsets) else []
    codes: list[int] = batch.ids[:, 0].tolist()
    return codes


class TextTable:
    """The ids of the texts of several fields, in one hash table: all texts of a request are looked up in one call.

    The key of a text is the hash that Python has of it anyway, which no client can predict, mixed with its field. As in
    ``lpfs.data.hashing``, two texts with the same 64 bits would share an id.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        self.names: tuple[str, ...] = encoder.text_fields
        starts, keys = [0], []
        self._salts = splitmix64(np.arange(len(self.names)), seed=1)
        marks = hash_texts([NULL, *encoder.missing_texts])
        for name, salt in zip(self.names, self._salts, strict=True):
            values: Any = encoder.like.vocabulary(name)
            keys += [hash_texts(values[start : start + CHUNK]) ^ salt for start in range(0, len(values), CHUNK)]
            starts.append(starts[-1] + len(values))
        known = np.concatenate(keys) if keys else np.empty(0, np.uint64)
        missing = (marks[:, None] ^ self._salts).ravel()
        missing = missing[~np.isin(missing, known)]
        self._starts, self._count = np.array(starts[:-1], np.int64), starts[-1]
        self._slots = HashTable(np.concatenate([known, missing]), FIRST_ID).slots

    def subset(self, fields: Sequence[str]) -> TextTable:
        """Return the same table for some of the fields."""
        kept = [number for number, name in enumerate(self.names) if name in fields]
        part = copy.copy(self)
        part.names = tuple(self.names[number] for number in kept)
        part._salts, part._starts = self._salts[kept], self._starts[kept]
        return part

    def __call__(self, texts: list[str], rows: int) -> npt.NDArray[np.int32]:
        """Return ids (B, T) of the texts, row by row."""
        ids = np.empty((rows, len(self.names)), np.int32)
        find_texts(hash_texts(texts), self._salts, self._starts, self._count, *self._slots, ids)
        return ids


@compile_loop
def find_texts(
    hashes: Array,
    salts: Array,
    starts: Array,
    count: int,
    keys: Array,
    numbers: Array,
    shift: Any,
    mask: Any,
    ids: Array,
) -> None:
    """Fill ids (B, T) for hashes (B·T,): what ``HashTable`` returns for them, as ids of their fields."""
    golden, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    position = 0
    for row in range(ids.shape[0]):
        for field in range(ids.shape[1]):
            key = hashes[position] ^ salts[field]
            position += 1
            slot = (key * golden) >> shift
            while numbers[slot] != 0 and keys[slot] != key:
                slot = (slot + one) & mask
            number = np.int64(numbers[slot])
            if number == 0:
                ids[row, field] = UNSEEN_ID
            elif number >= FIRST_ID + count:
                ids[row, field] = MISSING_ID
            else:
                ids[row, field] = number - starts[field]


def hash_texts(texts: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return 64 bits of each text; they are the same only within this process."""
    return np.fromiter(map(hash, texts), np.int64, len(texts)).view(np.uint64)


class RequestEncoder:
    """Encodes requests of the fields of a bundle, see :meth:`subset`.

    Args:
        encoder: the encoder of all fields. Texts are looked up directly, what it returns for other values is
            remembered, up to ``MAX_MEMO`` values.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        limit = max(1024, MAX_MEMO // len(encoder.schema))
        self._whole = encoder
        self._table = TextTable(encoder)
        self._all_memos = [FieldMemo(field, encoder, limit) for field in encoder.schema]
        self._set_fields(encoder)

    def subset(self, fields: Sequence[str]) -> RequestEncoder:
        """Return an encoder of some fields that shares the vocabularies and the memory of this one."""
        part = copy.copy(self)
        part._set_fields(self._whole.subset(fields))
        return part

    def _set_fields(self, encoder: RawRowEncoder) -> None:
        self.encoder, self.schema = encoder, encoder.schema
        self._memos = [memo for memo in self._all_memos if memo.name in self.schema.names]
        self._ids = [memo for memo in self._memos if memo.field.kind == "categorical"]
        self._dense = [memo for memo in self._memos if memo.field.kind == "numeric"]
        self._bags = [memo for memo in self._memos if memo.field.kind == "multi"]
        self._texts = self._table.subset(self.schema.names)
        names = [memo.name for memo in self._ids]
        self._text_columns = np.array([names.index(name) for name in self._texts.names], np.int64)
        self._others = [memo for memo in self._memos if memo.name not in self._texts.names]
        self._tasks = 1 + len(self.schema.tasks)

    def encode(self, rows: Sequence[Any], optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return JSON rows as a batch, the number of unseen values, and the ``optional`` fields that were absent.

        Raise RefusedRowsError if a row cannot be encoded. Fields that are not needed are ignored.
        """
        absent: set[str] = set()
        refused: dict[int, RefusedRow] = {}  # the first field of each row
        texts = self._look_up(rows)
        codes: dict[str, list[Any]] = {}
        for memo in self._memos if texts is None else self._others:
            try:
                codes[memo.name] = memo.recall(rows) or memo.encode(rows, absent, optional)
            except RefusedRowsError as error:
                for row in error.refused:
                    refused.setdefault(row.row, row)
        if refused:
            raise RefusedRowsError([refused[row] for row in sorted(refused)])
        return *self._make_batch(len(rows), codes, texts), absent

    def _look_up(self, rows: Sequence[Any]) -> npt.NDArray[np.int32] | None:
        """Return the ids (B, T) of the fields of text; None if a row lacks one or has something else there."""
        names = self._texts.names
        try:
            texts = [row[name] for row in rows for name in names]
        except (KeyError, TypeError):
            return None
        types = set(map(type, texts))
        if types == {str, NoneType} or types == {NoneType}:
            texts = [NULL if text is None else text for text in texts]
        elif types != {str}:
            return None
        return self._texts(texts, len(rows))

    def _make_batch(
        self, count: int, codes: Mapping[str, list[Any]], texts: npt.NDArray[np.int32] | None
    ) -> tuple[Batch, int]:
        """Return the batch of codes, and the number of unseen values."""
        if texts is not None and len(self._ids) == len(self._text_columns):
            ids = texts
        else:
            ids = np.empty((count, len(self._ids)), np.int32)
            if texts is not None:
                ids[:, self._text_columns] = texts
            for number, memo in enumerate(self._ids):
                if memo.name in codes:
                    ids[:, number] = codes[memo.name]
        missing = None
        numbers = np.empty((count, 0), np.float32)
        if self._dense:
            numbers = np.concatenate([np.array(codes[memo.name], np.float32) for memo in self._dense], 1)  # (B, C)
            missing = np.isnan(numbers)
            numbers[missing] = 0.0
        bags = {}
        for memo in self._bags:
            column = codes[memo.name]
            offsets = bag_offsets(np.array([len(code) for code in column]))[:-1].astype(np.int32)
            bags[memo.name] = torch.from_numpy(np.concatenate(column)), torch.from_numpy(offsets)
        unseen = int(np.count_nonzero(ids == UNSEEN_ID))
        unseen += sum(int(torch.count_nonzero(values == UNSEEN_ID)) for values, _ in bags.values())
        batch = Batch(
            torch.from_numpy(ids),
            torch.from_numpy(numbers),
            torch.zeros(count, self._tasks),
            None if missing is None or not missing.any() else torch.from_numpy(missing),
            bags,
        )
        return batch, unseen

    def encode_frame(self, frame: pl.DataFrame, optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return the rows of a table, as :meth:`encode` does."""
        absent = {name for name in self.schema.names if name not in frame.columns}
        if refused := [RefusedRow(0, name, ABSENT) for name in self.schema.names if name in absent - set(optional)]:
            raise RefusedRowsError(refused)
        encoded = self.encoder.encode(frame.with_columns(pl.lit(None).alias(name) for name in sorted(absent)))
        if encoded.refused:
            raise RefusedRowsError(encoded.refused)
        return encoded.batch, sum(encoded.unseen.values()), absent
