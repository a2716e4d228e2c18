"""Rows a second and peak memory of prepare on simulated Terabyte rows.

    python benchmarks/prepare.py --rows 2000000 8000000 --out benchmarks/results/prepare.json
    python benchmarks/prepare.py --rows 500000 --engine spark --out benchmarks/results/prepare_spark.json

Every size runs in a process of its own. The vocabularies are nearly the same at every size: values are drawn
from the same --values for the largest field, fewer for the others; "ids" says how many of them were met.
"""

from __future__ import annotations

import argparse
import io
import itertools
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

DAYS = 24
SETTINGS = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "LPFS_SHARED", "PYSPARK_SUBMIT_ARGS")


def write_log(folder: Path, rows: int, values: int, seed: int) -> int:
    """Write day_0 … in the layout of the Criteo Terabyte logs; return their size."""
    import numpy as np
    import polars as pl

    folder.mkdir(parents=True)
    sizes = [max(3, int(values * share)) for share in np.geomspace(1e-5, 1.0, 26)]
    keys = np.random.default_rng(seed)
    words = [
        pl.Series([f"{key:08x}" for key in keys.choice(2**32, size, replace=False).tolist()])
        if size < 10_000
        else pl.Series(keys.integers(0, 2**32, size)).map_elements(lambda key: f"{key:08x}", pl.String)
        for size in sizes
    ]
    for day in range(DAYS):
        rng = np.random.default_rng([seed, day])
        count = rows * (day + 1) // DAYS - rows * day // DAYS
        columns: dict[str, Any] = {"label": (rng.random(count) < 0.03).astype(np.int8)}
        for index in range(13):
            numbers = np.floor(np.exp(rng.normal(2, 1.5, count))).astype(np.int64) - 1
            columns[f"I{index}"] = pl.Series(numbers).scatter(np.flatnonzero(rng.random(count) < 0.1), None)
        for index, size in enumerate(sizes):
            codes = (size * rng.random(count) ** 3).astype(np.int64)
            column = words[index].gather(codes)
            columns[f"C{index}"] = column.scatter(np.flatnonzero(rng.random(count) < 0.03), None)
        pl.DataFrame(columns).write_csv(folder / f"day_{day}", separator="\t", include_header=False)
    return sum(path.stat().st_size for path in folder.iterdir())


def peak_mib() -> int:
    """Return the most memory this process ever held (``ru_maxrss`` would begin with that of its parent)."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def measure(folder: Path, out: Path, engine: str) -> dict[str, Any]:
    """Prepare a log in this process; return time and peak memory."""
    from lpfs._console import Console
    from lpfs.data.planning import plan_log
    from lpfs.data.prepare import run_plan

    before, said = peak_mib(), io.StringIO()
    start = time.perf_counter()
    job = plan_log(folder, preset="criteo-terabyte", min_count=1)
    dataset = run_plan(job, out, engine=engine, console=Console(stream=said))
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": dataset.rows,
        "seconds": round(seconds, 2),
        "rows_per_second": round(dataset.rows / seconds),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": peak_mib(),
        "peak_mib_before": before,
        "ids": sum(field.cardinality for field in dataset.schema),
        "fingerprint": dataset.fingerprint,
        "checksum": json.loads((out / "dataset.json").read_text())["checksum"],
        **(
            {"passes": [line for line in said.getvalue().splitlines() if line.startswith("spark: ")]}
            if engine != "embedded"
            else {}
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000_000, 8_000_000])
    parser.add_argument("--values", type=int, default=300_000, help="values of the largest field")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--place", default=None, help="folder for the logs; a temporary one by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", default="embedded", help="spark runs after embedded, on the same log")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(Path(options.worker[0]), Path(options.worker[1]), options.worker[2])))
        return
    runs = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.place) as place:
            size = write_log(Path(place) / "log", rows, options.values, options.seed)
            engines = dict.fromkeys(["embedded", options.engine])
            for repeat, engine in itertools.product(range(options.repeats), engines):
                out = f"{place}/{engine}{repeat}"
                command = [sys.executable, __file__, "--worker", f"{place}/log", out, engine]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                known = {"engine": engine, "log_bytes": size, "load": os.getloadavg()[0]}
                runs.append({**json.loads(done.stdout.splitlines()[-1]), **known})
                print(runs[-1], flush=True)
            if len({(run["fingerprint"], run["checksum"]) for run in runs if run["rows"] == rows}) > 1:
                raise SystemExit("the engines made different Datasets")
    peaks = {rows: [run["peak_mib"] for run in runs if run["rows"] == rows] for rows in options.rows}
    result = {
        "command": "python benchmarks/prepare.py " + " ".join(sys.argv[1:]),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "means": "from the command to the synced Dataset, the log in the page cache; load is the machine's",
        "runs": runs,
        "peak_ratio": round(max(peaks[max(peaks)]) / min(peaks[min(peaks)]), 3),
        "slowest_rows_per_second": min(run["rows_per_second"] for run in runs),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
