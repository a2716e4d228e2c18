"""What ``lpfs select`` writes to disk and how much memory it needs, by stage.

    python benchmarks/select_writes.py [--rows 4000000] [--label after] [--out benchmarks/results/select_writes.json]
    python benchmarks/select_writes.py --rows 1000000 --pretrain-steps 300 --search-steps 150

A log of the simulator's preset ``terabyte`` is made once; ``lpfs.select`` then runs on it with its defaults, in a
process of its own. At the end of every stage the process reads what it has written (``write_bytes`` of
``/proc/self/io``, which counts bytes that went to the disk) and its peak resident memory (``VmHWM``, reset at the start
of every stage). The result is stored under ``--label`` beside those of other labels: run it with the code before a
change as ``before``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results/select_writes.json")
SETTINGS = ("keep", "pretrain_steps", "search_steps")
OTHER = "between and after"  # start, evaluations on the test rows, hints, files of the result


def read_counters() -> tuple[int, int]:
    """Return the bytes written to disk by this process and its peak memory in bytes; reset the peak."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(io["write_bytes"]), int(status["VmHWM"].split()[0]) * 1024


def run_select(data: Path, out: Path, report: Path, settings: dict[str, Any]) -> None:
    """Run ``select`` and write the counters of every stage."""
    import lpfs
    from lpfs.pipeline.plan import StageTimer

    start, stages, written = time.perf_counter(), dict[str, dict[str, float]](), 0

    def count(name: str, seconds: float) -> None:
        nonlocal written
        total, peak = read_counters()
        entry = stages.setdefault(name, {"seconds": 0.0, "written_mb": 0.0, "peak_mb": 0.0})
        entry["seconds"] += seconds
        entry["written_mb"] += (total - written) / 1e6
        entry["peak_mb"] = max(entry["peak_mb"], peak / 1e6)
        written = total

    measured = StageTimer.stage

    @contextmanager
    def stage(self: StageTimer, name: str, heading: str) -> Iterator[None]:
        nonlocal start
        count(OTHER, time.perf_counter() - start)
        start = time.perf_counter()
        with measured(self, name, heading):
            yield
        count(name, time.perf_counter() - start)
        start = time.perf_counter()

    StageTimer.stage = stage  # type: ignore[method-assign]
    outcome = lpfs.select(data, out, quiet=True, **settings)
    count(OTHER, time.perf_counter() - start)
    for entry in stages.values():
        entry.update({name: round(value, 1) for name, value in entry.items()})
    values = {"stages": stages, "result": result_digest(outcome), "kept": len(outcome.kept), "model": outcome.chosen}
    values["tables_mb"] = round(outcome.savings["all_fields"]["table_bytes"] / 1e6, 1)
    report.write_text(json.dumps(values))


def hide_data(arguments: list[str]) -> list[str]:
    """Return arguments without the places of this machine."""
    hidden = {number + 1 for number, name in enumerate(arguments) if name in ("--data", "--out")}
    return [name for number, name in enumerate(arguments) if not {number, number + 1} & hidden]


def result_digest(outcome: Any) -> str:
    """Return a digest of everything that must not change: kept fields, gates, metrics and the bytes of the model."""
    digest = hashlib.sha256(json.dumps([outcome.selection.to_json()["gates"], outcome.kept]).encode())
    digest.update(json.dumps([dict(outcome.metrics), dict(outcome.choices)], sort_keys=True).encode())
    for name, tensor in outcome.model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes written and peak memory of every stage of lpfs select.")
    parser.add_argument("--rows", type=int, default=4_000_000)
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="as in lpfs select")
    parser.add_argument("--label", default="after")
    parser.add_argument("--data", type=Path, help="directory of a simulated Dataset; default: simulate it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stages", nargs=3, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stages:
        data, out, report = given.stages
        run_select(
            data, out, report, {name: value for name, value in vars(given).items() if name in SETTINGS and value}
        )
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        data = given.data or place / "data"
        if not data.exists():
            import lpfs

            lpfs.simulate(data, "terabyte", rows=given.rows, seed=0)
        load, start = os.getloadavg()[0], time.perf_counter()
        arguments = ["--stages", data, place / "run", place / "report.json"]
        for name in SETTINGS:
            if (value := getattr(given, name)) is not None:
                arguments += [f"--{name.replace('_', '-')}", value]
        subprocess.run([sys.executable, __file__, *map(str, arguments)], check=True)
        seconds = time.perf_counter() - start
        values = json.loads((place / "report.json").read_text())
        disk = sum(path.stat().st_size for path in (place / "run").rglob("*") if path.is_file())
    stages = values["stages"].values()
    values |= {
        "command": shlex.join(["python", "benchmarks/select_writes.py", *hide_data(sys.argv[1:])]),
        "rows": given.rows,
        "wall_seconds": round(seconds, 1),
        "written_mb": round(sum(entry["written_mb"] for entry in stages), 1),
        "peak_mb": max(entry["peak_mb"] for entry in stages),
        "left_on_disk_mb": round(disk / 1e6, 1),
        "machine": {
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "as torch finds them"),
            "load_before": round(load, 2),
            "python": platform.python_version(),
        },
    }
    table = json.loads(given.out.read_text()) if given.out.exists() else {}
    table[given.label] = values
    given.out.write_text(json.dumps(table, indent=1) + "\n")
    for stage, entry in values["stages"].items():
        print(f"{stage:<18} {entry['seconds']:8.1f} s {entry['written_mb']:10.1f} MB {entry['peak_mb']:10.1f} MB peak")
    print(f"{'in all':<18} {seconds:8.1f} s {values['written_mb']:10.1f} MB {values['peak_mb']:10.1f} MB peak")


if __name__ == "__main__":
    main()
