"""The log of an experiment: the user's own files where a path is given, else a simulated preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import simulate
from lpfs.errors import InputError

NEGATIVES = 0.125  # of the Terabyte log, as in the paper
KAGGLE = "train.txt"


def dataset_of(path: Path, out: Path, *, quiet: bool) -> Dataset:
    """Return the Dataset of a path: the folder of one, the days of the Terabyte log, or Kaggle's train.txt."""
    if (path / "dataset.json").is_file():
        return Dataset(path)
    days = sorted(path.glob("day_*"), key=_number) if path.is_dir() else []
    if days:
        return prepare(days, out, preset="criteo-terabyte", negatives=NEGATIVES, quiet=quiet)
    log = path / KAGGLE if path.is_dir() else path
    if log.name.startswith("train") and log.is_file():
        return prepare(log, out, preset="criteo-kaggle", quiet=quiet)
    raise InputError(
        f"{path} is neither the folder of a Dataset, nor one with day_0 … of the Terabyte log, nor Kaggle's "
        f"{KAGGLE}; prepare any other table with lpfs prepare and give its folder"
    )


def simulated(preset: str, rows: int | None, seed: int, out: Path) -> Dataset:
    """Return the simulated log of a preset."""
    return simulate(out, preset, rows=rows, seed=seed)


def about(data: Dataset | None, real: bool) -> dict[str, Any]:
    """Say which data it was."""
    if data is None:
        return {"kind": "none", "said": "no data"}
    made = data.settings.get("simulate", {})
    said = f"real: {data.path.name}" if real else f"simulated: the preset {made.get('preset')!r}"
    return {
        "kind": "real" if real else "simulated",
        "said": f"{said}, {data.rows:,} rows, {len(data.schema)} fields",
        "rows": data.rows,
        "days": len(data.days()),
        "fields": len(data.schema),
        "fingerprint": data.fingerprint,
        **({} if real else {"preset": made.get("preset"), "seed": made.get("seed")}),
    }


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(sign for sign in path.name.split(".")[0] if sign.isdigit())
    return int(digits or 0), path.name
