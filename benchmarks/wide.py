"""Seconds, CPU seconds and files of prepare on wide tables.

    python benchmarks/wide.py --shapes 200x10000 76000x370 --out benchmarks/results/wide.json

Every run has a process of its own. With several ``--code NAME=FOLDER`` (the ``src`` of other checkouts) each repeat
runs all of them in turn, so that a loaded machine slows them equally.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def write_table(path: Path, rows: int, columns: int, seed: int = 0) -> None:
    """Write a CSV file with a label and columns of small integers, amounts and words, mostly zero or missing."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(seed)
    table: dict[str, Any] = {"label": rng.integers(0, 2, rows)}
    for index in range(columns):
        present = rng.random(rows) < (0.05, 0.3, 0.9)[index % 3]
        if index % 7 == 0:
            table[f"c{index}"] = [
                f"w{word}" if there else None for word, there in zip(rng.integers(0, 50, rows), present, strict=True)
            ]
        elif index % 7 < 4:
            table[f"c{index}"] = np.round(rng.lognormal(3, 2, rows), 2) * present
        else:
            table[f"c{index}"] = rng.integers(1, 9, rows) * present
    pl.DataFrame(table).write_csv(path)


def measure(table: Path, out: Path) -> dict[str, Any]:
    """Prepare a table in this process; return time, CPU time and the number of files."""
    from lpfs import prepare

    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    dataset = prepare(table, out, label="label", quiet=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    opened = time.perf_counter()
    type(dataset)(out)
    opened = time.perf_counter() - opened
    first = time.perf_counter()
    rows = sum(len(batch) for batch in dataset.stream(4096))
    first = time.perf_counter() - first
    cells = rows * len(dataset.schema)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "cells_per_cpu_second": round(cells / cpu),
        "open_seconds": round(opened, 3),
        "first_pass_seconds": round(first, 3),
        "fields": len(dataset.schema),
        "days": len(dataset.days()),
        "files": sum(path.is_file() for path in out.rglob("*")),
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "peak_mib": after.ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["200x10000", "76000x370"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--code", nargs="+", default=[f"now={Path(__file__).parents[1] / 'src'}"], metavar="NAME=FOLDER"
    )
    parser.add_argument("--place", default=None, help="folder for the tables; a temporary one by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(*options.worker)))
        return
    runs, codes = [], dict(code.split("=", 1) for code in options.code)
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory(dir=options.place) as place:
            table = Path(place) / "table.csv"
            write_table(table, rows, columns)
            for repeat in range(options.repeats):
                for name, src in codes.items():
                    command = [sys.executable, __file__, "--worker", str(table), f"{place}/{repeat}-{name}"]
                    environment = {**os.environ, "PYTHONPATH": str(Path(src).resolve())}
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
                    result = json.loads(done.stdout.splitlines()[-1])
                    runs.append({"rows": rows, "columns": columns, "code": name, **result, "load": os.getloadavg()[0]})
                    print(runs[-1], flush=True)
    if options.out:
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        arguments = f"--shapes {' '.join(options.shapes)} --repeats {options.repeats} --code {' '.join(codes)}"
        options.out.write_text(json.dumps({"command": arguments, "machine": machine, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
