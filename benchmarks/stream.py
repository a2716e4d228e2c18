"""How many rows a second a Stream gives, for a simulated Terabyte log (13 numeric + 26 categorical fields).

    python benchmarks/stream.py [--rows 4000000] [--repeats 5] [--out benchmarks/results/stream.json]

Every setting is a whole pass over the log, read from the page cache. The settings take turns, so that a slow
moment of the machine does not fall on one of them alone; the median and the range of the passes are written,
with the load of the machine. On one that is busy with other work, read the rows a second of processor time
(of all threads) and the ratios to the plain loop.
The uniform shuffle gathers all rows in memory once; that first pass is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lpfs.data.dataset import Dataset
from lpfs.data.simulate import simulate
from lpfs.data.stream import Stream

TARGETS = {"time": 10e6, "uniform": 2e6, "windowed": 2e6}


def settings(dataset: Dataset, window: int) -> dict[str, dict[str, Any]]:
    categories = [field.name for field in dataset.schema if field.kind == "categorical"]
    found: dict[str, dict[str, Any]] = {
        "in time order, B=512": {"batch_size": 512},
        "in time order, B=4096": {"batch_size": 4096},
        "in time order, B=65536": {"batch_size": 65536},
        "in time order, B=4096, no thread": {"batch_size": 4096, "prefetch": 0},
        "in time order, B=4096, 5 of 39 fields": {"batch_size": 4096, "fields": categories[:5]},
        "in time order, B=4096, one of 4 ranks": {"batch_size": 4096, "world": 4, "rank": 1},
        "shuffled uniformly, B=4096": {"batch_size": 4096, "shuffle": True},
        "shuffled in a window, B=4096": {"batch_size": 4096, "shuffle": True, "memory": window},
    }
    if torch.cuda.is_available():
        for name in ("in time order, B=512", "in time order, B=65536", "shuffled uniformly, B=4096"):
            found[f"{name}, to CUDA"] = {**found[name], "device": "cuda"}
    return found


def one_pass(stream: Stream) -> tuple[float, float]:
    """Return rows a second and rows a second of processor time over one pass."""
    begin, used, rows = time.perf_counter(), time.process_time(), 0
    for batch in stream:
        rows += len(batch)
    if stream.device is not None:
        torch.cuda.synchronize()
    return rows / (time.perf_counter() - begin), rows / (time.process_time() - used)


def check_device(dataset: Dataset) -> None:
    """Stop if batches on the device are not those of the CPU, bit by bit."""
    here, there = dataset.stream(4096, shuffle=True), dataset.stream(4096, shuffle=True, device="cuda")
    for a, b in zip(here, there, strict=True):
        for name in ("ids", "dense", "labels", "missing"):
            if not torch.equal(getattr(a, name), getattr(b, name).cpu()):
                raise SystemExit(f"{name} differ between CPU and CUDA")


def memmap(dataset: Dataset) -> tuple[float, float]:
    """Return the same of the plainest loop, for comparison: memory-mapped columns, stacked."""
    files = [sorted(folder.glob("f????.npy")) for folder in sorted((dataset.path / "days").iterdir())]
    begin, used, rows = time.perf_counter(), time.process_time(), 0
    for day in files:
        columns = [np.load(path, mmap_mode="r") for path in day]
        for start in range(0, len(columns[0]), 4096):
            dense = np.stack([column[start : start + 4096] for column in columns[:13]], 1)
            ids = np.stack([column[start : start + 4096].astype(np.int32) for column in columns[13:]], 1)
            torch.from_numpy(dense), torch.from_numpy(ids)
            rows += len(ids)
    return rows / (time.perf_counter() - begin), rows / (time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--window", type=int, default=128 << 20, help="bytes of the windowed shuffle")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stream.json")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        dataset = simulate(Path(folder) / "log", "terabyte", rows=options.rows)
        written = options.rows / (time.perf_counter() - begin)
        begin = time.perf_counter()
        dataset.verify()
        verified = options.rows / (time.perf_counter() - begin)
        if torch.cuda.is_available():
            check_device(dataset.part(0, min(dataset.rows, 200_000)))
        streams = {name: dataset.stream(**each) for name, each in settings(dataset, options.window).items()}
        first = {name: one_pass(stream) for name, stream in streams.items()}
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in streams}
        speeds["plain memory-mapped loop, B=4096"] = []
        for _ in range(options.repeats):
            for name, stream in streams.items():
                speeds[name].append(one_pass(stream))
            speeds["plain memory-mapped loop, B=4096"].append(memmap(dataset))
        size = sum(path.stat().st_size for path in dataset.path.rglob("*") if path.is_file())
    results: dict[str, Any] = {
        "command": f"python benchmarks/stream.py --rows {options.rows} --repeats {options.repeats}",
        "rows": options.rows,
        "bytes_a_row_on_disk": round(size / options.rows, 1),
        "machine": {
            "cores": torch.get_num_threads(),
            "system": platform.machine(),
            "torch": torch.__version__,
            "load_before_and_after": [round(before, 1), round(os.getloadavg()[0], 1)],
        },
        "rows_a_second_simulated_and_written": round(written),
        "rows_a_second_verified": round(verified),
        "rows_a_second": {},
    }
    for name, pairs in speeds.items():
        found = [speed for speed, _ in pairs]
        middle, cpu = statistics.median(found), statistics.median(each for _, each in pairs)
        entry: dict[str, Any] = {
            "median": round(middle),
            "lowest": round(min(found)),
            "highest": round(max(found)),
            "median_a_second_of_processor_time": round(cpu),
        }
        if name in streams:
            order = streams[name].order
            whole = streams[name].world == 1 and len(streams[name].schema) == 39
            entry |= {"order": order, "first_pass": round(first[name][0])}
            entry |= {"target": TARGETS[order], "met": middle >= TARGETS[order]} if whole else {}
        results["rows_a_second"][name] = entry
        print(f"{name:40s} {middle / 1e6:6.1f} M rows/s  ({min(found) / 1e6:.1f} to {max(found) / 1e6:.1f})", end="")
        print(f"   {cpu / 1e6:6.1f} M rows a second of processor time")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"simulated {written / 1e6:.2f}, verified {verified / 1e6:.1f} M rows/s; written to {options.out}")


if __name__ == "__main__":
    main()
