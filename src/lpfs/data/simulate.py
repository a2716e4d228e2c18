"""simulate: a click log whose truth is known."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, overload

from lpfs.data.dataset import Dataset
from lpfs.data.simulation.chunks import chunks, columns
from lpfs.data.simulate_spec import plan as planned
from lpfs.data.simulation.rawlog import LogWriter, need_polars
from lpfs.data.simulation.spec import Plan
from lpfs.data.simulation.truth import Ceiling, truth
from lpfs.data.simulate_world import World
from lpfs.data.store.format import sync_all, write_json
from lpfs.data.store.temporary import Workplace
from lpfs.data.store.writer import DatasetWriter, telling
from lpfs.errors import DataError, InputError

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
        return to_dataset(Path(out), plan, seed, chunk, replace=replace, tell=tell)
    need_polars()
    return to_log(Path(out), plan, seed, chunk, format, replace=replace, tell=tell)


def fingerprint(plan: Plan, seed: int) -> str:
    """Return what identifies a simulated log."""
    made = {"generator": GENERATOR, "seed": seed, "plan": plan.to_json()}
    return "simulated-" + hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:32]


def to_dataset(out: Path, plan: Plan, seed: int, chunk: int, *, replace: bool, tell: Progress) -> Dataset:
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
        world, ceiling, done = World(plan, seed), Ceiling(plan.days), 0
        for day, size in enumerate(plan.day_rows()):
            shard = writer.day(f"day_{day}")
            for block in chunks(world, day, size, chunk):
                shard.append(**columns(world, block))
                ceiling.add(day, block.logit)
                done += len(block.logit)
                tell(done, plan.rows)
        writer.attach("truth.json", truth(world, ceiling))
    return Dataset(out)


def to_log(
    out: Path, plan: Plan, seed: int, chunk: int, form: str, *, replace: bool, tell: Progress
) -> list[Path]:
    """Write raw values in ``out/log`` and the truth beside them."""
    out = Path(os.path.abspath(out))
    with telling(out):
        place = Workplace(out, replace=replace)
        try:
            folder = place.folder / "log"
            folder.mkdir()
            world, ceiling, done = World(plan, seed), Ceiling(plan.days), 0
            writer = LogWriter(folder, plan, form)
            for day, size in enumerate(plan.day_rows()):
                with writer.day(day) as add:
                    for block in chunks(world, day, size, chunk):
                        add(block)
                        ceiling.add(day, block.logit)
                        done += len(block.logit)
                        tell(done, plan.rows)
            write_json(place.folder / "truth.json", truth(world, ceiling))
            sync_all(place.folder)
            place.commit()
        finally:
            place.discard()
    return [out / "log" / path.name for path in writer.paths]
