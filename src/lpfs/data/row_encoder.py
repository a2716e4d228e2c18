"""RowEncoder: a table of raw rows in memory -> a Batch, as prepare would encode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lpfs.data.batches.batch import Batch
from lpfs.data.batch import Bag, Rows
from lpfs.data.reencode import Like, opened, refuse_misfit, restored, retyped, unknown_columns
from lpfs.data.plan.job import make_options
from lpfs.errors import DataError
from lpfs.schema import Schema

if TYPE_CHECKING:
    from lpfs.data.store.format import AnyArray


class RowEncoder:
    """Encodes tables of raw rows with the vocabularies, scales, bins and hashes of a Dataset; make it once.

    Args:
        like: a Dataset that ``prepare`` made, or its path.
        fields: only these of its fields, in its order; the columns of the others need not be there.

    ``encoder(table)`` gives the ids and numbers, bit by bit, that ``prepare(table, out, like=…)`` stores.

    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        self.like = opened(like)
        self._encoders = restored(self.like, fields)
        whole = self.like.schema
        self.schema = Schema(tuple(each.field for each in self._encoders), whole.label, whole.tasks)
        self._options = make_options(self.like.settings["options"])

    def __call__(self, table: Any) -> Batch:
        """Return all rows of a polars, pandas or Arrow table, or of a dict of columns; labels are 0 if absent."""
        from lpfs.data.passes import DayRows, read_labels
        from lpfs.data.encode.passes import encode
        from lpfs.data.raw.cast import mark_missing, plain
        from lpfs.data.raw.table import TableSource

        source = TableSource(table)
        targets = (self.schema.label, *self.schema.tasks)
        labelled = any(name in source.names for name in targets)
        wanted = (*self.schema.names, *(targets if labelled else ()))
        extra = unknown_columns(self.like, source.names, targets)
        absent = [name for name in wanted if name not in source.names]
        refuse_misfit(self.like.path, "the table", absent, {}, extra)
        frame = mark_missing(plain(source.frame.select(wanted)), self._options.missing)
        labels = read_labels(frame, self._options, place, labelled=labelled)
        part = DayRows(((0, frame.height),), frame, labels, place)
        try:
            [(_, columns)] = encode([part], self._encoders)
        except DataError:
            refuse_misfit(self.like.path, "the table", [], retyped(self._encoders, frame, place), extra)
            raise
        return side_by_side(self.schema, columns, labels).batch()


def encode_rows(like: Like, table: Any, fields: Sequence[str] | None = None) -> Batch:
    """Return raw rows as a Batch, encoded as those of a Dataset were; for many tables make a ``RowEncoder``."""
    return RowEncoder(like, fields)(table)


def place(row: int) -> str:
    """Say where a row is, for messages."""
    return f"the table, row {row + 1}"


def side_by_side(schema: Schema, columns: dict[str, dict[str, Any]], labels: dict[str, Any]) -> Rows:
    """Gather encoded columns as a Stream would: a missing number reads 0.0, marked where any is missing."""
    targets = [labels[name] for name in (schema.label, *schema.tasks)]
    rows = len(targets[0])
    ids = [columns["ids"][field.name] for field in schema if field.kind == "categorical"]
    dense = [columns["dense"][field.name].reshape(rows, -1) for field in schema if field.kind == "numeric"]
    numbers: AnyArray = np.concatenate([np.empty((rows, 0), np.float32), *dense], 1)  # (n, C)
    missing = np.isnan(numbers)
    numbers[missing] = 0.0
    bags: dict[str, Bag] = {}
    for name, (values, lengths) in columns["bags"].items():
        ends = np.zeros(rows + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        bags[name] = values.astype(np.int32), ends
    return Rows(
        np.stack(ids, 1).astype(np.int32) if ids else np.empty((rows, 0), np.int32),
        numbers,
        np.stack(targets, 1).astype(np.float32),
        missing if missing.any() else None,
        bags,
    )
