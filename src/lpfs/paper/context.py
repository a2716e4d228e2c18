"""ExperimentContext: what an experiment is given. ExperimentData: its log, from files or simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpfs._console import Console
from lpfs.compare.run_dir import TRUTH_FILE, digest, read_kinds
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import simulate
from lpfs.data.store.location import dataset_exists
from lpfs.errors import InputError
from lpfs.paper.registry import ExperimentScale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# options of prepare for the Terabyte log; the fraction of the negative rows is that of the paper
TERABYTE_OPTIONS: dict[str, Any] = {"preset": "criteo-terabyte", "negatives": 0.125}
KAGGLE_FILE = "train.txt"


@dataclass(frozen=True)
class ExperimentData:
    """The log of an experiment; a simulated one has a preset, a seed and ``truth.json``, a real one a name."""

    dataset: Dataset
    preset: str | None = None
    seed: int | None = None
    truth: Path | None = None
    name: str = ""

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every field of a simulated log; empty for a real log."""
        return {} if self.truth is None else read_kinds(self.truth)

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
    files, options, name = terabyte_days(path), TERABYTE_OPTIONS, path.resolve().name
    if not files:
        file = path / KAGGLE_FILE if path.is_dir() else path
        if not (file.name.startswith("train") and file.is_file()):
            raise InputError(
                f"{path} is neither the directory of a Dataset, nor of the Terabyte log (day_0 …), nor Kaggle's "
                f"{KAGGLE_FILE}; convert any other table with lpfs prepare and give its directory"
            )
        path, files, options, name = file, [file], {"preset": "criteo-kaggle"}, file.name
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    directory = out / f"real-{digest([str(path.resolve()), stats])[:10]}"
    if not dataset_exists(directory):
        prepare(files if len(files) > 1 else files[0], directory, quiet=quiet, **options)
    return ExperimentData(Dataset(directory), name=name)


def simulate_preset(preset: str, rows: int | None, seed: int, out: Path) -> ExperimentData:
    """Return the simulated log of a preset; that of Terabyte is made of raw days, prepared like the real log."""
    if preset != "terabyte":
        dataset = simulate(out, preset, rows=rows, seed=seed)
        return ExperimentData(dataset, preset, seed, out / TRUTH_FILE)
    raw = out / "raw"
    if not (raw / TRUTH_FILE).exists():
        simulate(raw, preset, rows=rows, seed=seed, format="csv")
    dataset = prepare(terabyte_days(raw / "log"), out / "data", quiet=True, **TERABYTE_OPTIONS)
    return ExperimentData(dataset, preset, seed, raw / TRUTH_FILE)


def terabyte_days(directory: Path) -> list[Path]:
    """Return the files of the Terabyte log in a directory, in the order of their days; empty if there are none."""

    def day_number(path: Path) -> tuple[int, str]:
        return int("".join(char for char in path.name.split(".")[0] if char.isdigit()) or 0), path.name

    return sorted(directory.glob("day_*"), key=day_number)


@dataclass(frozen=True)
class ExperimentContext:
    """What an experiment is given."""

    data: ExperimentData | None  # None for an experiment that needs no log
    work_dir: Path  # searches and trainings; finished ones are not repeated
    scale: ExperimentScale
    seed: int  # the first seed
    full: bool  # whether the experiment has its full size
    console: Console
    fleet: bool | None = None  # the setting of ``select``

    @property
    def log(self) -> ExperimentData:
        """The log of an experiment that needs one."""
        if self.data is None:
            raise InputError("this experiment needs a log; add presets to its entry in EXPERIMENTS")
        return self.data

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.seed, self.seed + self.scale.seeds)


@dataclass(frozen=True)
class ExperimentResult:
    """What an experiment returns."""

    measured: Mapping[str, Any]  # plain JSON values
    paper: Mapping[str, Any]  # those of the paper
    rows: Sequence[tuple[str, str, str]]  # name of a result, what the paper says about it, what was measured
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 3.6)  # of the figure, in inches
