"""Compare every method on six tables with ``lpfs compare``: quality, cost, significant differences.

    python benchmarks/compare_tables.py small coil2000 --data tables/ --work work/ --processes 2

Simulated logs are made here; real tables are read from ``--data`` and skipped if they are missing. Runs are kept
in ``--work``: a second call does only the missing runs, and machines that share the directory share the work.
Results go to benchmarks/results/compare/TABLE: comparison.md (with the command), comparison.json and results.csv.
README.md beside them summarizes all tables; ``--overview`` writes only that file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compare"


@dataclass(frozen=True)
class BenchmarkTable:
    """A log, the numbers of fields to keep, and options of compare.

    Args:
        keep: value of --keep.
        preset, rows: of a simulated log.
        file: name of a real table.
        options: further options.
    """

    keep: str
    preset: str | None = None
    rows: int = 0
    file: str | None = None
    options: tuple[str, ...] = ()


SMALL_MODEL = ("--model-option", "dim=4", "--model-option", "hidden=64,32")
SPLIT = ("--label", "label", "--split", "split")
NO_LEAK = ("--label", "label", "--must-drop", "duration")  # the duration of the call is known only after it
TABLES = {
    "small": BenchmarkTable("4,8,15", preset="small", rows=100_000),
    "terabyte": BenchmarkTable("4,7,13", preset="terabyte", rows=200_000),
    "industrial": BenchmarkTable("52,104,208", preset="industrial", rows=200_000, options=SMALL_MODEL),
    "census": BenchmarkTable("3,5,10,20", file="census_income_kdd.parquet", options=SPLIT),
    "coil2000": BenchmarkTable("5,10,20,40", file="coil2000.parquet", options=SPLIT),
    "bank": BenchmarkTable("3,5,10", file="bank_marketing.parquet", options=NO_LEAK),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="default: all tables")
    parser.add_argument("--data", type=Path, help="directory of the real tables")
    parser.add_argument("--work", type=Path, default=Path("work"), help="directory of the runs")
    parser.add_argument("--methods", help="names as a,b; default: all methods")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="number of processes per comparison")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--overview", action="store_true", help="only write README.md from the existing results")
    options = parser.parse_args()
    if not options.overview:
        run(options)
    (options.results / "README.md").write_text(overview(options.results), "utf-8")


def run(options: argparse.Namespace) -> None:
    """Compare the methods on the given tables."""
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.tables or TABLES:
        table = TABLES[name]
        source = find_source(table, options.work / f"{name}-log", options.data)
        if source is None:
            print(f"{name}: {table.file} is not in --data, skipped")
            continue
        out = options.work / name
        methods = options.methods or ",".join(all_methods(table))
        words = ["--methods", methods, "--keep", table.keep, "--seeds", str(options.seeds), *table.options]
        command = ["compare", str(source), *words, "--out", str(out)]
        print(f"lpfs {shlex.join(command)}", flush=True)
        processes = [start_lpfs(*command) for _ in range(options.processes)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{name}: a process failed; finished runs are kept in {out}")
        copy_results(options.results / name, out, ["compare", table.file or f"{name}-log", *words, "--out", name])


def all_methods(table: BenchmarkTable) -> list[str]:
    """Return the methods that select fields, not crosses; the oracle only on simulated logs."""
    from lpfs.methods.registry import METHODS

    excluded = ("autofis",) if table.preset else ("autofis", "oracle")
    return [name for name in METHODS if name not in excluded]


def find_source(table: BenchmarkTable, log: Path, data: Path | None) -> Path | None:
    """Return the path of a table, simulated if necessary; None if a real table is missing."""
    if table.preset is None:
        path = None if data is None or table.file is None else data / table.file
        return path if path is not None and path.exists() else None
    if not log.exists():
        simulate = ["simulate", "--preset", table.preset, "--rows", str(table.rows), "--out", str(log)]
        if start_lpfs(*simulate).wait():
            raise SystemExit(f"{table.preset} could not be simulated")
    return log


def start_lpfs(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "lpfs", *arguments])


def copy_results(directory: Path, out: Path, command: list[str]) -> None:
    """Copy the results of a comparison, with its command and without local paths."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "results.csv", directory / "results.csv")
    values = json.loads((out / "comparison.json").read_text("utf-8"))
    values["settings"]["source"] = [Path(path).name for path in values["settings"]["source"]]
    (directory / "comparison.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    text = (out / "comparison.md").read_text("utf-8")
    (directory / "comparison.md").write_text(f"{text}\nMade by\n\n    lpfs {shlex.join(command)}\n", "utf-8")


def overview(results: Path) -> str:
    """Return a summary of all comparisons: the area and the rank of every method on every table."""
    comparisons = {
        name: json.loads((results / name / "comparison.json").read_text("utf-8"))
        for name in TABLES
        if (results / name / "comparison.json").exists()
    }
    ranks: dict[str, list[int]] = {}
    cells: dict[str, dict[str, str]] = {}
    for name, values in comparisons.items():
        rank = 0
        for method, summary in values["methods"].items():
            if summary["area"] is None:
                continue
            cell = f"{summary['area']['value']:.4f}"
            if method not in values["unranked"]:
                rank += 1
                ranks.setdefault(method, []).append(rank)
                verdict = summary["differences"].get("lpfs++", {}).get("verdict", "")
                cell += f" ({rank})" + {"ahead": " ▲", "behind": " ▽"}.get(verdict, "")
            cells.setdefault(method, {})[name] = cell
    order = sorted(cells, key=lambda method: mean(ranks.get(method, [99])))
    rows = [
        [
            method,
            *(cells[method].get(name, "-") for name in comparisons),
            f"{mean(ranks[method]):.1f}" if method in ranks else "-",
        ]
        for method in order
    ]
    header = ["method", *(column_title(name, values) for name, values in comparisons.items()), "mean rank"]
    parts = [
        f"# {len(cells)} methods on {len(comparisons)} tables",
        "The table shows the area under the K-AUC curve, (AUC - .5) / .5, and in brackets the rank.\n"
        "AUC is that of the kept fields trained from scratch, on test rows, mean over seeds.\n"
        "▲ significantly better than lpfs++, ▽ significantly worse, no mark: not significant (95 % over seeds and test "
        "rows together; not corrected for the number of comparisons).\n"
        "`all` keeps every field and `oracle` knows the truth: they have no rank.\n"
        "The mean rank is over the tables on which a method ran, which are not the same for all.\n"
        "Each directory has the whole comparison: AUC of every K, intervals, logloss, overlap over seeds, search cost.",
        markdown_table(header, rows),
        "No method was tuned here (`--tune` is off): all run with their defaults.\n"
        "The defaults of LPFS and LPFS++ were chosen on simulated logs and on training rows of census, COIL and bank, "
        "so these tables are not new to them.\n"
        "The defaults of the other methods are those of their papers, or were chosen on a simulated log.\n"
        "Three seeds give little evidence: a difference that is not significant is unknown rather than zero.",
    ]
    for name, values in comparisons.items():
        if values["kinds"]:
            parts += kinds_section(name, values)
    parts += ["Made by `python benchmarks/compare_tables.py --data tables/ --work work/`."]
    return "\n\n".join(parts) + "\n"


def column_title(name: str, values: dict[str, Any]) -> str:
    """Return the title of a column: the table, its fields, how many were kept, the number of seeds."""
    areas = [summary["area"] for summary in values["methods"].values() if summary["area"]]
    seeds = sorted({len(area["by_seed"]) for area in areas})
    sizes = ", ".join(map(str, values["sizes"]))
    return f"{name}: {sizes} of {values['fields']}, {'/'.join(map(str, seeds))} seeds"


def kinds_section(name: str, values: dict[str, Any]) -> list[str]:
    """Return how many fields of each kind every method keeps, at the K nearest to the number of true fields."""
    true = sum(count for kind, count in values["kinds"].items() if kind in ("main", "pair"))
    size = min(values["sizes"], key=lambda size: abs(size - true))
    kinds = list(values["kinds"])
    rows = []
    for method, summary in values["methods"].items():
        metrics = summary["sizes"].get(str(size), {})
        if "kept_by_kind" in metrics:
            counts = (f"{metrics['kept_by_kind'][kind]:.1f}" for kind in kinds)
            rows.append([method, *counts, f"{metrics['recall']:.2f}"])
    header = ["method", *(f"{kind} (of {values['kinds'][kind]})" for kind in kinds), "recall"]
    return [
        f"## {name}: kinds of the kept fields with {size} fields",
        "Mean over seeds.\n`pair`: fields that matter only together; `copy`, `correlated`: they repeat true fields.",
        markdown_table(header, rows),
    ]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
