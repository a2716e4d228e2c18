"""One table from the command line to the answer: seconds of each stage, peak memory, what was found.

    python benchmarks/end_to_end.py [--rows 100000] [--keep 15] [--out benchmarks/results/end_to_end.json]

The table has 40 fields: the 31 of the simulator's preset ``small``, of which 15 say something about the click, and
9 of another world that say nothing. It is written as one Parquet file; then ``lpfs select`` runs on it, in a
process of its own and with its defaults, as a user would run it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lpfs

FOREIGN = 9  # fields of another world
CERTIFIED = ("max_logit_change", "bound", "certified")


def write_table(place: Path, rows: int, seed: int) -> tuple[Path, list[str]]:
    """Write the table; return its path and the true fields."""
    import polars as pl

    worlds = []
    for name, number in (("own", seed), ("other", seed + 1000)):
        files = lpfs.simulate(place / name, "small", rows=rows, seed=number, format="parquet")
        worlds.append(pl.concat([pl.read_parquet(file) for file in files]))
    own, other = worlds
    strange = [name for name in other.columns if name not in ("click", "day")][:FOREIGN]
    table = own.hstack(other.select(strange).rename({name: f"other_{name}" for name in strange}))
    path = place / "table.parquet"
    table.write_parquet(path)
    return path, json.loads((place / "own" / "truth.json").read_text())["true"]


def run(command: list[str], log: Path) -> tuple[float, float, float]:
    """Run a command; return its seconds, the seconds of all its threads, and its peak memory in MiB."""
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{shlex.join(command)} failed:\n{log.read_text()}")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def result(folder: Path, true: list[str]) -> dict[str, Any]:
    """Return what a run found, in short."""
    found = json.loads((folder / "selection.json").read_text())
    return {
        "seconds": found["seconds"],
        "steps": found["steps"],
        "splits": {name: rows["rows"] for name, rows in found["splits"].items()},
        "test": found["metrics"],
        "validation": found["validation"],
        "hot_start": found["hot_start"],
        "certificates": {name: {key: each[key] for key in CERTIFIED} for name, each in found["certificates"].items()},
        "max_logit_change": found["max_logit_change"],
        "fields": len(found["kept"]) + len(found["dropped"]),
        "kept": found["kept"],
        "true_kept": sorted(set(true) & set(found["kept"])),
        "true": true,
        "model": found["model"],
        "savings": found["savings"],
        "warnings": found["warnings"],
        "versions": found["versions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One table from the command line to the answer.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--keep", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        path, true = write_table(place, given.rows, given.seed)
        size = path.stat().st_size
        wanted = ["--label", "click", "--time", "day", "--keep", str(given.keep), "--seed", str(given.seed)]
        command = [sys.executable, "-m", "lpfs", "select", str(path), *wanted, "--out", str(place / "run")]
        load = os.getloadavg()[0]
        wall, busy, peak = run(command, place / "log.txt")
        found = result(place / "run", true)
        print((place / "log.txt").read_text())
    stages = sum(found["seconds"].values())
    values = {
        "command": f"python {shlex.join(sys.argv)}",
        "runs": f"lpfs select table.parquet {shlex.join(wanted)}",
        "machine": {"cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS", "as torch finds them"),
                    "load_before": load, "python": platform.python_version()},
        "rows": given.rows,
        "table_bytes": size,
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(busy, 2),
        "seconds_elsewhere": round(wall - stages, 2),
        "elsewhere": "start of Python and torch, evaluation, warnings, serving speed, files",
        "peak_mib": round(peak, 1),
        **found,
    }  # fmt: skip
    given.out.write_text(json.dumps(values, indent=1) + "\n")
    for stage, seconds in found["seconds"].items():
        print(f"{stage:<12} {seconds:8.1f} s")
    print(f"{'elsewhere':<12} {wall - stages:8.1f} s\n{'in all':<12} {wall:8.1f} s, {peak:,.0f} MiB at most")


if __name__ == "__main__":
    main()
