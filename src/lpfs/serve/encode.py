"""RequestEncoder: JSON rows to a Batch, row by row, with a memory of the values that were encoded before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from lpfs.data.batch import Batch, bag_offsets
from lpfs.data.parsing import first_line
from lpfs.data.store.format import FIRST_ID, UNSEEN_ID
from lpfs.errors import InputError
from lpfs.online.rows import READ_ERRORS, RawRowEncoder, RefusedRow
from lpfs.schema import Field

MAX_MEMO = 1 << 20  # remembered values of all fields together, about 150 MB
MAX_KNOWN = 1 << 22  # ids of all fields up to which whole vocabularies are kept as dictionaries, about 500 MB
CHUNK = 4096  # of a dictionary that is built while other threads answer requests
MAX_TEXT = 256  # longer texts are not remembered
ABSENT = "the field is absent; give null for a missing value"


class RefusedRowsError(InputError):
    """Rows of a request cannot be encoded; ``refused`` names row, field and reason of each."""

    def __init__(self, refused: Sequence[RefusedRow]) -> None:
        first = refused[0]
        super().__init__(f"row {first.row}, field {first.field!r}: {first.reason}")
        self.refused = tuple(refused)


class FieldMemo:
    """The codes of one field by raw value: an id, the numbers, or the ids of a bag.

    Args:
        field: the field.
        encoder: encodes what is not known yet.
        limit: how many values are remembered.
        known: the ids of null and of all texts that have one; any other text is unseen.
    """

    def __init__(
        self, field: Field, encoder: RawRowEncoder, limit: int, known: dict[str | None, int] | None = None
    ) -> None:
        self.field, self.name, self._encoder, self._limit = field, field.name, encoder.subset([field.name]), limit
        self._codes: dict[Any, Any] = known or {}
        self._is_complete = known is not None

    def recall(self, rows: Sequence[Any]) -> list[Any] | None:
        """Return one code per row, or None if a value is new or absent."""
        codes, name = self._codes, self.name
        try:
            if self._is_complete:
                get = codes.get
                return [
                    get(value, UNSEEN_ID) if type(value := row[name]) is str else codes[memo_key(value)] for row in rows
                ]
            return [codes[value if type(value := row[name]) is str else memo_key(value)] for row in rows]
        except (KeyError, TypeError):
            return None

    def remember(self, values: Iterable[Any], codes: Iterable[Any]) -> None:
        """Keep the codes of values, if they can be kept."""
        if self._is_complete:
            return
        for value, code in zip(values, codes, strict=True):
            try:
                key = memo_key(value)
                hash(key)
            except (KeyError, TypeError):
                continue
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
                self.remember([values[positions[number]]], [code])
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


def load_text_ids(encoder: RawRowEncoder) -> dict[str, dict[str | None, int]]:
    """Return the ids of the texts of every field that is looked up as it is."""
    result = {}
    for name in encoder.text_fields:
        values: Any = encoder.like.vocabulary(name)
        ids: dict[str | None, int] = {}
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK]
            ids.update(zip(part, range(FIRST_ID + start, FIRST_ID + start + len(part)), strict=True))
        marks = [*encoder.missing_texts, None]
        ids.update(zip(marks, encoder.encode_texts({name: marks})[name], strict=True))
        result[name] = ids
    return result


class RequestEncoder:
    """Encodes requests of the fields of a bundle.

    Args:
        encoder: the encoder of the bundle; what it returns is remembered, up to ``MAX_MEMO`` values.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        self.encoder, self.schema = encoder, encoder.schema
        limit = max(1024, MAX_MEMO // len(self.schema))
        self._texts = frozenset(encoder.text_fields)
        known = load_text_ids(encoder) if sum(field.cardinality for field in self.schema) <= MAX_KNOWN else {}
        self._memos = [FieldMemo(field, encoder, limit, known.get(field.name)) for field in self.schema]
        self._ids = [memo for memo in self._memos if memo.field.kind == "categorical"]
        self._dense = [memo for memo in self._memos if memo.field.kind == "numeric"]
        self._bags = [memo for memo in self._memos if memo.field.kind == "multi"]
        self._tasks = 1 + len(self.schema.tasks)

    def encode(self, rows: Sequence[Any], optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return JSON rows as a batch, the number of unseen values, and the ``optional`` fields that were absent.

        Raise RefusedRowsError if a row cannot be encoded. Fields that are not needed are ignored.
        """
        absent: set[str] = set()
        refused: dict[int, RefusedRow] = {}  # the first field of each row
        codes = {memo.name: memo.recall(rows) for memo in self._memos}
        if new := [memo for memo in self._memos if codes[memo.name] is None]:
            self._encode_texts(rows, new, codes)
        for memo in new:
            if codes[memo.name] is None:
                try:
                    codes[memo.name] = memo.encode(rows, absent, optional)
                except RefusedRowsError as error:
                    for row in error.refused:
                        refused.setdefault(row.row, row)
        if refused:
            raise RefusedRowsError([refused[row] for row in sorted(refused)])
        return *self._make_batch(len(rows), codes), absent  # type: ignore[arg-type]

    def _encode_texts(self, rows: Sequence[Any], memos: Sequence[FieldMemo], codes: dict[str, Any]) -> None:
        """Encode the fields of text of which every row has one, in one call."""
        columns: dict[str, list[Any]] = {}
        for memo in memos:
            if memo.name in self._texts:
                values = [row.get(memo.name, 0) if type(row) is dict else 0 for row in rows]
                if all(value is None or type(value) is str for value in values):
                    columns[memo.name] = values
        if columns:
            codes |= self.encoder.encode_texts(columns)
            for memo in memos:
                if memo.name in columns:
                    memo.remember(columns[memo.name], codes[memo.name])

    def _make_batch(self, count: int, codes: Mapping[str, list[Any]]) -> tuple[Batch, int]:
        """Return the batch of codes, and the number of unseen values."""
        ids = np.array([codes[memo.name] for memo in self._ids], np.int32).reshape(-1, count).T.copy()  # (B, F)
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
