"""Edges of the bins of a numeric column; numpy alone, because warnings need them where polars is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def bin_edges(values: Numbers, bins: int) -> Numbers:
    """Return at most ``bins`` - 1 increasing inner edges of about equally filled bins; a lower edge is in its bin.

    A number that would fill a bin alone has one of its own, as the zeros of a count that is mostly zero.

    >>> bin_edges(np.array([0.0] * 96 + [1.0, 2.0, 3.0, 4.0]), 4)
    array([1., 3.])
    """
    numbers, counts = np.unique(values, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[: (bins - 1) // 2]
    frequent = frequent[counts[frequent] * bins >= len(values)]
    others = values[~np.isin(values, numbers[frequent])]
    count = max(1, bins - 2 * len(frequent))
    quantiles = np.quantile(others, np.arange(1, count) / count, method="higher") if len(others) else others
    following = numbers[np.minimum(frequent + 1, len(numbers) - 1)]
    edges = np.unique(np.concatenate([quantiles, numbers[frequent], following]))
    return edges[edges > numbers[:1]]
