"""Marks: what stands for a missing value, and for no value at all, where a tensor has no place for either."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from lpfs.data.store.format import AnyArray

LOWEST, HIGHEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


def missing_mark(values: Any) -> Any:
    """Return what stands for missing beside the values of a vocabulary: "", the lowest int64, or NaN.

    >>> missing_mark(["a"]), missing_mark(["a", ""])
    ('', '<missing>')
    """
    if isinstance(values, list):
        return _free(values, _texts("", "<missing>"))
    return float("nan") if values.dtype.kind == "f" else _free(as_whole(values).tolist(), count(LOWEST))


def pad_mark(values: Any) -> Any:
    """Return what fills up the rows of a bag: "<pad>", the highest int64, or -inf.

    >>> pad_mark(["a", "<pad>"])
    '<pad>2'
    """
    if isinstance(values, list):
        return _free(values, _texts("<pad>"))
    if values.dtype.kind == "f":
        return _free(values.tolist(), (-np.inf, np.inf, *np.arange(-1e300, -2e300, -1e298).tolist()))
    return _free(as_whole(values).tolist(), count(HIGHEST, -1))


def unseen_value(values: Any, missing: Any, pad: Any) -> Any:
    """Return a value that is not in a vocabulary and no mark."""
    if isinstance(values, list):
        return _free([*values, missing, pad], _texts("<unseen>"))
    if values.dtype.kind == "f":
        return _free([*values.tolist(), pad], (number + 0.5 for number in count()))
    return _free([*as_whole(values).tolist(), missing, pad], count())


def as_whole(values: AnyArray) -> AnyArray:
    """Return whole numbers as int64; those from 2**63 on keep their bits."""
    return values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)


def _texts(*first: str) -> Iterator[str]:
    yield from first
    yield from (f"{first[-1]}{number}" for number in count(2))


def _free(taken: Any, wanted: Any) -> Any:
    known = set(taken)
    return next(each for each in wanted if each not in known)
