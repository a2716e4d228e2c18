"""Drift alarms: per field its unseen values, the distribution of its values and its worth; for the model its loss.

Fields are compared window by window (one window per commit) with a reference, the first ``REFERENCE`` windows. An
alarm is raised when a statistic crosses its limit and not again before it has fallen below half of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lpfs.data.batch import Batch
from lpfs.schema import Schema
from lpfs.train.metrics import Floats, population_stability

BINS = 64  # of the values of a field; ids share bins
EDGES = np.array([-1.28, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.28])  # deciles of standardized numbers
REFERENCE = 5  # windows
KINDS = {  # of alarms of a field: the limit, and the message
    "distribution": (0.2, "population stability index {:.3f}"),
    "unseen": (0.05, "share of unseen values increased by {:.1%}"),
    "worth": (6.0, "worth changed by {:.1f} standard errors"),
}
MIN_WORTH_CHANGE = 5e-4  # change of the worth, in loss per row, below which there is no alarm
MIN_BATCHES = 40  # that train gates, in the window and the reference of the worth, which are longer than the others
SLACK, LOSS_LIMIT = 0.25, 25.0  # of Page-Hinkley, in standard deviations of the loss of a batch
WARMUP_BATCHES = 100  # in which the loss still falls


@dataclass(frozen=True)
class Alarm:
    """A drift: of which field (None: the model), how large, since which row."""

    field: str | None
    kind: str
    size: float
    since: int
    message: str


class PageHinkley:
    """Detects a lasting increase of the loss of batches: the sum of what exceeds their mean by more than a slack."""

    def __init__(self) -> None:
        self.values = np.zeros(7)  # batches, mean, sum of squares, sum, its minimum, row of the minimum, warm-up left
        self.values[6] = WARMUP_BATCHES

    def add(self, loss: float, row: int) -> Alarm | None:
        """Add the loss of a batch that begins at ``row``."""
        count, mean, squares, total, lowest, since, warmup = self.values.tolist()
        if warmup > 0:
            self.values[6] = warmup - 1
            return None
        deviation = math.sqrt(squares / count) if count > 20 else 0.0
        count, delta = count + 1, loss - mean
        mean += delta / count
        squares += delta * (loss - mean)
        total += delta / deviation - SLACK if deviation > 0 else 0.0
        if total <= lowest:
            lowest, since = total, float(row)
        self.values[:6] = count, mean, squares, total, lowest, since
        size = total - lowest
        if size <= LOSS_LIMIT:
            return None
        self.values[:] = 0.0
        message = f"the loss has been above its mean {mean:.4f} since row {int(since):,}; last batch {loss:.4f}"
        return Alarm(None, "loss", size, int(since), message)


class DriftMonitor:
    """Counts values, unseen values and worth in windows, and compares each window with the reference."""

    def __init__(self, schema: Schema) -> None:
        ids = [field.name for field in schema if field.kind == "categorical"]
        dense = [field.name for field in schema if field.kind == "numeric" for _ in range(field.dim)]
        self.bags = [field.name for field in schema if field.kind == "multi"]
        self.names, size = schema.names, len(schema)
        self._positions = np.array([schema.index(name) for name in (*ids, *dense, *self.bags)])
        self.loss = PageHinkley()
        self.counts = np.zeros((len(self._positions), BINS))
        self.reference = np.zeros_like(self.counts)
        self.unseen = np.zeros((2, size))  # unseen values of the window, of the reference
        self.rows = np.zeros(4)  # rows of the window and the reference, windows of the reference, start for the worth
        self.worth = np.zeros((2, 3, size))  # window and reference: batches, sum and sum of squares
        self.since = np.full((len(KINDS), size), -1.0)  # row since which an alarm holds

    def add(self, batch: Batch, unseen: Mapping[str, int], worth: Floats | None, loss: float, row: int) -> Alarm | None:
        """Add a batch that begins at ``row``."""
        count = self.counts.shape[0] - len(self.bags)  # of columns that all rows have
        bins = np.concatenate([batch.ids.numpy() % BINS, np.searchsorted(EDGES, batch.dense.numpy())], 1)
        flat = (bins + np.arange(count) * BINS).ravel()
        self.counts[:count] += np.bincount(flat, minlength=count * BINS).reshape(count, BINS)
        for at, name in enumerate(self.bags, count):
            self.counts[at] += np.bincount(batch.bags[name][0].numpy() % BINS, minlength=BINS)
        for name, values in unseen.items():
            self.unseen[0, self.names.index(name)] += values
        self.rows[0] += len(batch)
        if worth is not None:
            self.worth[0] += np.ones_like(worth), worth, worth**2
        return self.loss.add(loss, row)

    def close_window(self, first_row: int) -> list[Alarm]:
        """Compare the window that began at ``first_row`` with the reference, or add it to the reference."""
        alarms: list[Alarm] = []
        if not self.rows[0]:
            return alarms
        self.rows[3] = first_row if self.rows[3] < 0 else self.rows[3]
        has_reference, (batches, known) = self.rows[2] >= REFERENCE, self.worth[:, 0].max(1)
        compares_worth = has_reference and min(batches, known) >= MIN_BATCHES
        if has_reference:
            for (kind, (limit, text)), since, sizes in zip(KINDS.items(), self.since, self._statistics(), strict=True):
                if kind == "worth" and not compares_worth:
                    continue
                row = int(self.rows[3]) if kind == "worth" else first_row
                for position in np.flatnonzero((sizes > limit) & (since < 0)):
                    size = float(sizes[position])
                    message = f"{text.format(size)}, since row {row:,}"
                    alarms.append(Alarm(self.names[position], kind, size, row, message))
                    since[position] = row
                since[sizes < limit / 2] = -1
        else:
            self.reference += self.counts
            self.unseen[1] += self.unseen[0]
            self.rows[1:3] += self.rows[0], 1
        if known < MIN_BATCHES:  # gates are not trained in the first batches
            self.worth[1] += self.worth[0]
        if known < MIN_BATCHES or compares_worth:
            self.worth[0] = 0.0
            self.rows[3] = -1
        for window in (self.counts, self.unseen[0], self.rows[:1]):
            window[:] = 0.0
        return alarms

    def _statistics(self) -> tuple[Floats, Floats, Floats]:
        """Return the population stability, the increase of the share of unseen values and the change of the worth."""
        distribution = np.zeros(len(self.names))
        np.maximum.at(distribution, self._positions, population_stability(self.reference, self.counts))
        share, before = self.unseen[0] / self.rows[0], self.unseen[1] / self.rows[1]
        batches, totals, squares = self.worth.transpose(1, 0, 2)  # (2, N) each
        means = totals / np.maximum(batches, 1)
        deviations = np.maximum(squares - batches * means**2, 0.0)
        error = np.sqrt((deviations / np.maximum(batches, 2) ** 2).sum(0))
        change = np.abs(means[0] - means[1])
        standard = np.where((error > 0) & (change > MIN_WORTH_CHANGE), change / np.maximum(error, 1e-12), 0.0)
        return distribution, share - before, standard

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        arrays = {name: getattr(self, name) for name in ("counts", "reference", "unseen", "rows", "worth", "since")}
        return {name: torch.from_numpy(values) for name, values in (*arrays.items(), ("loss", self.loss.values))}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        for name, target in self.state().items():
            target.copy_(state[name])
