"""Small logs of every kind of column, and an engine that cuts them into pieces without a cluster."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from lpfs.data.engines.cluster import COUNTS, SAMPLE, ChunkState, ClusterEngine, PieceResults
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
    "twin": {"kind": "categorical"},
    "same": {"kind": "categorical"},
}


def table(rows: int = 600, seed: int = 0) -> pl.DataFrame:
    """Return a log over five days, with missing values, a copy of a column and a constant."""
    rng = np.random.default_rng(seed)

    def some(values: list) -> pl.Series:
        gone = rng.random(rows) < 0.1
        return pl.Series([None if out else value for value, out in zip(values, gone, strict=True)])

    bags = ["|".join(f"t{tag}" for tag in rng.integers(0, 9, size)) for size in rng.integers(1, 4, rows)]
    codes = some((rng.integers(0, 40, rows) ** 2).tolist())
    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, rows),
            "day": np.sort(rng.integers(20140501, 20140506, rows)) if seed % 2 else rng.integers(1, 6, rows),
            "role": rng.choice(["train", "train", "train", "valid", "test"], rows),
            "ad": some([f"ad é{number}" for number in rng.integers(0, 30, rows)]),
            "user": some([f"u{number}" for number in rng.integers(0, 200, rows)]),
            "code": codes,
            "hex": some([f"{number:x}" for number in rng.integers(2**31, 2**31 + 60, rows)]),
            "price": some(np.round(rng.normal(20, 9, rows), 3).tolist()),
            "age": some(rng.integers(10, 90, rows).tolist()),
            "tags": some(bags),
            "twin": codes.alias("twin"),
            "same": ["x"] * rows,
        }
    )


def written(folder: Path, form: str, files: int = 3) -> Path:
    """Write the log as so many files of unequal size."""
    folder.mkdir()
    frame = table()
    cuts = [0, 100, *([300] if files > 2 else []), frame.height]
    for index, (first, stop) in enumerate(pairwise(cuts)):
        part = frame.slice(first, stop - first)
        getattr(part, f"write_{form}")(folder / f"part_{index}.{form}")
    return folder


class HereEngine(ClusterEngine):
    """Does piece after piece in this process, the last one first, and adds up with polars."""

    def each(self, what, function, items):
        return [function(item) for item in reversed(items)][::-1]

    def lots(self, what, function, items):
        for lot in self.each(what, lambda item: list(function(item)), items):
            yield from lot

    def add_up(self, what, function, items, limits):
        found, tables = PieceResults(), []
        for value in self.lots(what, function, items):
            if isinstance(value, pl.DataFrame):
                tables.append(value)
            elif isinstance(value, LabelCopies):
                found.leaks.append(value)
            else:
                assert isinstance(value, ChunkState)
                found.notes.append(value)
        every = pl.concat([pl.DataFrame(schema=COUNTS), *tables])
        summed = (
            every.filter(pl.col("type") != SAMPLE).group_by("field", "type", "text", "number").agg(pl.sum("count"))
        )
        for index, limit in limits.items():
            own = summed.filter(pl.col("field") == index)
            kept = own.filter(pl.col("count") >= limit.least) if own["type"].n_unique() == 1 else own
            found.types[index], found.counts[index] = own["type"].unique().to_list(), kept
            found.left_out[index] = own.height - kept.height, own["count"].sum() - kept["count"].sum()
        samples = every.filter(pl.col("type") == SAMPLE)
        found.samples = {index: part for (index,), part in samples.group_by("field")}
        return found


def same_files(one: Path, two: Path) -> int:
    """Compare two folders byte by byte; return how many files they have."""
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    return len(names)


def prepared(source, out: Path, engine: str, *, block: int | None = None, **options):
    """Prepare with small blocks, so that a small log has many pieces."""
    options.setdefault("fields", FIELDS)
    job = plan_log(source, label="click", **options)
    if block is not None:
        job.source.block = block
    return run_plan(job, out, engine=engine)
