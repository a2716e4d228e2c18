"""Small logs with every kind of column, and a cluster engine that runs in this process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lpfs.data.dataset import Dataset
from lpfs.data.engines.cluster import COUNT_COLUMNS, SAMPLE_TYPE, ChunkState, ClusterEngine, PieceResults
from lpfs.data.passes import LabelCopies
from lpfs.data.planning import plan_log
from lpfs.data.prepare import run_plan

FIELDS = {
    "ad": {"kind": "categorical", "min_count": 2, "max_values": 12},
    "user": {"kind": "categorical", "hash": 50},
    "code": {"kind": "categorical"},
    "hex": {"kind": "categorical", "hexadecimal": True},
    "price": {"kind": "numeric"},
    "age": {"kind": "numeric", "bins": 4},
    "tags": {"kind": "multi", "separator": "|"},
    "duplicate": {"kind": "categorical"},
    "constant": {"kind": "categorical"},
}


def make_log(rows: int = 600, seed: int = 0) -> pl.DataFrame:
    """Return a log over five days, with missing values, a duplicate column and a constant one."""
    rng = np.random.default_rng(seed)

    def with_missing(values: list[Any]) -> pl.Series:
        missing = rng.random(rows) < 0.1
        return pl.Series([None if gone else value for value, gone in zip(values, missing, strict=True)])

    bags = ["|".join(f"t{tag}" for tag in rng.integers(0, 9, size)) for size in rng.integers(1, 4, rows)]
    codes = with_missing((rng.integers(0, 40, rows) ** 2).tolist())
    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, rows),
            "day": np.sort(rng.integers(20140501, 20140506, rows)) if seed % 2 else rng.integers(1, 6, rows),
            "role": rng.choice(["train", "train", "train", "valid", "test"], rows),
            "ad": with_missing([f"ad é{number}" for number in rng.integers(0, 30, rows)]),
            "user": with_missing([f"u{number}" for number in rng.integers(0, 200, rows)]),
            "code": codes,
            "hex": with_missing([f"{number:x}" for number in rng.integers(2**31, 2**31 + 60, rows)]),
            "price": with_missing(np.round(rng.normal(20, 9, rows), 3).tolist()),
            "age": with_missing(rng.integers(10, 90, rows).tolist()),
            "tags": with_missing(bags),
            "duplicate": codes.alias("duplicate"),
            "constant": ["x"] * rows,
        }
    )


def write_log(folder: Path, format: str, files: int = 3) -> Path:
    """Write the log as two or three files of different sizes."""
    folder.mkdir()
    frame = make_log()
    edges = [0, 100, *([300] if files > 2 else []), frame.height]
    for index, (first, stop) in enumerate(pairwise(edges)):
        part = frame.slice(first, stop - first)
        getattr(part, f"write_{format}")(folder / f"part_{index}.{format}")
    return folder


class InProcessEngine(ClusterEngine):
    """Process the pieces in this process, the last one first, and sum up counts with polars."""

    def map(self, task, function, items):
        return [function(item) for item in reversed(items)][::-1]

    def map_large(self, task, function, items):
        for values in self.map(task, lambda item: list(function(item)), items):
            yield from values

    def reduce_counts(self, task, function, items, limits):
        results, tables = PieceResults(), []
        for value in self.map_large(task, function, items):
            if isinstance(value, pl.DataFrame):
                tables.append(value)
            elif isinstance(value, LabelCopies):
                results.label_copies.append(value)
            else:
                assert isinstance(value, ChunkState)
                results.chunks.append(value)
        table = pl.concat([pl.DataFrame(schema=COUNT_COLUMNS), *tables])
        counts = table.filter(pl.col("type") != SAMPLE_TYPE)
        counts = counts.group_by("field", "type", "text", "number").agg(pl.sum("count"))
        for index, limit in limits.items():
            rows = counts.filter(pl.col("field") == index)
            kept = rows.filter(pl.col("count") >= limit.min_count) if rows["type"].n_unique() == 1 else rows
            results.types[index], results.counts[index] = rows["type"].unique().to_list(), kept
            results.left_out[index] = rows.height - kept.height, rows["count"].sum() - kept["count"].sum()
        samples = table.filter(pl.col("type") == SAMPLE_TYPE)
        results.samples = {index: part for (index,), part in samples.group_by("field")}
        return results


def assert_same_files(first: Path, second: Path) -> int:
    """Compare two directories byte for byte; return the number of files."""
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    return len(names)


def prepare_log(source: Path, out: Path, engine: str, *, block: int | None = None, **options: Any) -> Dataset:
    """Prepare a log; with a small ``block`` a small log has many pieces."""
    options.setdefault("fields", FIELDS)
    plan = plan_log(source, label="click", **options)
    if block is not None:
        plan.source.block = block
    return run_plan(plan, out, engine=engine)
