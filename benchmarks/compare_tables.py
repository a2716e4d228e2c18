"""Every method on six tables, by ``lpfs compare``: what it costs, and which differences are beyond noise.

    python benchmarks/compare_tables.py small coil2000 --data tables/ --work work/ --processes 2

Simulated logs are made here; the real tables are looked for in ``--data`` and left out where they are absent.
Runs are kept in ``--work``: a second call does only what is missing, and several machines that share the folder
share the work. What is found is put into benchmarks/results/compare/TABLE: comparison.md, comparison.json and
results.csv, with the command in comparison.md.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "compare"


@dataclass(frozen=True)
class Table:
    """A log, how many fields to keep of it, and what compare has to know.

    ``preset`` and ``rows`` are of a simulated log; ``file`` is a real one.
    """

    keep: str
    preset: str | None = None
    rows: int = 0
    file: str | None = None
    options: tuple[str, ...] = ()


SMALL_NET = ("--model-option", "dim=4", "--model-option", "hidden=64,32")
NO_LEAK = ("--label", "label", "--must-drop", "duration")  # how long the call took is known after it
TABLES = {
    "small": Table("4,8,15", preset="small", rows=100_000),
    "terabyte": Table("4,7,13", preset="terabyte", rows=200_000),
    "industrial": Table("52,104,208", preset="industrial", rows=200_000, options=SMALL_NET),
    "census": Table(
        "3,5,10,20", file="census_income_kdd.parquet", options=("--label", "label", "--split", "split")
    ),
    "coil2000": Table("5,10,20,40", file="coil2000.parquet", options=("--label", "label", "--split", "split")),
    "bank": Table("3,5,10", file="bank_marketing.parquet", options=NO_LEAK),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all of them, if none is named")
    parser.add_argument("--data", type=Path, help="folder of the real tables")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--methods", help="as a,b instead of all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="how many work on a comparison at once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the tables go")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.tables or TABLES:
        table = TABLES[name]
        source = source_of(table, given.work / f"{name}-log", given.data)
        if source is None:
            print(f"{name}: {table.file} is not in --data, left out")
            continue
        out = given.work / name
        methods = given.methods or ",".join(known(table))
        asked = ["--methods", methods, "--keep", table.keep, "--seeds", str(given.seeds), *table.options]
        command = ["compare", str(source), *asked, "--out", str(out)]
        print(f"lpfs {shlex.join(command)}", flush=True)
        several = [lpfs(*command) for _ in range(given.processes)]
        codes = [each.wait() for each in several]
        if any(codes):
            raise SystemExit(f"{name}: a process failed; what is done is kept in {out}")
        keep_results(given.results / name, out, ["compare", table.file or f"{name}-log", *asked, "--out", name])


def known(table: Table) -> list[str]:
    """Return the methods that choose fields, not crosses; who knows the truth only where there is one."""
    from lpfs.methods.registry import METHODS

    less = ("autofis",) if table.preset else ("autofis", "oracle")
    return [name for name in METHODS if name not in less]


def source_of(table: Table, place: Path, data: Path | None) -> Path | None:
    """Return the table, simulated if need be; None where a real one is not there."""
    if table.preset is None:
        found = None if data is None or table.file is None else data / table.file
        return found if found is not None and found.exists() else None
    if not place.exists():
        simulate = ["simulate", "--preset", table.preset, "--rows", str(table.rows), "--out", str(place)]
        if lpfs(*simulate).wait():
            raise SystemExit(f"{table.preset} could not be simulated")
    return place


def lpfs(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command line."""
    return subprocess.Popen([sys.executable, "-m", "lpfs", *arguments])


def keep_results(place: Path, out: Path, command: list[str]) -> None:
    """Copy the tables, with the command that made them."""
    place.mkdir(parents=True, exist_ok=True)
    for name in ("comparison.json", "results.csv"):
        shutil.copy(out / name, place / name)
    text = (out / "comparison.md").read_text("utf-8")
    (place / "comparison.md").write_text(f"{text}\nMade by\n\n    lpfs {shlex.join(command)}\n", "utf-8")


if __name__ == "__main__":
    main()
