"""simulate: write a click log whose true fields are known, as a Dataset or as CSV or Parquet files."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lpfs._fileio import StagingDirectory, fsync_tree, write_json
from lpfs._validation import check_int
from lpfs.data.dataset import Dataset
from lpfs.data.simulate_spec import FieldSpec, SimulationSpec, preset_spec
from lpfs.data.simulate_world import Array, BestPossibleScores, Reals, SimulatedRows, Simulator, scramble_ids, sigmoid
from lpfs.data.store.writer import DatasetWriter, convert_write_errors
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    import polars as pl  # for raw files only: a simulated Dataset needs numpy alone

GENERATOR_VERSION = 1  # part of the fingerprint; increase it if the same seed gives other rows
CHUNK_ROWS = 1 << 18  # default number of rows in memory
BAG_SEPARATOR = "|"  # between the values of a bag in a CSV file

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
    chunk: int = CHUNK_ROWS,
    replace: bool = False,
    progress: Progress | None = None,
) -> Dataset | list[Path]:
    """Write a click log with known true fields, noisy copies, pairs, noise and drift.

    Args:
        out: the directory to create; ``truth.json`` in it records the truth.
        preset: ``small``, ``terabyte``, ``industrial``, ``industrial-small``, ``catalog`` (ids with thousands of values
            matter; coarsenings, sums and copies of fields) or ``turnover`` (the same with ids that turn over).
        rows: total number of rows; the default depends on the preset.
        days: number of days; the default depends on the preset.
        seed: seed of all random numbers. The same seed gives the same rows for every ``chunk``.
        format: ``dataset``, or ``csv`` or ``parquet`` for raw values in ``out/log`` (the CSV files of the Terabyte
            preset are ``day_0`` …, as in the real log, for ``prepare`` with its preset ``criteo-terabyte``).
        chunk: approximate number of rows in memory.
        replace: replace an older log at ``out``. A Dataset with the same seed and settings is kept.
        progress: called with the number of rows written so far and the total number of rows.

    Returns:
        The Dataset, or the paths of the files in time order.

    >>> import tempfile
    >>> dataset = simulate(tempfile.mkdtemp() + "/log", "small", rows=1000)
    >>> dataset.rows, len(dataset.days())
    (1000, 10)
    """
    if format not in ("dataset", "csv", "parquet"):
        raise InputError(f"format must be dataset, csv or parquet, found {format!r}")
    seed, chunk = check_int("seed", seed, 0), check_int("chunk", chunk, 1)
    spec, folder = preset_spec(preset, rows, days, seed), Path(os.path.abspath(out))
    progress = progress or (lambda done, total: None)
    if format != "dataset":
        with convert_write_errors(folder), StagingDirectory(folder, replace=replace) as staging:
            raw = RawLogWriter(staging / "log", spec, format)
            truth = _generate(spec, seed, chunk, progress, lambda _, day, block: raw.append(day, block))
            write_json(staging / "truth.json", truth)
            fsync_tree(staging)
        return [folder / "log" / path.name for path in raw.paths]
    fingerprint = simulation_fingerprint(spec, seed)
    if (folder / "dataset.json").exists():
        with suppress(DataError):
            existing = Dataset(folder)
            if existing.fingerprint == fingerprint:
                progress(spec.rows, spec.rows)
                return existing
    settings = {"simulate": {"preset": spec.preset, "rows": spec.rows, "days": spec.days, "seed": seed}}
    with DatasetWriter(folder, spec.schema(), fingerprint=fingerprint, settings=settings, replace=replace) as writer:
        day_writers = [writer.day(f"day_{day}") for day in range(spec.days)]

        def write(simulator: Simulator, day: int, block: SimulatedRows) -> None:
            day_writers[day].append(**simulator.writer_columns(block))

        writer.attach("truth.json", _generate(spec, seed, chunk, progress, write))
    return Dataset(folder)


def simulation_fingerprint(spec: SimulationSpec, seed: int) -> str:
    """Return the fingerprint of a simulated Dataset."""
    content = {"generator": GENERATOR_VERSION, "seed": seed, "plan": spec.to_json()}
    return "simulated-" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def is_simulated(dataset: Dataset) -> bool:
    """Return whether a Dataset was simulated by this version, so that its rows can be drawn again."""
    return _spec_of(dataset) is not None


def _spec_of(dataset: Dataset) -> tuple[SimulationSpec, int] | None:
    settings = dataset.settings.get("simulate")
    if not isinstance(settings, dict) or set(settings) != {"preset", "rows", "days", "seed"}:
        return None
    try:
        spec = preset_spec(settings["preset"], settings["rows"], settings["days"], settings["seed"])
    except InputError:
        return None
    return (spec, settings["seed"]) if simulation_fingerprint(spec, settings["seed"]) == dataset.fingerprint else None


def true_probabilities(dataset: Dataset) -> Reals | None:
    """Return the probability of a click in every row of a simulated Dataset, or of a part of one.

    The rows are drawn again, by the same generator. None if the Dataset was not simulated, or by another version.
    """
    found = _spec_of(dataset)
    if found is None:
        return None
    (spec, seed), pieces, first = found, list[Reals](), 0
    simulator = Simulator(spec, seed)
    for day, rows in enumerate(spec.day_rows()):
        low, high = (min(rows, max(0, edge - first)) for edge in dataset.span)
        if low < high:
            logits = np.concatenate([block.logit for block in simulator.chunks(day, rows, CHUNK_ROWS)])
            pieces.append(sigmoid(logits[low:high]))
        first += rows
    return np.concatenate(pieces)


def _generate(
    spec: SimulationSpec,
    seed: int,
    chunk: int,
    progress: Progress,
    write: Callable[[Simulator, int, SimulatedRows], None],
) -> dict[str, Any]:
    """Pass the rows of all days to ``write``, in chunks; return the truth."""
    simulator, scores, done = Simulator(spec, seed), BestPossibleScores(spec.days), 0
    for day, rows in enumerate(spec.day_rows()):
        for block in simulator.chunks(day, rows, chunk):
            write(simulator, day, block)
            scores.add(day, block.logit)
            done += len(block.logit)
            progress(done, spec.rows)
    return truth_record(simulator, scores)


class RawLogWriter:
    """Write chunks of raw values as files whose names are in time order."""

    def __init__(self, folder: Path, spec: SimulationSpec, format: str) -> None:
        self.folder, self.spec, self.format = folder, spec, format
        folder.mkdir()
        self.paths: list[Path] = []
        self._chunks: Counter[int] = Counter()  # number of chunks of each day
        self._bags = [field.name for field in spec.specs if field.kind == "multi"]

    def append(self, day: int, block: SimulatedRows) -> None:
        """Append a chunk: a new Parquet file, or more lines of the day's CSV file."""
        import polars as pl

        frame = raw_frame(self.spec, block, day)
        number, digits = self._chunks[day], max(2, len(str(self.spec.days - 1)))
        self._chunks[day] += 1
        if self.format == "parquet":
            self.paths.append(self.folder / f"day_{day:0{digits}d}.{number:04d}.parquet")
            frame.write_parquet(self.paths[-1])
            return
        terabyte = self.spec.preset == "terabyte"
        if number == 0:
            self.paths.append(self.folder / (f"day_{day}" if terabyte else f"day_{day:0{digits}d}.csv"))
        frame = frame.with_columns(pl.col(self._bags).list.join(BAG_SEPARATOR))
        with self.paths[-1].open("ab") as file:
            header = number == 0 and not terabyte
            frame.write_csv(file, include_header=header, separator="\t" if terabyte else ",")


