"""The results of a folder, read back: by method and K, drawn over the test rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lpfs.compare.bootstrap import Floats, bootstrap
from lpfs.compare.plan import ALL_FIELDS
from lpfs.compare.series import Point, Series, areas
from lpfs.compare.store import Record, Store, read
from lpfs.methods.registry import METHODS

Measure = Literal["auc", "logloss"]


class Loaded:
    """All results of a folder, with their scores drawn over the test rows."""

    def __init__(self, store: Store) -> None:
        self.store = store
        known = {name: number for number, name in enumerate((ALL_FIELDS, *METHODS))}

        def place(each: Record) -> tuple[int, str, int, int]:
            return known.get(each["method"], len(known)), each["method"], each["keep"], each["seed"]

        self.all = sorted(store.results(), key=place)
        self.done = [each for each in self.all if each["status"] == "done"]
        self.drawn = drawn(store, sorted({each["trained"] for each in self.done}))
        self.sizes = sorted({each["keep"] for each in self.all if each["method"] != ALL_FIELDS})
        self.methods = [name for name in dict.fromkeys(each["method"] for each in self.all) if name != ALL_FIELDS]
        seeds = {each["seed"] for each in self.all}
        costs = {seed: read(store.seed(seed) / "cost.json") for seed in sorted(seeds)}
        self.pretraining = {seed: each for seed, each in costs.items() if each is not None}

    def of(self, method: str, keep: int | None = None) -> list[Record]:
        """Return the results of a method, of one size or of all, in the order of the seeds."""
        return [each for each in self.done if each["method"] == method and keep in (None, each["keep"])]

    def series(self, method: str, keep: int | None = None, of: Measure = "auc") -> Series:
        """Return the test AUC, or the test logloss, of every seed."""
        return {
            each["seed"]: Point(each["test"][of], self.drawn[each["trained"]][of])
            for each in self.of(method, keep)
        }

    def areas(self, method: str) -> Series:
        """Return the area under the K-AUC curve of every seed."""
        return areas({size: self.series(method, size) for size in self.sizes})


def drawn(store: Store, names: Sequence[str]) -> dict[str, dict[Measure, Floats]]:
    """Return, for every set of fields that was trained, AUC and logloss under every draw of the test rows."""
    if not names:
        return {}
    labels = np.load(store.labels)
    if not np.isin(labels, (0, 1)).all():  # no bootstrap of rows that are clicked by halves
        return {name: {"auc": np.full(1, np.nan), "logloss": np.full(1, np.nan)} for name in names}
    scores = [np.load(store.folder / "trained" / f"{name}.npy") for name in names]
    aucs, lost = bootstrap(scores, labels)
    return {name: {"auc": aucs[:, number], "logloss": lost[:, number]} for number, name in enumerate(names)}
