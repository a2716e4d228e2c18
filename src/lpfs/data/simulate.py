"""simulate: a click log whose truth is known.

A simulated log as CSV or Parquet files, so that ``prepare`` has something to read.

What is true of a simulated log: roles, effects, drift, and the best any model can do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lpfs._fileio import fsync_tree, write_json
from lpfs.data.dataset import Dataset
from lpfs.data.simulate_spec import FieldSpec, SimulationSpec
from lpfs.data.simulate_spec import preset_spec as planned
from lpfs.data.simulate_world import (
    BLOCK,
    SEPARATOR,
    Array,
    Reals,
    SimulatedRows,
    Simulator,
    _scrambled_id,
    chunks,
    sigmoid,
    writer_columns,
)
from lpfs.data.store.temporary import Workplace
from lpfs.data.store.writer import DatasetWriter, convert_write_errors
from lpfs.errors import DataError, InputError, MissingPackageError

if TYPE_CHECKING:
    import polars as pl


def raw_frame(plan: SimulationSpec, block: SimulatedRows, day: int) -> pl.DataFrame:
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
            bags = pl.DataFrame({"row": owner, "value": hex_text(spec, values, plan)})
            lists = bags.group_by("row", maintain_order=True).agg("value")
            every = pl.DataFrame({"row": np.arange(rows)})
            every = every.join(lists, on="row", how="left", maintain_order="left")
            columns[spec.name] = every["value"]
        else:
            columns[spec.name] = hex_text(spec, block.ids[spec.name], plan)
    return pl.DataFrame(columns)


def hex_text(spec: FieldSpec, values: Array, plan: SimulationSpec) -> pl.Series:
    """Return eight hexadecimal digits a value; behind a letter where they could look like numbers."""
    import polars as pl

    known, where = np.unique(values, return_inverse=True)
    letter = "" if plan.preset == "terabyte" else "x"
    spelled = [
        None if value < 0 else f"{letter}{code:08x}"
        for value, code in zip(known.tolist(), _scrambled_id(spec, known).tolist(), strict=True)
    ]
    return pl.Series(spelled, dtype=pl.String).gather(where)


class RawLogWriter:
    """Write chunks of raw values as files of a folder, in time order by name."""

    def __init__(self, folder: Path, plan: SimulationSpec, form: str) -> None:
        self.folder, self.plan, self.form = folder, plan, form
        self.paths: list[Path] = []
        self._digits = max(2, len(str(plan.days - 1)))

    @contextmanager
    def day(self, day: int) -> Iterator[Any]:
        """Open a day; give a function that adds a chunk to it."""
        if self.form == "parquet":
            part = iter(range(1_000_000))

            def add_parquet(block: SimulatedRows) -> None:
                path = self.folder / f"day_{day:0{self._digits}d}.{next(part):04d}.parquet"
                raw_frame(self.plan, block, day).write_parquet(path)
                self.paths.append(path)

            yield add_parquet
            return
        criteo = self.plan.preset == "terabyte"
        path = self.folder / (f"day_{day}" if criteo else f"day_{day:0{self._digits}d}.csv")
        self.paths.append(path)
        with path.open("wb") as file:

            def add_csv(block: SimulatedRows) -> None:
                table = raw_frame(self.plan, block, day)
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


BINS = 20_000  # of the logit, from -20 to 20


class BestPossibleScores:
    """AUC and logloss of a model that knows the probability of every click, gathered day by day.

    AUC = Σ p(i)·(1 - p(j)) over rows i above j (ties count half), divided by Σ p · Σ (1 - p): no labels, so
    no luck. Logits are counted in bins of 0.002, so that memory does not grow with the rows.
    """

    def __init__(self, days: int) -> None:
        self._clicks = np.zeros((days, BINS))
        self._others = np.zeros((days, BINS))
        self._loss = np.zeros(days)

    def add(self, day: int, logit: Reals) -> None:
        """Count rows of a day, block by block so that sums do not depend on the chunks."""
        for start in range(0, len(logit), BLOCK):
            self._add(day, logit[start : start + BLOCK])

    def _add(self, day: int, logit: Reals) -> None:
        chance = sigmoid(logit)
        where = np.clip((logit + 20.0) * (BINS / 40.0), 0, BINS - 1).astype(np.int64)
        self._clicks[day] += np.bincount(where, chance, BINS)
        self._others[day] += np.bincount(where, 1.0 - chance, BINS)
        self._loss[day] += float((np.logaddexp(0.0, logit) - chance * logit).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the ceiling over all rows and of each day."""
        rows = (self._clicks + self._others).sum(1)
        by_day = [_binned_auc(clicks, others) for clicks, others in zip(self._clicks, self._others, strict=True)]
        return {
            "auc": _binned_auc(self._clicks.sum(0), self._others.sum(0)),
            "logloss": float(self._loss.sum() / rows.sum()),
            "auc_by_day": by_day,
            "logloss_by_day": (self._loss / rows).tolist(),
            "click_rate_by_day": (self._clicks.sum(1) / rows).tolist(),
        }


