"""ExperimentContext: what an experiment is given. ExperimentData: its log, from files or simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpfs._console import Console
from lpfs.compare.run_dir import TRUTH_FILE, digest
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import simulate
from lpfs.data.store.location import dataset_exists
from lpfs.errors import InputError
from lpfs.paper.registry import ExperimentScale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEGATIVE_RATE = 0.125  # fraction of the negative rows of the Terabyte log that is kept, as in the paper
KAGGLE_FILE = "train.txt"
NO_DATA: dict[str, Any] = {"kind": "none", "description": "no data"}


@dataclass(frozen=True)
class ExperimentData:
    """The log of an experiment.

    Args:
        dataset: the prepared log.
        preset: preset of the simulator; None for a real log.
        seed: seed of the simulator.
        truth: ``truth.json`` of a simulated log.
        name: name of the files of a real log.
    """

    dataset: Dataset
    preset: str | None = None
    seed: int | None = None
    truth: Path | None = None
    name: str = ""

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every field of a simulated log; empty for a real log."""
        if self.truth is None:
            return {}
        values = json.loads(self.truth.read_text("utf-8"))
        return {field["name"]: field["role"] for field in values["fields"]}

    def to_json(self) -> dict[str, Any]:
        """Return which data it is."""
        kind = "real" if self.preset is None else "simulated"
        name = (self.name or self.dataset.path.name) if self.preset is None else f"preset {self.preset!r}"
        rows, fields = self.dataset.rows, len(self.dataset.schema)
        return {
            "kind": kind,
            "description": f"{kind}: {name}, {rows:,} rows, {fields} fields",
            "rows": rows,
            "days": len(self.dataset.days()),
            "fields": fields,
            "fingerprint": self.dataset.fingerprint,
            **({} if self.preset is None else {"preset": self.preset, "seed": self.seed}),
        }


def open_given(path: Path, out: Path, *, quiet: bool) -> ExperimentData:
    """Return the log at a path: the directory of a Dataset, the days of the Terabyte log, or Kaggle's train.txt.

    Raw files are prepared once, in a directory of their own in ``out``.
    """
    if dataset_exists(path):
        return ExperimentData(Dataset(path))
    days = sorted(path.glob("day_*"), key=_day_number) if path.is_dir() else []
    if days:
        options = {"preset": "criteo-terabyte", "negatives": NEGATIVE_RATE}
        dataset = prepare_files(path, days, out, quiet=quiet, **options)
        return ExperimentData(dataset, name=path.resolve().name)
    file = path / KAGGLE_FILE if path.is_dir() else path
    if file.name.startswith("train") and file.is_file():
        dataset = prepare_files(file, [file], out, quiet=quiet, preset="criteo-kaggle")
        return ExperimentData(dataset, name=file.name)
    raise InputError(
        f"{path} is neither the directory of a Dataset, nor of the Terabyte log (day_0 …), nor Kaggle's "
        f"{KAGGLE_FILE}; convert any other table with lpfs prepare and give its directory"
    )


def prepare_files(path: Path, files: list[Path], out: Path, *, quiet: bool, **options: Any) -> Dataset:
    """Return raw files as a Dataset; the same files are prepared once."""
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    directory = out / f"real-{digest([str(path.resolve()), stats])[:10]}"
    if dataset_exists(directory):
        return Dataset(directory)
    return prepare(files if len(files) > 1 else files[0], directory, quiet=quiet, **options)


def simulate_preset(preset: str, rows: int | None, seed: int, out: Path) -> ExperimentData:
    """Return the simulated log of a preset; that of Terabyte is made of raw days, prepared like the real log."""
    if preset != "terabyte":
        dataset = simulate(out, preset, rows=rows, seed=seed)
        return ExperimentData(dataset, preset, seed, out / TRUTH_FILE)
    raw = out / "raw"
    if not (raw / TRUTH_FILE).exists():
        simulate(raw, preset, rows=rows, seed=seed, format="csv")
    days = sorted((raw / "log").glob("day_*"), key=_day_number)
    dataset = prepare(days, out / "data", preset="criteo-terabyte", negatives=NEGATIVE_RATE, quiet=True)
    return ExperimentData(dataset, preset, seed, raw / TRUTH_FILE)


def _day_number(path: Path) -> tuple[int, str]:
    digits = "".join(char for char in path.name.split(".")[0] if char.isdigit())
    return int(digits or 0), path.name


@dataclass(frozen=True)
class ExperimentContext:
    """What an experiment is given.

    Args:
        data: the log; None for an experiment that needs none.
        work_dir: directory of its searches and trainings; finished ones are not repeated.
        scale: its size.
        seed: the first seed.
        full: whether it has its full size.
        console: where messages go.
    """

    data: ExperimentData | None
    work_dir: Path
    scale: ExperimentScale
    seed: int
    full: bool
    console: Console

    @property
    def dataset(self) -> Dataset:
        """The Dataset of an experiment that needs data."""
        if self.data is None:
            raise InputError("this experiment needs a log; add presets to its entry in EXPERIMENTS")
        return self.data.dataset

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.seed, self.seed + self.scale.seeds)

    @property
    def truth(self) -> Path | None:
        """The ``truth.json`` of a simulated log."""
        return None if self.data is None else self.data.truth

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every field of a simulated log; empty for a real log."""
        return {} if self.data is None else self.data.kinds

    @property
    def is_real(self) -> bool:
        """Whether the log is not simulated."""
        return self.data is not None and self.data.preset is None


@dataclass(frozen=True)
class ExperimentResult:
    """What an experiment returns.

    Args:
        measured: results as plain JSON values.
        paper: those of the paper.
        rows: name of a result, what the paper says about it, what was measured.
        draw: draws the figure.
        size: size of the figure in inches.
    """

    measured: Mapping[str, Any]
    paper: Mapping[str, Any]
    rows: Sequence[tuple[str, str, str]]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 3.6)