def raw_frame(spec: SimulationSpec, block: SimulatedRows, day: int) -> pl.DataFrame:
    """Return raw values: the labels, the day (not in the Terabyte layout), and the columns of each field.

    Categories are text, counts are integers, a numeric field of width w has w columns ``name.0`` …, a bag is a
    list. A missing value is null.
    """
    import polars as pl

    rows = len(block.logit)
    columns: dict[str, Any] = {name: values.astype(np.uint8) for name, values in block.labels.items()}
    if spec.preset != "terabyte":
        columns["day"] = np.full(rows, day, np.int32)
    for field in spec.specs:
        if field.kind == "numeric" and field.width == 1:
            columns[field.name] = pl.Series(block.numbers[field.name]).fill_nan(None).cast(pl.Int64)
        elif field.kind == "numeric":
            wide = pl.DataFrame(block.numbers[field.name]).fill_nan(None)
            columns.update({f"{field.name}.{column}": wide[:, column] for column in range(field.width)})
        elif field.kind == "multi":
            values, lengths = block.bags[field.name]
            all_rows = pl.DataFrame({"row": np.arange(rows)})
            bags = pl.DataFrame({"row": np.repeat(np.arange(rows), lengths), "value": hex_text(field, values, spec)})
            lists = bags.group_by("row", maintain_order=True).agg("value")
            columns[field.name] = all_rows.join(lists, on="row", how="left", maintain_order="left")["value"]
        else:
            columns[field.name] = hex_text(field, block.ids[field.name], spec)
    return pl.DataFrame(columns)


