"""Columns that repeat another one, or the label."""

from __future__ import annotations

import hashlib
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.encoders.base import Encoder
from lpfs.data.store.format import AnyArray

FIRST = 1000  # rows that rule out nearly every column


class Twins:
    """Finds columns that hold the same, comparing running hashes of those that still may."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._digest = {each.name: type(each).__name__.encode() for each in encoders}
        self._tied = set(self._digest)

    def needs(self, name: str) -> bool:
        """Whether a column may still have a twin."""
        return name in self._tied

    def add(self, digests: Mapping[str, bytes]) -> None:
        """Take in the digests of a chunk of the columns that may have twins."""
        for name, digest in digests.items():
            self._digest[name] = hashlib.blake2b(self._digest[name] + digest, digest_size=16).digest()
        counts = Tally(self._digest[name] for name in self._tied)
        self._tied = {name for name in self._tied if counts[self._digest[name]] > 1}

    def found(self) -> dict[str, str]:
        """Return {column: the first column that holds the same}."""
        first: dict[bytes, str] = {}
        twins = {}
        for name in self._digest:
            if name in self._tied:
                other = first.setdefault(self._digest[name], name)
                if other != name:
                    twins[name] = other
        return twins


def digested(arrays: Iterable[AnyArray]) -> bytes:
    """Return a digest of what tells a column apart."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


class Leaks:
    """Finds columns with two values, one of them for every positive and the other for every negative."""

    def __init__(self, names: Iterable[str]) -> None:
        self._pairs: dict[str, set[tuple[Any, int]]] = {name: set() for name in names}

    def add(self, frame: pl.DataFrame, labels: AnyArray) -> None:
        """Take in rows; a column with more values, or one value for both labels, is out."""
        for name, pairs in list(self._pairs.items()):
            column = frame[name]
            kind = column.dtype
            odd = kind.is_nested() or kind.is_temporal() or kind == pl.Object  # a date may be one that cannot be
            if odd or column.head(FIRST).n_unique() > 2:
                del self._pairs[name]
                continue
            both = pl.DataFrame([column.alias("value"), pl.Series("label", labels)]).unique()
            if both.height <= 2:
                pairs.update(both.iter_rows())
            if both.height > 2 or two_fold(pairs):
                del self._pairs[name]

    def join(self, other: Leaks) -> None:
        """Take in what was found on other rows."""
        for name, pairs in list(self._pairs.items()):
            pairs.update(other._pairs.get(name, ()))
            if name not in other._pairs or two_fold(pairs):
                del self._pairs[name]

    def found(self) -> list[str]:
        """Return the columns that tell the label exactly."""
        return [name for name, pairs in self._pairs.items() if {label for _, label in pairs} == {0, 1}]


def two_fold(pairs: set[tuple[Any, int]]) -> bool:
    """Whether a value comes with both labels, or there are too many values."""
    return len(pairs) > 2 or len({value for value, _ in pairs}) < len(pairs)