def _binned_auc(clicks: Reals, others: Reals) -> float:
    """Return the AUC of scores counted in bins."""
    below = np.cumsum(others) - others / 2
    return float(clicks @ below / (clicks.sum() * others.sum()))


def truth_record(world: Simulator, ceiling: BestPossibleScores) -> dict[str, Any]:
    """Return what ``truth.json`` holds."""
    plan = world.plan
    fields = []
    for spec in plan.specs:
        term = spec.name if spec.is_first_of_pair else spec.partner
        related = [each.name for each in plan.specs if each.source == spec.name or spec.source == each.name]
        fields.append(
            {
                "name": spec.name,
                "kind": spec.kind,
                "group": spec.group,
                "role": spec.role,
                "true": spec.true,
                "effect": spec.effect,
                "copy_of": spec.source if spec.role == "copy" else None,
                "correlated_with": spec.source if spec.role == "correlated" else None,
                "pair_with": spec.partner,
                "related": related,
                "missing": spec.missing,
                "values": spec.values,
                "width": spec.width,
                "drift": spec.drift if spec.true else None,
                "strength_by_day": world.strength[str(term)] if spec.true else None,
            }
        )
    terms = list(world.weights)
    return {
        "preset": plan.preset,
        "seed": world.seed,
        "rows": plan.rows,
        "days": plan.days,
        "base_rate": plan.base_rate,
        "true": [spec.name for spec in plan.specs if spec.true],
        "fields": fields,
        "pairs": [
            {"fields": [spec.name, spec.partner], "effect": spec.effect}
            for spec in plan.specs
            if spec.role == "pair" and spec.is_first_of_pair
        ],
        "bayes": ceiling.to_json(),
        "tasks": {
            task.name: {
                "base_rate": task.base_rate,
                "needs_click": task.after,
                "weights": dict(zip(terms, world.task_weights[:, at].tolist(), strict=True)),
            }
            for at, task in enumerate(plan.tasks)
        },
        "plan": plan.to_json(),
    }


GENERATOR = 1  # goes up when the same seed gives other rows
CHUNK = 1 << 18
Progress = Callable[[int, int], None]
Format = Literal["dataset", "csv", "parquet"]