def hex_text(field: FieldSpec, values: Array, spec: SimulationSpec) -> pl.Series:
    """Return "x", so that no value is read as a number (not in the Terabyte layout), and eight hex digits, or null."""
    import polars as pl

    distinct, index = np.unique(values, return_inverse=True)
    prefix = "" if spec.preset == "terabyte" else "x"
    codes = zip(distinct.tolist(), scramble_ids(field, distinct).tolist(), strict=True)
    texts = [None if value < 0 else f"{prefix}{code:08x}" for value, code in codes]
    return pl.Series(texts, dtype=pl.String).gather(index)


def truth_record(simulator: Simulator, scores: BestPossibleScores) -> dict[str, Any]:
    """Return the contents of ``truth.json``: roles, effects and drift, and the best scores that any model can reach."""
    spec, terms = simulator.spec, list(simulator.weights)
    fields = []
    for field in spec.specs:
        term = field.name if field.is_first_of_pair else str(field.partner)
        fields.append(
            {
                "name": field.name,
                "kind": field.kind,
                "group": field.group,
                "role": field.role,
                "true": field.true,
                "effect": field.effect,
                "copy_of": field.source if field.role == "copy" else None,
                "correlated_with": field.source if field.role == "correlated" else None,
                "group_of": field.source if field.role == "coarse" else None,
                "sum_of": [field.source, field.second] if field.role == "sum" else None,
                "pair_with": field.partner,
                "related": [
                    other.name
                    for other in spec.specs
                    if field.name in (other.source, other.second) or other.name in (field.source, field.second)
                ],
                "missing": field.missing,
                "values": field.values,
                "width": field.width,
                "drift": field.drift if field.true else None,
                "strength_by_day": simulator.drift[term] if field.true else None,
            }
        )
    return {
        "preset": spec.preset,
        "seed": simulator.seed,
        "rows": spec.rows,
        "days": spec.days,
        "base_rate": spec.base_rate,
        "true": [field.name for field in spec.specs if field.true],
        "fields": fields,
        "pairs": [
            {"fields": [field.name, field.partner], "effect": field.effect}
            for field in spec.specs
            if field.role == "pair" and field.is_first_of_pair
        ],
        "bayes": scores.to_json(),
        "tasks": {
            task.name: {
                "base_rate": task.base_rate,
                "needs_click": task.after,
                "weights": dict(zip(terms, simulator.task_weights[:, index].tolist(), strict=True)),
            }
            for index, task in enumerate(spec.tasks)
        },
        "plan": spec.to_json(),
    }
