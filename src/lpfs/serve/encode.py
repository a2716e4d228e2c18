"""RequestEncoder: JSON rows to a Batch, row by row, with a memory of the values that were encoded before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from lpfs.data.batch import Batch, bag_offsets
from lpfs.data.parsing import first_line
from lpfs.data.store.format import UNSEEN_ID
from lpfs.errors import InputError
from lpfs.online.rows import READ_ERRORS, RawRowEncoder, RefusedRow
from lpfs.schema import Field

MAX_MEMO = 1 << 20  # remembered values of all fields together, about 150 MB
MAX_TEXT = 256  # longer texts are not remembered
ABSENT = "the field is absent; give null for a missing value"


class RefusedRowsError(InputError):
    """Rows of a request cannot be encoded; ``refused`` names row, field and reason of each."""

    def __init__(self, refused: Sequence[RefusedRow]) -> None:
        first = refused[0]
        super().__init__(f"row {first.row}, field {first.field!r}: {first.reason}")
        self.refused = tuple(refused)


class FieldMemo:
    """The codes of one field by raw value: an id, the numbers, or the ids of a bag. New values are encoded in groups.

    A value is encoded together with values of its own type only, so that no row depends on the others of its request.
    """

    def __init__(self, field: Field, encoder: RawRowEncoder, limit: int) -> None:
        self.field, self.name, self._encoder, self._limit = field, field.name, encoder.subset([field.name]), limit
        self._codes: dict[Any, Any] = {}

    def encode(self, rows: Sequence[Any], absent: set[str], optional: Collection[str]) -> list[Any]:
        """Return one code per row; raise RefusedRowsError if a value cannot be encoded, or is absent."""
        codes, name = self._codes, self.name
        try:
            return [codes[value if type(value := row[name]) is str else memo_key(value)] for row in rows]
        except (KeyError, TypeError):
            return self._encode_new(rows, absent, optional)

    def _encode_new(self, rows: Sequence[Any], absent: set[str], optional: Collection[str]) -> list[Any]:
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

    def _remember(self, value: Any, code: Any) -> None:
        try:
            key = memo_key(value)
            hash(key)
        except (KeyError, TypeError):
            return
        if len(self._codes) >= self._limit:
            self._codes = {}
        self._codes[key] = code


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


class RequestEncoder:
    """Encodes requests of the fields of a bundle.

    Args:
        encoder: the encoder of the bundle; what it returns is remembered, up to ``MAX_MEMO`` values.
    """

    def __init__(self, encoder: RawRowEncoder) -> None:
        self.encoder, self.schema = encoder, encoder.schema
        limit = max(1024, MAX_MEMO // len(self.schema))
        memos = [FieldMemo(field, encoder, limit) for field in self.schema]
        self._ids = [memo for memo in memos if memo.field.kind == "categorical"]
        self._dense = [memo for memo in memos if memo.field.kind == "numeric"]
        self._bags = [memo for memo in memos if memo.field.kind == "multi"]
        self._tasks = 1 + len(self.schema.tasks)

    def encode(self, rows: Sequence[Any], optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return JSON rows as a batch, the number of unseen values, and the ``optional`` fields that were absent.

        Raise RefusedRowsError if a row cannot be encoded. Fields that are not needed are ignored.
        """
        absent: set[str] = set()
        refused: dict[int, RefusedRow] = {}  # the first field of each row

        def collect(memos: Sequence[FieldMemo]) -> list[list[Any]]:
            columns = []
            for memo in memos:
                try:
                    columns.append(memo.encode(rows, absent, optional))
                except RefusedRowsError as error:
                    for row in error.refused:
                        refused.setdefault(row.row, row)
            return columns

        codes = collect(self._ids), collect(self._dense), collect(self._bags)
        if refused:
            raise RefusedRowsError([refused[row] for row in sorted(refused)])
        count = len(rows)
        ids = np.array(codes[0], np.int32).reshape(len(self._ids), count).T.copy()  # (B, F)
        missing = None
        numbers = np.empty((count, 0), np.float32)
        if self._dense:
            numbers = np.concatenate([np.array(column, np.float32) for column in codes[1]], 1)  # (B, C)
            missing = np.isnan(numbers)
            numbers[missing] = 0.0
        bags = {}
        for memo, column in zip(self._bags, codes[2], strict=True):
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
        return batch, unseen, absent

    def encode_frame(self, frame: pl.DataFrame, optional: Collection[str] = ()) -> tuple[Batch, int, set[str]]:
        """Return the rows of a table, as :meth:`encode` does."""
        absent = {name for name in self.schema.names if name not in frame.columns}
        if refused := [RefusedRow(0, name, ABSENT) for name in self.schema.names if name in absent - set(optional)]:
            raise RefusedRowsError(refused)
        encoded = self.encoder.encode(frame.with_columns(pl.lit(None).alias(name) for name in sorted(absent)))
        if encoded.refused:
            raise RefusedRowsError(encoded.refused)
        return encoded.batch, sum(encoded.unseen.values()), absent
