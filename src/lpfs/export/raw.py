"""Rows of a Dataset as raw values again: what the file is fed with when it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lpfs.data.batches.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.format import AnyArray
from lpfs.errors import ExactnessError
from lpfs.export.preprocessing import PAD_ID, Column, Ids, Values
from lpfs.export.marks import as_whole
from lpfs.export.number_columns import Numbers
from lpfs.schema import Schema

PIECES = 8  # places of a Dataset that rows are taken from


def some_rows(dataset: Dataset, schema: Schema, count: int) -> Batch:
    """Return rows from several places of a Dataset, from the first to the last; all of them if there are fewer."""
    low, high = dataset.span
    reader = dataset.reader(dataset.schema.subset(schema.names))
    if high - low <= count:
        return reader.read([(low, high)]).batch()
    sizes = [count // PIECES + (number < count % PIECES) for number in range(PIECES)]
    starts = np.linspace(low, high - max(sizes), PIECES).astype(int).tolist()
    return reader.read([(start, start + size) for start, size in zip(starts, sizes, strict=True)]).batch()


def feeds_of(columns: Sequence[Column], batch: Batch) -> dict[str, AnyArray]:
    """Return raw values with the ids and numbers of a batch, by input."""
    feeds: dict[str, AnyArray] = {}
    seen = at = 0
    for each in columns:
        if isinstance(each, Numbers):
            numbers = batch.dense[:, at : at + each.field.dim].double().numpy()
            if batch.missing is not None:
                numbers = np.where(batch.missing[:, at : at + each.field.dim].numpy(), np.nan, numbers)
            at += each.field.dim
            raw = each.raw(numbers)
            feeds[each.input] = raw if each.scale is not None else raw.astype(np.float32)
        elif each.multi:
            feeds[each.input] = each.raw(padded(*batch.bags[each.field.name]))
        else:
            feeds[each.input] = each.raw(batch.ids[:, seen].numpy())
            seen += 1
    return feeds


def padded(values: torch.Tensor, offsets: torch.Tensor) -> AnyArray:
    """Return bags as (B, L) ids, with ``PAD_ID`` after the last of each.

    >>> padded(torch.tensor([5, 6, 7]), torch.tensor([0, 2, 2]))
    array([[ 5,  6],
           [-1, -1],
           [ 7, -1]])
    """
    sizes = np.diff(offsets.numpy().astype(np.int64), append=len(values))
    out = np.full((len(sizes), max(1, int(sizes.max(initial=0)))), PAD_ID, np.int64)
    out[np.arange(out.shape[1]) < sizes[:, None]] = values.numpy()
    return out


def encoded_again(columns: Sequence[Column], feeds: dict[str, AnyArray], batch: Batch, dataset: Dataset) -> Batch:
    """Return the batch that ``encode_rows`` makes of the raw values; its ids must be those they came from."""
    from lpfs.data.row_encoder import RowEncoder

    known = [each for each in columns if not isinstance(each, Ids) and getattr(each, "scale", ...) is not None]
    if not known:
        return batch
    import polars as pl

    encoder = RowEncoder(dataset, [each.field.name for each in known])
    found = encoder(pl.DataFrame([series(each, feeds[each.input]) for each in known]))
    schema = Schema(tuple(each.field for each in columns))
    same = batch.select(schema, encoder.schema.names)
    ids = torch.equal(found.ids, same.ids)
    if not ids or any(not torch.equal(a, b) for name in found.bags for a, b in _both(found, same, name)):
        raise ExactnessError(
            f"the vocabularies of {dataset.path} do not lead back to the ids of its rows; prepare its log again"
        )
    return replace(batch, dense=found.dense, missing=found.missing) if found.dense.shape[1] else batch


def _both(found: Batch, same: Batch, name: str) -> list[tuple[Any, Any]]:
    return list(zip(found.bags[name], same.bags[name], strict=True))


def series(column: Column, feed: AnyArray) -> Any:
    """Return the input of a column as a column of a table: null where it is missing, lists for bags."""
    import polars as pl

    name = column.field.name
    if not isinstance(column, Values):
        return pl.Series(name, feed) if feed.ndim == 1 else pl.Series(name, feed.tolist(), pl.List(pl.Float64))
    dtype: Any = {"text": pl.String, "fraction": pl.Float64}.get(column.sort)
    if column.sort == "whole":
        unsigned = column.values.dtype == np.uint64
        dtype, feed = (pl.UInt64, feed.view(np.uint64)) if unsigned else (pl.Int64, feed)
        missing, pad = (as_whole(np.array([each])).view(feed.dtype)[0] for each in (column.missing, column.pad))
    else:
        missing, pad = column.missing, column.pad
    if not column.multi:
        return pl.Series(name, [None if each == missing else each for each in feed.tolist()], dtype)
    rows = [[None if each == missing else each for each in row if each != pad] for row in feed.tolist()]
    return pl.Series(name, rows, pl.List(dtype))
