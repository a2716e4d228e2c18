"""ValueTable: ids of the texts and integers of several fields in one hash table, without polars, for few rows."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from lpfs._imports import Array, compile_loop
from lpfs.data.encoders.base import Encoder
from lpfs.data.encoders.categorical import plain_vocabulary
from lpfs.data.hashing import HashTable, splitmix64
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID

CHUNK = 4096  # texts that are hashed while other threads wait
NULL = secrets.randbits(62)  # key of null among integers


class LookupFields(NamedTuple):
    """Some of the fields of a ValueTable, in the order of the ids that ``look_up`` returns."""

    texts: list[str]
    integers: list[str]
    salts: npt.NDArray[np.int64]  # (T + I,) mixed with the keys of each field
    starts: npt.NDArray[np.int64]  # (T + I,) number of the first value of each field


class ValueTable:
    """The ids of texts and integers of several fields: those of a row are looked up in one call.

    The key of a text is the hash that Python has of it anyway, mixed with its field. As in ``lpfs.data.hashing``, two
    texts with the same 64 bits would share an id.

    Args:
        encoders: the encoders of all fields; only those with a vocabulary of plain values are in the table.
        missing: texts that stand for a missing value; None: texts are not in the table.
    """

    def __init__(self, encoders: Iterable[Encoder], missing: Sequence[str] | None) -> None:
        values = {encoder.name: plain_vocabulary(encoder) for encoder in encoders}
        plain = {name: column for name, column in values.items() if column is not None}
        self.texts = [name for name in plain if plain[name].dtype == pl.String and missing is not None]
        self.integers = [name for name in plain if plain[name].dtype == pl.Int64]
        self._values = {name: plain[name] for name in (*self.texts, *self.integers)}
        self._missing = missing or ()
        self._salts = splitmix64(np.arange(len(self._values)), seed=1).view(np.int64)
        self._starts = np.cumsum([0, *map(len, self._values.values())])

    def choose(self, names: Collection[str]) -> LookupFields:
        """Return those of some fields that are in the table."""
        numbers = [number for number, name in enumerate(self._values) if name in names]
        texts, integers = ([name for name in group if name in names] for group in (self.texts, self.integers))
        return LookupFields(texts, integers, self._salts[numbers], self._starts[numbers])

    @property
    def is_built(self) -> bool:
        """Whether values can be looked up without making the hash table first."""
        return "slots" in vars(self)

    @cached_property
    def slots(self) -> tuple[Any, Any, Any, Any]:
        """The hash table, made at the first use: all values of all fields, then what is missing."""
        keys = []
        for column, salt in zip(self._values.values(), self._salts, strict=True):
            parts = [column.slice(start, CHUNK) for start in range(0, len(column), CHUNK)]
            keys += [salt ^ (hash_texts(p.to_list()) if p.dtype == pl.String else p.to_numpy()) for p in parts]
        text_salts, integer_salts = np.split(self._salts, [len(self.texts)])
        missing_texts = hash_texts([None, *self._missing])[:, None] ^ text_salts
        known = np.concatenate([*keys, missing_texts.ravel(), NULL ^ integer_salts])
        return HashTable(known.view(np.uint64), FIRST_ID).slots

    def look_up(self, rows: Sequence[Any], fields: LookupFields) -> npt.NDArray[np.int32]:
        """Return ids (B, T + I); raise KeyError, TypeError or OverflowError for anything but a text or an integer."""
        texts, integers, salts, starts = fields
        keys = hash_texts(read_values(rows, texts, (str, NoneType))).reshape(len(rows), len(texts))
        if integers:
            values = [NULL if value is None else value for value in read_values(rows, integers, (int, NoneType))]
            keys = np.concatenate([keys, np.array(values, np.int64).reshape(len(rows), -1)], 1)
        ids = np.empty(keys.shape, np.int32)
        find_ids((keys ^ salts).view(np.uint64), starts, self._starts[-1], *self.slots, ids)
        return ids


def hash_texts(texts: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """Return a 64-bit hash of each text; Python salts it per process, so that collisions cannot be prepared."""
    return np.fromiter(map(hash, texts), np.int64, len(texts))


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
