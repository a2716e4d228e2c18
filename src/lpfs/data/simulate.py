"""simulate: write a click log whose true fields are known, as a Dataset or as CSV or Parquet files.

``truth.json`` next to the rows records the role and the effect of every field, the drift, and the best AUC and
logloss that any model can reach.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lpfs._fileio import StagingDirectory, fsync_tree, write_json
from lpfs.data.dataset import Dataset
from lpfs.data.simulate_spec import FieldSpec, SimulationSpec, preset_spec
from lpfs.data.simulate_world import (
    BLOCK_ROWS,
    Array,
    Reals,
    SimulatedRows,
    Simulator,
    iter_chunks,
    scramble_ids,
    sigmoid,
    writer_columns,
)
from lpfs.data.store.writer import DatasetWriter, convert_write_errors
from lpfs.errors import DataError, InputError

if TYPE_CHECKING:
    import polars as pl  # raw files only: a simulated Dataset needs numpy alone

GENERATOR_VERSION = 1  # part of the fingerprint; increase it if the same seed gives other rows
CHUNK_ROWS = 1 << 18  # default number of rows in memory
LOGIT_BINS = 20_000  # bins of the logit from -20 to 20
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
        preset: ``small``, ``terabyte``, ``industrial`` or ``industrial-small``.
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
    for name, value, minimum in (("seed", seed, 0), ("chunk", chunk, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(f"{name} must be an integer >= {minimum}, found {value!r}")
    spec = preset_spec(preset, rows, days, seed)
    progress = progress or (lambda done, total: None)
    if format == "dataset":
        return _write_dataset(Path(out), spec, seed, chunk, replace=replace, progress=progress)
    return _write_raw_log(Path(out), spec, seed, chunk, format, replace=replace, progress=progress)


def fingerprint(spec: SimulationSpec, seed: int) -> str:
    """Return the fingerprint of a simulated log."""
    content = {"generator": GENERATOR_VERSION, "seed": seed, "plan": spec.to_json()}
    return "simulated-" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _write_dataset(
    out: Path, spec: SimulationSpec, seed: int, chunk: int, *, replace: bool, progress: Progress
) -> Dataset:
    """Write a Dataset, unless the same one exists."""
    identity = fingerprint(spec, seed)
    if (out / "dataset.json").exists():
        try:
            existing = Dataset(out)
        except DataError:
            pass
        else:
            if existing.fingerprint == identity:
                progress(spec.rows, spec.rows)
                return existing
    settings = {"simulate": {"preset": spec.preset, "rows": spec.rows, "days": spec.days, "seed": seed}}
    with DatasetWriter(out, spec.schema(), fingerprint=identity, settings=settings, replace=replace) as writer:
        simulator, scores = Simulator(spec, seed), BestPossibleScores(spec.days)
        days = [writer.day(f"day_{day}") for day in range(spec.days)]
        for day, block in _generate(simulator, scores, chunk, progress):
            days[day].append(**writer_columns(simulator, block))
        writer.attach("truth.json", truth_record(simulator, scores))
    return Dataset(out)


def _write_raw_log(
    out: Path, spec: SimulationSpec, seed: int, chunk: int, format: str, *, replace: bool, progress: Progress
) -> list[Path]:
    """Write raw values in ``out/log`` and the truth next to it."""
    out = Path(os.path.abspath(out))
    with convert_write_errors(out):
        staging = StagingDirectory(out, replace=replace)
        try:
            (staging.path / "log").mkdir()
            simulator, scores = Simulator(spec, seed), BestPossibleScores(spec.days)
            writer = RawLogWriter(staging.path / "log", spec, format)
            for day, block in _generate(simulator, scores, chunk, progress):
                writer.append(day, block)
            write_json(staging.path / "truth.json", truth_record(simulator, scores))
            fsync_tree(staging.path)
            staging.commit()
        finally:
            staging.discard()
    return [out / "log" / path.name for path in writer.paths]


def _generate(
    simulator: Simulator, scores: BestPossibleScores, chunk: int, progress: Progress
) -> Iterator[tuple[int, SimulatedRows]]:
    """Yield the rows of all days in chunks; add each chunk to the scores and report the progress."""
    done = 0
    for day, rows in enumerate(simulator.spec.day_rows()):
        for block in iter_chunks(simulator, day, rows, chunk):
            yield day, block
            scores.add(day, block.logit)
            done += len(block.logit)
            progress(done, simulator.spec.rows)


class RawLogWriter:
    """Write chunks of raw values as files whose names are in time order."""

    def __init__(self, folder: Path, spec: SimulationSpec, format: str) -> None:
        self.folder, self.spec, self.format = folder, spec, format
        self.paths: list[Path] = []
        self._chunks: Counter[int] = Counter()  # number of chunks of each day
        self._bags = [field.name for field in spec.specs if field.kind == "multi"]

    def append(self, day: int, block: SimulatedRows) -> None:
        """Append a chunk: a new Parquet file, or more lines of the day's CSV file."""
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
        if self._bags:
            import polars as pl

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
            row = np.repeat(np.arange(rows), lengths)
            bags = pl.DataFrame({"row": row, "value": hex_text(field, values, spec)})
            lists = bags.group_by("row", maintain_order=True).agg("value")
            all_rows = pl.DataFrame({"row": np.arange(rows)})
            columns[field.name] = all_rows.join(lists, on="row", how="left", maintain_order="left")["value"]
        else:
            columns[field.name] = hex_text(field, block.ids[field.name], spec)
    return pl.DataFrame(columns)


