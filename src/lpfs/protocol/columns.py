"""Column: the values of one field in some rows as whole numbers, whatever kind of field it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.dataset import Dataset

BINS = 100  # that numbers are cut into, the missing ones apart
Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """The values of a field, or of one of its numbers, in some rows.

    Args:
        ids: of every value; of a number its bin, 0 where it is missing.
        rows: which row each value is in.
        raw: the numbers themselves, NaN where they are missing; None for ids.
        edges: between the bins; None for ids.

    """

    ids: Ids
    rows: Ids
    raw: Numbers | None = None
    edges: Numbers | None = None

    def like(self, other: Column) -> Column:
        """Return the column cut at the edges of another one."""
        return (
            self if self.raw is None or other.edges is None else replace(self, ids=binned(self.raw, other.edges))
        )


def columns_of(part: Dataset, fields: Sequence[str]) -> tuple[dict[str, list[Column]], Numbers]:
    """Return the columns of each field, one but for fields of several numbers, and the labels of the main task."""
    stream = part.stream(1 << 15, fields=fields)
    batches = list(stream)
    every = np.arange(part.rows)
    found: dict[str, list[Column]] = {}
    at = seen = 0
    for each in stream.schema:
        if each.kind == "multi":
            values = [batch.bags[each.name][0].numpy() for batch in batches]
            sizes = [_sizes(*(part.numpy() for part in batch.bags[each.name])) for batch in batches]
            found[each.name] = [Column(_joined(values).astype(np.int64), every.repeat(_joined(sizes)))]
        elif each.kind == "numeric":
            found[each.name] = [_numbers(batches, number) for number in range(at, at + each.dim)]
            at += each.dim
        else:
            ids = _joined([batch.ids[:, seen].numpy() for batch in batches])
            found[each.name] = [Column(ids.astype(np.int64), every)]
            seen += 1
    return found, _joined([batch.labels[:, 0].numpy() for batch in batches]).astype(np.float64)


def binned(raw: Numbers, edges: Numbers) -> Ids:
    """Return the bin of each number, from 1 on; 0 where it is missing.

    >>> binned(np.array([0.5, np.nan, 2.0]), np.array([1.0])).tolist()
    [1, 0, 2]
    """
    return np.where(np.isnan(raw), 0, 1 + np.searchsorted(edges, np.nan_to_num(raw), side="right"))


def partition(columns: Sequence[Column]) -> bytes | None:
    """Return what two fields have in common if and only if they are one column but for the names of the values.

    None where nothing can be said: one value everywhere, or another one in nearly every row. Numbers with many
    values are compared by their ranks, from below or from above.
    """
    digest = hashlib.sha256()
    told = False
    for column in columns:
        values = column.ids if column.raw is None else column.raw
        known = np.nan_to_num(values, nan=np.inf) if column.raw is not None else values
        distinct, first, ranks = np.unique(known, return_index=True, return_inverse=True)
        if column.raw is not None and len(distinct) > len(known) // 2:
            most = len(distinct) - 1
            form = ranks if ranks[0] * 2 <= most else most - ranks
        else:
            names = np.empty(len(distinct), np.int64)
            names[np.argsort(first, kind="stable")] = np.arange(len(distinct))  # in the order they come
            form = names[ranks]
            told |= 1 < len(distinct) <= len(known) // 2
        told |= column.raw is not None and len(distinct) > 1
        digest.update(form.astype(np.int64).tobytes())
        digest.update(column.rows.tobytes())
    return digest.digest() if told else None


def _numbers(batches: Sequence[Any], number: int) -> Column:
    raw = _joined([batch.dense[:, number].numpy() for batch in batches]).astype(np.float64)
    gone = [np.zeros(len(batch), bool) if batch.missing is None else batch.missing[:, number].numpy()
            for batch in batches]  # fmt: skip
    raw[_joined(gone)] = np.nan
    there = raw[~np.isnan(raw)]
    cuts = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(there, cuts)) if len(there) else np.empty(0)
    return Column(binned(raw, edges), np.arange(len(raw)), raw, edges)


def _sizes(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.diff(offsets, append=len(values))


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(pieces)
