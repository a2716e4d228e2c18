"""The log of an experiment: the user's own files where a path is given, else a simulated preset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpfs.compare.run_dir import digest
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import simulate
from lpfs.errors import InputError

NEGATIVES = 0.125  # of the Terabyte log that are kept, as in the paper
KAGGLE, TRUTH = "train.txt", "truth.json"


@dataclass(frozen=True)
class Log:
    """A prepared log, and what it is.

    Args:
        data: the Dataset.
        preset: of the simulator; None for a real log.
        seed: of the simulator.
        truth: ``truth.json`` of a simulated log.
        name: of the files of a real log.

    """

    data: Dataset
    preset: str | None = None
    seed: int | None = None
    truth: Path | None = None
    name: str = ""

    @property
    def kinds(self) -> dict[str, str]:
        """What is true of the fields; empty for a real log."""
        if self.truth is None:
            return {}
        values = json.loads(self.truth.read_text("utf-8"))
        return {each["name"]: each["role"] for each in values["fields"]}

    def about(self) -> dict[str, Any]:
        """Say which data it is."""
        kind = "real" if self.preset is None else "simulated"
        what = (self.name or self.data.path.name) if self.preset is None else f"the preset {self.preset!r}"
        return {
            "kind": kind,
            "said": f"{kind}: {what}, {self.data.rows:,} rows, {len(self.data.schema)} fields",
            "rows": self.data.rows,
            "days": len(self.data.days()),
            "fields": len(self.data.schema),
            "fingerprint": self.data.fingerprint,
            **({} if self.preset is None else {"preset": self.preset, "seed": self.seed}),
        }


NONE: dict[str, Any] = {"kind": "none", "said": "no data"}


def given(path: Path, out: Path, *, quiet: bool) -> Log:
    """Return the log at a path: the folder of a Dataset, the days of the Terabyte log, or Kaggle's train.txt.

    Raw files are prepared once, into a folder of their own in ``out``.
    """
    if (path / "dataset.json").is_file():
        return Log(Dataset(path))
    days = sorted(path.glob("day_*"), key=_number) if path.is_dir() else []
    if days:
        own = of_files(path, days, out, quiet, preset="criteo-terabyte", negatives=NEGATIVES)
        return Log(own, name=path.resolve().name)
    log = path / KAGGLE if path.is_dir() else path
    if log.name.startswith("train") and log.is_file():
        return Log(of_files(log, [log], out, quiet, preset="criteo-kaggle"), name=log.name)
    raise InputError(
        f"{path} is neither the folder of a Dataset, nor one with day_0 … of the Terabyte log, nor Kaggle's "
        f"{KAGGLE}; prepare any other table with lpfs prepare and give its folder"
    )


def of_files(path: Path, files: list[Path], out: Path, quiet: bool, **how: Any) -> Dataset:
    """Return raw files as a Dataset, the one that was made of them before if they are the same."""
    seen = [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]
    place = out / f"real-{digest([str(path.resolve()), seen])[:10]}"
    if (place / "dataset.json").is_file():
        return Dataset(place)
    return prepare(files if len(files) > 1 else files[0], place, quiet=quiet, **how)


def simulated(preset: str, rows: int | None, seed: int, out: Path) -> Log:
    """Return the simulated log of a preset; that of Terabyte goes the way of the real files, as raw days."""
    if preset != "terabyte":
        data = simulate(out, preset, rows=rows, seed=seed)
        return Log(data, preset, seed, out / TRUTH)
    raw = out / "raw"
    if not (raw / TRUTH).exists():
        simulate(raw, preset, rows=rows, seed=seed, format="csv")
    days = sorted((raw / "log").glob("day_*"), key=_number)
    data = prepare(days, out / "data", preset="criteo-terabyte", negatives=NEGATIVES, quiet=True)
    return Log(data, preset, seed, raw / TRUTH)


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(sign for sign in path.name.split(".")[0] if sign.isdigit())
    return int(digits or 0), path.name
