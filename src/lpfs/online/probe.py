r"""Additive probe: what a hidden field would add to the logits of the model, read from every row at little cost.

For each value v of a field, the step of Newton that corrects the logits of its rows, with a prior and a memory:

.. math:: w_v = \frac{\sum (y - p)}{\tau + \sum p (1 - p)}

Old rows lose weight exponentially. The gain of a row, its loss at logit z minus its loss at z + w, is computed before
the row is added. A field that only matters together with others has no such gain; the network itself is probed for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batch import Batch
from lpfs.online.drift import EDGES
from lpfs.schema import Schema
from lpfs.train.intervals import Floats, Ints

MAX_BINS = 4096  # values of a field; further ids share them
MEMORY_ROWS = 50_000  # rows after which the weight of a row has fallen to 1/e
PRIOR = 10.0  # τ
MAX_SCALE = 1e6  # of the weights, before they are divided by it


class AdditiveProbe:
    """Statistics of the values of all fields but bags, in the order of ``names``."""

    def __init__(self, schema: Schema) -> None:
        ids = [field for field in schema if field.kind == "categorical"]
        columns = [field for field in schema if field.kind == "numeric" for _ in range(field.dim)]
        self.dense = [at for at, field in enumerate(columns) if field.dim == 1]
        self.names = tuple(field.name for field in (*ids, *(columns[at] for at in self.dense)))
        self._sizes = np.array([min(field.cardinality, MAX_BINS) for field in ids] + [len(EDGES) + 1] * len(self.dense))
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])[:-1]
        self.sums: Floats = np.zeros((2, int(self._sizes.sum()) + 1))  # residuals and curvatures; last: the scale
        self.sums[:, -1] = 1.0

    def values(self, batch: Batch, fields: Ints) -> Ints:
        """Return the positions (B, F) of the values of some fields in the statistics."""
        count = batch.ids.shape[1]
        dense = batch.dense.numpy()[:, [self.dense[at - count] for at in fields[fields >= count]]]
        columns = [batch.ids.numpy()[:, fields[fields < count]], np.searchsorted(EDGES, dense)]
        return np.asarray(np.concatenate(columns, 1) % self._sizes[fields] + self._starts[fields])

    def gains(self, values: Ints, logits: Floats, labels: Floats) -> npt.NDArray[np.float32]:
        """Return the gain (B, F) of adding each field to the logits: y·w - log(1 + p·(exp(w) - 1))."""
        prior = PRIOR * self.sums[0, -1]
        steps = (self.sums[0].take(values) / (prior + self.sums[1].take(values))).astype(np.float32)
        p = (1 / (1 + np.exp(-logits))).astype(np.float32)[:, None]
        return np.asarray(labels.astype(np.float32)[:, None] * steps - np.log1p(p * np.expm1(steps)))

    def add(self, values: Ints, logits: Floats, labels: Floats) -> None:
        """Add the rows of a batch."""
        rows, fields = values.shape
        p = 1 / (1 + np.exp(-logits))
        scale = self.sums[0, -1] * np.exp(rows / MEMORY_ROWS)
        size, flat = self.sums.shape[1] - 1, values.T.ravel()
        for sums, weights in zip(self.sums, (labels - p, p * (1 - p)), strict=True):
            sums[:-1] += np.bincount(flat, np.tile(scale * weights, fields), size)
        self.sums[:, -1] = scale
        if scale > MAX_SCALE:
            self.sums /= scale

    def state(self) -> torch.Tensor:
        """Return everything that changes."""
        return torch.from_numpy(self.sums)
