"""Small Datasets for the tests: every kind of field, values that tell the row they belong to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema

SCHEMA = Schema(
    (
        Field("row", cardinality=100_000),
        Field("bag", "multi", cardinality=50),
        Field("tiny", cardinality=5),
        Field("x", "numeric"),
        Field("wide", "numeric", dim=3),
    ),
    label="click",
    tasks=("like",),
)


def columns(first: int, stop: int) -> dict:
    at = np.arange(first, stop)
    lengths = at % 4
    x = at * 0.5
    x[at % 7 == 3] = np.nan
    return {
        "ids": {"row": at, "tiny": at % 5},
        "bags": {"bag": (np.concatenate([[], *(np.arange(n) + 2 for n in lengths)]).astype(int), lengths)},
        "dense": {"x": x, "wide": np.stack([at, at + 1, at + 2], 1)},
        "labels": {"click": at % 2, "like": at % 3 / 2},
    }


def make(out: Path, days: tuple[int, ...] = (40, 1, 59), chunk: int = 17, schema: Schema = SCHEMA) -> Dataset:
    """Write days of so many rows; row i of all has id i in field ``row``."""
    with DatasetWriter(out, schema, fingerprint="made", settings={"by": "tests"}) as writer:
        row = 0
        for number, rows in enumerate(days):
            day = writer.day(f"day {number}", negative_rate=0.5)
            for start in range(0, rows, chunk):
                day.append(**columns(row + start, row + min(start + chunk, rows)))
            row += rows
    return Dataset(out)
