"""RequestEncoder: JSON rows to a Batch, as ``RawRowEncoder`` encodes them, without its costs for few rows.

Texts and integers with a vocabulary are looked up in one hash table, numbers are scaled together. What the
RawRowEncoder returns for other values (bags, hashed values) is remembered.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from lpfs._imports import Array, compile_loop
from lpfs.data.batch import Batch, bag_offsets
from lpfs.data.encoders.categorical import plain_vocabulary
from lpfs.data.encoders.numeric import BinningEncoder, NumericEncoder, stack_scales
from lpfs.data.hashing import HashTable, splitmix64
from lpfs.data.raw_rows import ABSENT, EncodedRows, RawRowEncoder, RefusedRow
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID
from lpfs.errors import InputError
from lpfs.schema import Schema

MAX_MEMO = 1 << 20  # remembered values of all fields together, about 150 MB
CHUNK = 4096  # texts that are hashed while requests wait
NULL = secrets.randbits(62)  # key of null among integers
MAX_TEXT = 256  # longer texts are not remembered
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


class RefusedRowsError(InputError):
    """Rows of a request cannot be encoded; ``refused`` names row, field and reason of each."""

    def __init__(self, refused: Sequence[RefusedRow]) -> None:
        first = refused[0]
        super().__init__(f"row {first.row}, field {first.field!r}: {first.reason}")
        self.refused = tuple(refused)


def hash_texts(texts: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """Return 64 bits of each text; they are the same only within this process, and no client can predict them."""
    return np.fromiter(map(hash, texts), np.int64, len(texts))


class ValueTable:
    """The ids of the texts and integers of several fields in one hash table: a request is looked up in one call.

    The key of a text is the hash that Python has of it anyway, mixed with its field. As in ``lpfs.data.hashing``, two
    texts with the same 64 bits would share an id.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        vocabularies = {item.name: plain_vocabulary(item) for item in encoder.encoders}
        texts, integers = (
            {name: values for name, values in vocabularies.items() if values is not None and values.dtype == dtype}
            for dtype in (pl.String, pl.Int64)
        )
        texts = {} if encoder.options.strip else texts  # blanks are removed by polars
        self.texts, self.integers = tuple(texts), tuple(integers)
        self._salts = splitmix64(np.arange(len(texts) + len(integers)), seed=1).view(np.int64)
        marks = np.append(hash_texts([None, *encoder.options.missing]), NULL)
        starts, keys = [0], []
        for values, salt in zip((*texts.values(), *integers.values()), self._salts, strict=True):
            parts = [values.slice(start, CHUNK) for start in range(0, len(values), CHUNK)]
            keys += [salt ^ (hash_texts(p.to_list()) if p.dtype == pl.String else p.to_numpy()) for p in parts]
            starts.append(starts[-1] + len(values))
        self._starts, self._count = np.array(starts[:-1], np.int64), starts[-1]
        known = np.concatenate([*keys, (marks[:, None] ^ self._salts).ravel()])
        self._slots = HashTable(known.view(np.uint64), FIRST_ID).slots

    @property
    def names(self) -> tuple[str, ...]:
        """The fields, in the order of the ids."""
        return self.texts + self.integers

    def subset(self, fields: Collection[str]) -> ValueTable:
        """Return the same table for some of the fields."""
        kept = [number for number, name in enumerate(self.names) if name in fields]
        part = copy.copy(self)
        part.texts, part.integers = (
            tuple(name for name in names if name in fields) for names in (self.texts, self.integers)
        )
        part._salts, part._starts = self._salts[kept], self._starts[kept]
        return part

    def __call__(self, rows: Sequence[Any]) -> Ids:
        """Return ids (B, T + I); raise KeyError, TypeError or OverflowError for anything but a text or an integer."""
        keys = hash_texts(read_values(rows, self.texts, (str, NoneType))).reshape(len(rows), len(self.texts))
        if self.integers:
            values = [NULL if value is None else value for value in read_values(rows, self.integers, (int, NoneType))]
            keys = np.concatenate([keys, np.array(values, np.int64).reshape(len(rows), -1)], 1)
        ids = np.empty(keys.shape, np.int32)
        find_ids((keys ^ self._salts).view(np.uint64), self._starts, self._count, *self._slots, ids)
        return ids


