"""A simulated log as CSV or Parquet files, so that ``prepare`` has something to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lpfs.data.simulation.chunks import SEPARATOR, scrambled
from lpfs.data.simulation.spec import Plan, Spec
from lpfs.data.simulation.values import Array
from lpfs.data.simulate_world import Block
from lpfs.errors import MissingPackageError

if TYPE_CHECKING:
    import polars as pl


def frame(plan: Plan, block: Block, day: int) -> pl.DataFrame:
    """Return raw values: the labels, the day (not in the Terabyte layout), and a column a field.

    Categories are text, counts are integers, a numeric field of width w is w columns ``name.0`` …, a bag is a
    list; a missing value is null.
    """
    import polars as pl

    rows = len(block.logit)
    columns: dict[str, Any] = {name: values.astype(np.uint8) for name, values in block.labels.items()}
    if plan.preset != "terabyte":
        columns["day"] = np.full(rows, day, np.int32)
    for spec in plan.specs:
        if spec.kind == "numeric" and spec.width == 1:
            columns[spec.name] = pl.Series(block.numbers[spec.name]).fill_nan(None).cast(pl.Int64)
        elif spec.kind == "numeric":
            wide = pl.DataFrame(block.numbers[spec.name]).fill_nan(None)
            columns.update({f"{spec.name}.{at}": wide[:, at] for at in range(spec.width)})
        elif spec.kind == "multi":
            values, lengths = block.bags[spec.name]
            owner = np.repeat(np.arange(rows), lengths)
            bags = pl.DataFrame({"row": owner, "value": text(spec, values, plan)})
            lists = bags.group_by("row", maintain_order=True).agg("value")
            every = pl.DataFrame({"row": np.arange(rows)})
            every = every.join(lists, on="row", how="left", maintain_order="left")
            columns[spec.name] = every["value"]
        else:
            columns[spec.name] = text(spec, block.ids[spec.name], plan)
    return pl.DataFrame(columns)


def text(spec: Spec, values: Array, plan: Plan) -> pl.Series:
    """Return eight hexadecimal digits a value; behind a letter where they could look like numbers."""
    import polars as pl

    known, where = np.unique(values, return_inverse=True)
    letter = "" if plan.preset == "terabyte" else "x"
    spelled = [
        None if value < 0 else f"{letter}{code:08x}"
        for value, code in zip(known.tolist(), scrambled(spec, known).tolist(), strict=True)
    ]
    return pl.Series(spelled, dtype=pl.String).gather(where)


class LogWriter:
    """Write chunks of raw values as files of a folder, in time order by name."""

    def __init__(self, folder: Path, plan: Plan, form: str) -> None:
        self.folder, self.plan, self.form = folder, plan, form
        self.paths: list[Path] = []
        self._digits = max(2, len(str(plan.days - 1)))

    @contextmanager
    def day(self, day: int) -> Iterator[Any]:
        """Open a day; give a function that adds a chunk to it."""
        if self.form == "parquet":
            part = iter(range(1_000_000))

            def add_parquet(block: Block) -> None:
                path = self.folder / f"day_{day:0{self._digits}d}.{next(part):04d}.parquet"
                frame(self.plan, block, day).write_parquet(path)
                self.paths.append(path)

            yield add_parquet
            return
        criteo = self.plan.preset == "terabyte"
        path = self.folder / (f"day_{day}" if criteo else f"day_{day:0{self._digits}d}.csv")
        self.paths.append(path)
        with path.open("wb") as file:

            def add_csv(block: Block) -> None:
                table = frame(self.plan, block, day)
                lists = [spec.name for spec in self.plan.specs if spec.kind == "multi"]
                import polars as pl

                table = table.with_columns(pl.col(lists).list.join(SEPARATOR)) if lists else table
                first = file.tell() == 0 and not criteo
                table.write_csv(file, include_header=first, separator="\t" if criteo else ",")

            yield add_csv


def need_polars() -> None:
    """Say how to get polars where it is missing."""
    try:
        import polars  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "writing CSV or Parquet needs polars: pip install polars (a Dataset needs nothing)"
        ) from None
