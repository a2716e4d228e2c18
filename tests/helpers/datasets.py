"""Small Datasets with every kind of field; the values of a row are functions of its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lpfs._fileio import file_checksum, json_checksum, write_json
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


def make_columns(first: int, stop: int) -> dict[str, Any]:
    """Return the arguments of ``DayWriter.append`` for rows ``first`` to ``stop``."""
    row = np.arange(first, stop)
    lengths = row % 4
    x = row * 0.5
    x[row % 7 == 3] = np.nan
    return {
        "ids": {"row": row, "tiny": row % 5},
        "bags": {"bag": (np.concatenate([[], *(np.arange(n) + 2 for n in lengths)]).astype(int), lengths)},
        "dense": {"x": x, "wide": np.stack([row, row + 1, row + 2], 1)},
        "labels": {"click": row % 2, "like": row % 3 / 2},
    }


def make_dataset(out: Path, days: tuple[int, ...] = (40, 1, 59), chunk: int = 17, schema: Schema = SCHEMA) -> Dataset:
    """Write days with these numbers of rows; row i of the Dataset has id i in field ``row``."""
    with DatasetWriter(out, schema, fingerprint="made", settings={"by": "tests"}) as writer:
        row = 0
        for number, rows in enumerate(days):
            day = writer.day(f"day {number}", negative_rate=0.5)
            for start in range(0, rows, chunk):
                day.append(**make_columns(row + start, row + min(start + chunk, rows)))
            row += rows
    return Dataset(out)


def update_checksums(folder: Path) -> None:
    """Make a manifest match files that a test changed, as somebody who forges a Dataset would."""
    values = json.loads((folder / "dataset.json").read_text())
    del values["checksum"]
    for name in values["files"]:
        path = folder / name
        values["files"][name] = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    write_json(folder / "dataset.json", {**values, "checksum": json_checksum(values)})