def read_values(rows: Sequence[Any], names: Sequence[str], types: Collection[type]) -> list[Any]:
    """Return the values of some fields, row by row; raise KeyError or TypeError if one is absent or of other types."""
    values = [row[name] for row in rows for name in names]
    if not set(map(type, values)).issubset(types):
        raise TypeError
    return values


@compile_loop
def find_ids(
    keys: Array, starts: Array, count: int, slots: Array, numbers: Array, shift: Any, mask: Any, ids: Array
) -> None:
    """Fill ids (B, T) for keys (B, T): what ``HashTable`` returns for them, as ids of their fields."""
    golden, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    for row in range(ids.shape[0]):
        for field in range(ids.shape[1]):
            key = keys[row, field]
            slot = (key * golden) >> shift
            while numbers[slot] != 0 and slots[slot] != key:
                slot = (slot + one) & mask
            number = np.int64(numbers[slot])
            if number == 0:
                ids[row, field] = UNSEEN_ID
            elif number >= FIRST_ID + count:
                ids[row, field] = MISSING_ID
            else:
                ids[row, field] = number - starts[field]


def memo_key(value: Any) -> Any:
    """Return a key that no value of another type has; raise KeyError for a value that is not remembered."""
    if type(value) is list:
        value = tuple(value)
    elif type(value) is not str:
        return type(value), value
    if any(type(item) is not str for item in value) or sum(map(len, value)) > MAX_TEXT:
        raise KeyError
    return value


def read_codes(batch: Batch, schema: Schema) -> dict[str, list[Any]]:
    """Return the rows of a batch by field: ids, lists of numbers (NaN: missing), or arrays of ids."""
    dense = batch.dense.double()
    if batch.missing is not None:
        dense[batch.missing] = torch.nan
    codes: dict[str, list[Any]] = {}
    ids, numbers = iter(batch.ids.T.tolist()), iter(dense.T)
    for field in schema:
        if field.kind == "multi":
            values, offsets = (tensor.numpy() for tensor in batch.bags[field.name])
            codes[field.name] = np.split(values, offsets[1:])
        else:
            is_number = field.kind == "numeric"
            codes[field.name] = (
                torch.stack([next(numbers) for _ in range(field.dim)], 1).tolist() if is_number else next(ids)
            )
    return codes