@overload
def simulate(
    out: str | os.PathLike[str],
    preset: str = ...,
    *,
    rows: int | None = ...,
    days: int | None = ...,
    seed: int = ...,
    format: Literal["dataset"] = ...,
    chunk: int = ...,
    replace: bool = ...,
    progress: Progress | None = ...,
) -> Dataset: ...
@overload
def simulate(
    out: str | os.PathLike[str],
    preset: str = ...,
    *,
    rows: int | None = ...,
    days: int | None = ...,
    seed: int = ...,
    format: Literal["csv", "parquet"],
    chunk: int = ...,
    replace: bool = ...,
    progress: Progress | None = ...,
) -> list[Path]: ...
def simulate(
    out: str | os.PathLike[str],
    preset: str = "small",
    *,
    rows: int | None = None,
    days: int | None = None,
    seed: int = 0,
    format: Format = "dataset",
    chunk: int = CHUNK,
    replace: bool = False,
    progress: Progress | None = None,
) -> Dataset | list[Path]:
    """Write a click log with known true fields, noisy copies, pairs, noise and drift.

    Args:
        out: the folder to make; ``truth.json`` in it says what is true.
        preset: ``small``, ``terabyte``, ``industrial`` or ``industrial-small``.
        rows: how many in all; each preset has its own default.
        days: how many days they are spread over; each preset has its own default.
        seed: decides everything. The same seed gives the same rows, whatever ``chunk``.
        format: ``dataset``, or ``csv`` or ``parquet`` for raw values in ``out/log`` (the CSV of the Terabyte
            preset is ``day_0`` … as the real logs, for ``prepare`` with its preset ``criteo-terabyte``).
        chunk: about how many rows are in memory at a time.
        replace: put the new log in the place of an older one. A Dataset of the same seed and settings is kept
            as it is.
        progress: called with the rows written so far and the rows in all.

    Returns the Dataset, or the paths of the files in time order.

    >>> import tempfile
    >>> dataset = simulate(tempfile.mkdtemp() + "/log", "small", rows=1000)
    >>> dataset.rows, len(dataset.days())
    (1000, 10)

    """
    if format not in ("dataset", "csv", "parquet"):
        raise InputError(f"format must be dataset, csv or parquet, found {format!r}")
    for name, value, least in (("seed", seed, 0), ("chunk", chunk, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number >= {least}, found {value!r}")
    plan = planned(preset, rows, days, seed)
    tell = progress or (lambda done, total: None)
    if format == "dataset":
        return _write_dataset(Path(out), plan, seed, chunk, replace=replace, tell=tell)
    need_polars()
    return _write_raw_log(Path(out), plan, seed, chunk, format, replace=replace, tell=tell)


def fingerprint(plan: SimulationSpec, seed: int) -> str:
    """Return what identifies a simulated log."""
    made = {"generator": GENERATOR, "seed": seed, "plan": plan.to_json()}
    return "simulated-" + hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:32]


def _write_dataset(
    out: Path, plan: SimulationSpec, seed: int, chunk: int, *, replace: bool, tell: Progress
) -> Dataset:
    """Write a Dataset, unless the very same one is there."""
    mark = fingerprint(plan, seed)
    if (out / "dataset.json").exists():
        try:
            there = Dataset(out)
        except DataError:
            pass
        else:
            if there.fingerprint == mark:
                tell(plan.rows, plan.rows)
                return there
    settings = {"simulate": {"preset": plan.preset, "rows": plan.rows, "days": plan.days, "seed": seed}}
    with DatasetWriter(out, plan.schema(), fingerprint=mark, settings=settings, replace=replace) as writer:
        world, ceiling, done = Simulator(plan, seed), BestPossibleScores(plan.days), 0
        for day, size in enumerate(plan.day_rows()):
            shard = writer.day(f"day_{day}")
            for block in chunks(world, day, size, chunk):
                shard.append(**writer_columns(world, block))
                ceiling.add(day, block.logit)
                done += len(block.logit)
                tell(done, plan.rows)
        writer.attach("truth.json", truth_record(world, ceiling))
    return Dataset(out)


def _write_raw_log(
    out: Path, plan: SimulationSpec, seed: int, chunk: int, form: str, *, replace: bool, tell: Progress
) -> list[Path]:
    """Write raw values in ``out/log`` and the truth beside them."""
    out = Path(os.path.abspath(out))
    with convert_write_errors(out):
        place = Workplace(out, replace=replace)
        try:
            folder = place.folder / "log"
            folder.mkdir()
            world, ceiling, done = Simulator(plan, seed), BestPossibleScores(plan.days), 0
            writer = RawLogWriter(folder, plan, form)
            for day, size in enumerate(plan.day_rows()):
                with writer.day(day) as add:
                    for block in chunks(world, day, size, chunk):
                        add(block)
                        ceiling.add(day, block.logit)
                        done += len(block.logit)
                        tell(done, plan.rows)
            write_json(place.folder / "truth.json", truth_record(world, ceiling))
            fsync_tree(place.folder)
            place.commit()
        finally:
            place.discard()
    return [out / "log" / path.name for path in writer.paths]