def hex_text(field: FieldSpec, values: Array, spec: SimulationSpec) -> pl.Series:
    """Return eight hexadecimal digits per value, after an "x" (not in the Terabyte layout), null if missing.

    With the "x" no value can be read as a number.
    """
    import polars as pl

    distinct, index = np.unique(values, return_inverse=True)
    prefix = "" if spec.preset == "terabyte" else "x"
    codes = scramble_ids(field, distinct)
    texts = [
        None if value < 0 else f"{prefix}{code:08x}"
        for value, code in zip(distinct.tolist(), codes.tolist(), strict=True)
    ]
    return pl.Series(texts, dtype=pl.String).gather(index)


class BestPossibleScores:
    """AUC and logloss of a model that knows the probability of every click, by day.

    AUC = Σ p(i)·(1 - p(j)) over rows i above j (ties count half), divided by Σ p · Σ (1 - p). It does not use
    the labels, so it has no sampling noise. Logits are counted in bins of 0.002, so that memory does not grow with
    the number of rows.
    """

    def __init__(self, days: int) -> None:
        self._clicks = np.zeros((days, LOGIT_BINS))
        self._others = np.zeros((days, LOGIT_BINS))
        self._loss = np.zeros(days)

    def add(self, day: int, logit: Reals) -> None:
        """Add rows of a day, in fixed blocks so that the sums do not depend on the chunks."""
        for start in range(0, len(logit), BLOCK_ROWS):
            self._add(day, logit[start : start + BLOCK_ROWS])

    def _add(self, day: int, logit: Reals) -> None:
        probability = sigmoid(logit)
        bins = np.clip((logit + 20.0) * (LOGIT_BINS / 40.0), 0, LOGIT_BINS - 1).astype(np.int64)
        self._clicks[day] += np.bincount(bins, probability, LOGIT_BINS)
        self._others[day] += np.bincount(bins, 1.0 - probability, LOGIT_BINS)
        self._loss[day] += float((np.logaddexp(0.0, logit) - probability * logit).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the scores over all rows and of each day."""
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
    """Return the AUC of binned scores; ``clicks`` and ``others`` are the weights per bin."""
    below = np.cumsum(others) - others / 2
    return float(clicks @ below / (clicks.sum() * others.sum()))


def truth_record(simulator: Simulator, scores: BestPossibleScores) -> dict[str, Any]:
    """Return the contents of ``truth.json``."""
    spec = simulator.spec
    fields = []
    for field in spec.specs:
        term = field.name if field.is_first_of_pair else field.partner
        related = [other.name for other in spec.specs if other.source == field.name or field.source == other.name]
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
                "pair_with": field.partner,
                "related": related,
                "missing": field.missing,
                "values": field.values,
                "width": field.width,
                "drift": field.drift if field.true else None,
                "strength_by_day": simulator.drift[str(term)] if field.true else None,
            }
        )
    terms = list(simulator.weights)
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