class RequestEncoder:
    """Encodes requests of the fields of a bundle, see :meth:`subset`.

    Args:
        encoder: the encoder of all fields.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        self._whole, self._table = encoder, ValueTable(encoder)
        self.memos: dict[str, dict[Any, Any]] = {name: {} for name in encoder.schema.names}
        self.memo_limit = max(1024, MAX_MEMO // len(encoder.schema))
        self._set_fields(encoder)

    def subset(self, fields: Sequence[str]) -> RequestEncoder:
        """Return an encoder of some fields that shares the vocabularies and the memory of this one."""
        part = copy.copy(self)
        part._set_fields(self._whole.subset(fields))
        return part

    def _set_fields(self, encoder: RawRowEncoder) -> None:
        self.encoder, self.schema = encoder, encoder.schema
        self._values = self._table.subset(self.schema.names)
        single = [item for item in encoder.encoders if item.plan.width == 1]
        scaled = [item for item in single if isinstance(item, NumericEncoder)]
        self._binned = [item for item in single if isinstance(item, BinningEncoder)]
        self._numbers, self._scale = [item.name for item in (*scaled, *self._binned)], stack_scales(scaled)
        found = {*self._values.names, *self._numbers}
        others = [name for name in self.schema.names if name not in found]
        self._others = encoder.subset(others) if others else None
        self._ids = [field.name for field in self.schema if field.kind == "categorical"]
        self._dense = [field.name for field in self.schema if field.kind == "numeric"]
        self._in_order = self._ids == list(self._values.names)
        self._all_scaled = self._dense == [item.name for item in scaled]
        self._bags = [field.name for field in self.schema if field.kind == "multi"]

    def encode(self, rows: Sequence[Any] | pl.DataFrame, optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return rows as a batch, the number of unseen values, and the ``optional`` fields that were absent.

        Raise RefusedRowsError if a row cannot be encoded. Fields that are not needed are ignored.
        """
        if isinstance(rows, pl.DataFrame):
            absent = {name for name in self.schema.names if name not in rows.columns}
            if refused := [RefusedRow(0, name, ABSENT) for name in sorted(absent.difference(optional))]:
                raise RefusedRowsError(refused)
            rows = rows.with_columns(pl.lit(None).alias(name) for name in sorted(absent))
        else:
            try:
                ids = self._values(rows)
                numbers = np.array(read_values(rows, self._numbers, (float, int, NoneType)), np.float64)
                numbers = numbers.reshape(len(rows), len(self._numbers))
                return *self._gather(ids, numbers, self._recall(rows)), set()
            except (LookupError, TypeError, OverflowError):  # something is absent, or of another type
                needed = set(optional) & set(self.schema.names)
                absent = {name for name in needed if any(isinstance(row, dict) and name not in row for row in rows)}
        encoded = encode_all(self.encoder, rows, optional)
        return encoded.batch, sum(encoded.unseen.values()), absent

    def _recall(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the codes of the fields that are neither looked up nor numbers; they are encoded if one is new."""
        if self._others is None:
            return {}
        schema = self._others.schema
        try:
            return {name: [self.memos[name][memo_key(row[name])] for row in rows] for name in schema.names}
        except (KeyError, TypeError):
            codes = read_codes(encode_all(self._others, rows).batch, schema)
        for name, column in codes.items():
            if len(self.memos[name]) + len(rows) > self.memo_limit:
                self.memos[name] = {}
            for row, code in zip(rows, column, strict=True):
                with suppress(KeyError, TypeError):
                    self.memos[name][memo_key(row[name])] = code
        return codes

    def _gather(self, ids: Ids, numbers: Floats, codes: Mapping[str, list[Any]]) -> tuple[Batch, int]:
        """Return the batch of ids (B, T + I), numbers (B, C) and codes, and the number of unseen values."""
        count, scaled, flags = len(ids), np.empty((len(ids), 0), np.float32), None
        if self._numbers:
            numbers[np.isinf(numbers)] = np.nan
            scaled = self._scale(numbers[:, : numbers.shape[1] - len(self._binned)])
        if not self._in_order:
            columns: dict[str, Any] = {**codes, **dict(zip(self._values.names, ids.T, strict=True))}
            columns |= {item.name: item.bin(numbers[:, at - len(self._binned)]) for at, item in enumerate(self._binned)}
            ids = np.empty((count, len(self._ids)), np.int32)
            for at, name in enumerate(self._ids):
                ids[:, at] = columns[name]
        if not self._all_scaled:
            columns = {**codes, **dict(zip(self._numbers, scaled.T, strict=False))}
            scaled = np.concatenate(
                [np.array(columns[name], np.float32).reshape(count, -1) for name in self._dense], axis=1
            )
        if self._dense and (missing := np.isnan(scaled)).any():
            scaled[missing], flags = 0.0, torch.from_numpy(missing)
        bags = {}
        for name in self._bags:
            offsets = bag_offsets(np.array([len(code) for code in codes[name]]))[:-1].astype(np.int32)
            bags[name] = torch.from_numpy(np.concatenate(codes[name])), torch.from_numpy(offsets)
        unseen = int(np.count_nonzero(ids == UNSEEN_ID))
        unseen += sum(int(torch.count_nonzero(values == UNSEEN_ID)) for values, _ in bags.values())
        labels = torch.zeros(count, 1 + len(self.schema.tasks))
        return Batch(torch.from_numpy(ids), torch.from_numpy(scaled), labels, flags, bags), unseen


def encode_all(encoder: RawRowEncoder, rows: Any, optional: Collection[str] = ()) -> EncodedRows:
    """Return the encoded rows; raise RefusedRowsError if one cannot be encoded."""
    encoded = encoder.encode(rows, optional=optional)
    if encoded.refused:
        raise RefusedRowsError(encoded.refused)
    return encoded
