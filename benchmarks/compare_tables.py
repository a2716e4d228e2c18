"""Compare every method with ``lpfs compare`` on the logs of benchmarks/logs.json: quality, cost, differences.

    python benchmarks/compare_tables.py --data tables/ --work work/ --processes 2
    python benchmarks/compare_tables.py --families catalog turnover --work work/
    python benchmarks/compare_tables.py --tune 5 --methods lpfs++,shufflegate --families small --work work/
    python benchmarks/compare_tables.py --again lpfs++ --work work/    # after a change of one method

benchmarks/logs.json is the fixed list: simulated logs with seeds that are used for nothing else, and random splits of
real tables. Logs are simulated here; real tables are read from ``--data`` and skipped if they are missing. K is N/8,
N/4 and N/2. Runs are kept in ``--work``: a second call does only the missing runs, and machines that share the
directory share the work. Results go to benchmarks/results/compare/NAME (``--tune N``: NAME-tuned): comparison.md (with
the command), comparison.json, results.csv and searches.json; ``--missing`` skips logs that have them. ``--again a,b``
repeats only the searches of these methods and takes those of the others from searches.json; all sets of fields are
trained again, which takes much less time. Results without searches.json have the fields of each search, but their cost
is then not known. ``--tune`` takes over the searches with the defaults in the same way, where there are results without
tuning. comparison.json names the code of each search. README.md beside them summarizes all: logs that were used in
development stand apart. benchmarks/compare_summary.py tests the differences over
logs. ``--overview`` writes only README.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import IO, Any

from lpfs._fileio import read_json, write_json_atomic
from lpfs.compare.plan import ALL_FIELDS, file_safe_name
from lpfs.compare.run_dir import SEARCHES_DIR
from lpfs.methods.registry import METHODS, make_method

RESULTS = Path(__file__).parent / "results" / "compare"
SEARCHES = "searches.json"
LIST = Path(__file__).parent / "logs.json"
UNSEEN = "unseen"  # status; the other is "used in development"
# comparisons that were made before the list existed, with the seed 0 of every preset and the published splits
EARLIER = ("small", "terabyte", "industrial", "census", "coil2000", "bank")


@dataclass(frozen=True, eq=False)
class BenchmarkLog:
    """A simulated log, or a split of a real table.

    Args:
        name: of its results.
        family: the preset or the table; intervals are over the logs or splits of a family.
        status: ``unseen``, or ``used in development``.
        preset, rows: of a simulated log.
        file, label: of a real table.
        seed: of the simulation, or of the random split.
        options: further options of compare.
    """

    name: str
    family: str
    status: str
    seed: int
    preset: str | None = None
    rows: int = 0
    file: str | None = None
    label: str | None = None
    options: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> bool:
        """Whether no default, constant or method was tuned on it."""
        return self.status == UNSEEN


def load_logs(path: Path = LIST) -> dict[str, BenchmarkLog]:
    """Return the logs of the list by name."""
    logs = [BenchmarkLog(**values) for values in json.loads(path.read_text("utf-8"))["logs"]]
    return {log.name: log for log in logs}


def main() -> None:
    logs = load_logs()
    families = list(dict.fromkeys(log.family for log in logs.values()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", choices=[*logs, []], help="default: all logs")
    parser.add_argument("--families", nargs="+", choices=families, help="only logs of these presets and tables")
    parser.add_argument("--data", type=Path, help="directory of the real tables")
    parser.add_argument("--work", type=Path, default=Path("work"), help="directory of the runs")
    parser.add_argument("--methods", help="names as a,b; default: all methods")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", type=int, default=0, help="option sets of each method, chosen on validation rows")
    parser.add_argument("--processes", type=int, default=1, help="number of processes per comparison")
    parser.add_argument("--jobs", type=int, default=1, help="comparisons at once; above 1 their output is in --work")
    parser.add_argument("--device", help="device of all runs; default: that of compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--missing", action="store_true", help="skip logs that have results already")
    parser.add_argument("--again", help="methods that search again, as a,b; other searches are those of the results")
    parser.add_argument("--overview", action="store_true", help="only write README.md from the existing results")
    options = parser.parse_args()
    if not options.overview:
        names = options.logs or [log.name for log in logs.values() if log.family in (options.families or families)]
        run(options, [logs[name] for name in names])
    (options.results / "README.md").write_text(overview(options.results), "utf-8")


def run(options: argparse.Namespace, logs: list[BenchmarkLog]) -> None:
    """Compare the methods on these logs."""
    options.work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [message for message in pool.map(lambda log: compare_log(options, log), logs) if message is not None]
    if failed:
        raise SystemExit("\n".join(failed))


def compare_log(options: argparse.Namespace, log: BenchmarkLog) -> str | None:
    """Compare the methods on a log and copy the results; return what failed."""
    name = f"{log.name}-tuned" if options.tune else log.name
    if options.missing and (options.results / name / "comparison.json").exists():
        print(f"{name}: has results, skipped")
        return None
    with (options.work / f"{name}.txt").open("a") if options.jobs > 1 else nullcontext() as output:
        source = find_source(log, options.work / f"{log.name}-log", options.data, output)
        if source is None:
            print(f"{log.name}: {log.file} is not in --data, skipped")
            return None
        methods = options.methods or ",".join(all_methods(log))
        words = ["--methods", methods, "--keep", numbers_to_keep(source, log), "--seeds", str(options.seeds)]
        words += [*(["--tune", str(options.tune)] if options.tune else []), *log.options]
        words += ["--device", options.device] if options.device else []
        if options.again is not None or options.tune:
            again = (options.again or "").split(",")
            restore_searches(options.results / log.name, options.work / name, methods.split(","), again)
        command = ["compare", str(source), *words, "--out", str(options.work / name)]
        print(f"lpfs {shlex.join(command)}", flush=True)
        processes = [start_lpfs(command, output) for _ in range(options.processes)]
        codes = [process.wait() for process in processes]
    if any(codes):
        return f"{name}: a process failed; finished runs are kept in {options.work / name}"
    copy_results(options.results / name, options.work / name, ["compare", f"{log.name}-log", *words, "--out", name])
    return None


def all_methods(log: BenchmarkLog) -> list[str]:
    """Return the methods that select fields, not crosses; the oracle only on simulated logs."""
    excluded = ("autofis",) if log.preset else ("autofis", "oracle")
    return [name for name in METHODS if name not in excluded]


def numbers_to_keep(source: Path, log: BenchmarkLog) -> str:
    """Return N/8, N/4 and N/2 of the fields that can be kept, as compare takes them."""
    from lpfs.data.dataset import Dataset

    dropped = [word for option, word in zip(log.options, log.options[1:], strict=False) if option == "--must-drop"]
    fields = len(Dataset(source).schema) - len(dropped)
    return ",".join(str(max(1, round(fields / divisor))) for divisor in (8, 4, 2))


def find_source(log: BenchmarkLog, out: Path, data: Path | None, output: IO[str] | None = None) -> Path | None:
    """Return the Dataset of a log, simulated or prepared if necessary; None if a real table is missing."""
    if out.exists():
        return out
    if log.preset is not None:
        rows = ["--rows", str(log.rows), "--seed", str(log.seed)]
        command = ["simulate", "--preset", log.preset, *rows, "--out", str(out)]
    else:
        table = None if data is None or log.file is None else data / log.file
        if table is None or not table.exists():
            return None
        split = ["--parts", "20", "--shuffle", "--seed", str(log.seed)]
        command = ["prepare", str(table), "--label", str(log.label), *split, "--out", str(out)]
    if start_lpfs(command, output).wait():
        raise SystemExit(f"{log.name} could not be made: lpfs {shlex.join(command)}")
    return out


def start_lpfs(arguments: list[str], output: IO[str] | None) -> subprocess.Popen[bytes]:
    """Start a command; its output goes to a file, or to that of this process."""
    stderr = None if output is None else subprocess.STDOUT
    return subprocess.Popen([sys.executable, "-m", "lpfs", *arguments], stdout=output, stderr=stderr)


def copy_results(directory: Path, out: Path, command: list[str]) -> None:
    """Copy the results of a comparison, with its command and without local paths."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "results.csv", directory / "results.csv")
    values = json.loads((out / "comparison.json").read_text("utf-8"))
    values["settings"]["source"] = [Path(path).name for path in values["settings"]["source"]]
    (directory / "comparison.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    searches = {path.stem: read_json(path) for path in sorted((out / SEARCHES_DIR).glob("*.json"))}
    lines = [f"{json.dumps(stem)}: {json.dumps(without_gates(search))}" for stem, search in searches.items()]
    (directory / SEARCHES).write_text("{" + ",\n".join(lines) + "}\n", "utf-8")
    text = (out / "comparison.md").read_text("utf-8")
    (directory / "comparison.md").write_text(f"{text}\nMade by\n\n    lpfs {shlex.join(command)}\n", "utf-8")


def without_gates(search: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a search without what a comparison does not read."""
    return {name: value for name, value in search.items() if name not in ("gates", "checksum")}


def restore_searches(results: Path, out: Path, methods: Sequence[str], again: Sequence[str]) -> None:
    """Write the searches of earlier results into the directory of a comparison, except those of the methods ``again``.

    They are the searches with the default options.
    """
    if (out / SEARCHES_DIR).exists():
        return  # continued
    repeated = tuple(f"{file_safe_name(method)}-s" for method in methods if method not in again)
    for stem, search in earlier_searches(results).items():
        if stem.startswith(repeated):
            path = out / SEARCHES_DIR / f"{stem}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, search)


def earlier_searches(results: Path) -> dict[str, Any]:
    """Return the searches of earlier results by the names of their files; none if there are no results."""
    if (results / SEARCHES).exists():
        searches: dict[str, Any] = json.loads((results / SEARCHES).read_text("utf-8"))
        return searches
    if not (results / "comparison.json").exists():
        return {}
    values = json.loads((results / "comparison.json").read_text("utf-8"))
    return searches_of_results(values["results"], values["sizes"])


def searches_of_results(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the searches behind the rows of a comparison without tuning, from the fields that they keep.

    The score of a field in a ranking that serves every K is the number of K for which it is kept. Searches of methods
    that do not keep K fields are left out. Seconds and memory, of another run or machine, are left out as well.
    """
    searches: dict[str, Any] = {}
    names = next(row["kept"] for row in rows if row["method"] == ALL_FIELDS)
    exact = [row for row in rows if row["method"] != ALL_FIELDS and row["status"] == "done" and not row["options"]]
    inexact = {row["method"] for row in exact if len(row["kept"]) != row["keep"]}
    for row in exact:
        method, seed = row["method"], row["seed"]
        if method in inexact:
            continue
        facts = {"steps": "search_steps", "forwards": "rows_forward", "backwards": "rows_backward"}
        details = {"own_count": row["own_count"], **{name: row[key] for name, key in facts.items()}}
        search = {
            **{"kept": row["kept"], "details": {"method": method, "seed": seed, **details}, "code": row["search_code"]},
            **{"seconds": None, "memory": None, "first_in_process": False, "interrupted": False},
        }
        stem = f"{file_safe_name(method)}-s{seed}"
        if make_method(method).search_per_k:
            searches[f"{stem}-k{row['keep']}"] = search
            continue
        kept = {
            other["keep"]: set(other["kept"]) for other in exact if (other["method"], other["seed"]) == (method, seed)
        }
        chain = [kept[size] for size in sorted(sizes)]
        if any(not small <= large for small, large in pairwise(chain)):
            raise SystemExit(f"{method}: the fields kept for a smaller K are not among those for a larger one")
        searches[stem] = {**search, "scores": {name: float(sum(name in fields for fields in chain)) for name in names}}
    return searches


def overview(results: Path) -> str:
    """Return a summary of all comparisons: unseen logs first, then those used in development, then earlier ones."""
    logs = load_logs()
    parts = ["# Comparisons of all methods"]
    for title, names in (
        ("Unseen logs", [log.name for log in logs.values() if log.unseen]),
        ("Unseen logs, tuned", [f"{log.name}-tuned" for log in logs.values() if log.unseen]),
        ("Splits of tables that were used in development", [log.name for log in logs.values() if not log.unseen]),
        ("The same, tuned", [f"{log.name}-tuned" for log in logs.values() if not log.unseen]),
        ("Earlier comparisons, on logs and tables that were used in development", EARLIER),
    ):
        paths = {name: results / name / "comparison.json" for name in names}
        found = {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}
        if found:
            parts.append(section(title, found))
    parts.append("Made by `python benchmarks/compare_tables.py --data tables/ --work work/`.")
    return "\n\n".join(parts) + "\n"


def section(title: str, comparisons: dict[str, Any]) -> str:
    """Return the area and the rank of every method on some logs."""
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
    is_tuned = any(values["plan"]["tune"] for values in comparisons.values())
    tuning = (
        "Each method tried the same number of option sets for every K and seed, chosen on validation rows."
        if is_tuned
        else "No method was tuned here: all run with their defaults."
    )
    parts = [
        f"## {title}",
        "The table shows the area under the K-AUC curve, (AUC - .5) / .5, and in brackets the rank.\n"
        "AUC is that of the kept fields trained from scratch, on test rows, mean over seeds; on simulated logs made "
        "since the list exists it is that of the true click probabilities.\n"
        "▲ significantly better than lpfs++, ▽ significantly worse, no mark: not significant (95 % over seeds and test "
        "rows together; not corrected for the number of comparisons).\n"
        "`all` keeps every field and `oracle` knows the truth: they have no rank.\n"
        "The mean rank is over the logs on which a method ran, which are not the same for all.\n"
        "Each directory has the whole comparison: AUC of every K, intervals, logloss, overlap over seeds, search cost.",
        markdown_table(header, rows),
        f"{tuning}\n"
        "The defaults of LPFS and LPFS++ were chosen on simulated logs with other seeds and on training rows of "
        "census, COIL and bank.\n"
        "The defaults of the other methods are those of their papers, or were chosen on a simulated log.\n"
        "Three seeds give little evidence: a difference that is not significant is unknown rather than zero.",
    ]
    for name, values in comparisons.items():
        if values["kinds"] and len(comparisons) <= len(EARLIER):
            parts += kinds_section(name, values)
    return "\n\n".join(parts)


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
        f"### {name}: kinds of the kept fields with {size} fields",
        "Mean over seeds.\n`pair`: fields that matter only together; `copy`, `correlated`: they repeat true fields.",
        markdown_table(header, rows),
    ]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
