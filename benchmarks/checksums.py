"""The cost of checking a Dataset while it is read: first pass of a stream, with and without checksums.

    python benchmarks/checksums.py --out benchmarks/results/checksums.json

Both ways read the same simulated Dataset from the page cache, in turn; a pass without checksums is one of a Dataset
whose parts are all known to be undamaged. ``crc32_gb_per_second`` is the speed of ``zlib.crc32`` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.data.simulate import simulate


def read_all(dataset: Dataset) -> tuple[float, float]:
    """Return seconds and CPU seconds of one pass in batches of 4096 rows."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in dataset.stream(4096):
        pass
    return time.perf_counter() - wall, time.process_time() - cpu


def crc_speed(size: int = 256 << 20) -> float:
    """Return the speed of the checksum in GB per second."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
    start = time.process_time()
    for first in range(0, size, 1 << 20):
        zlib.crc32(data[first : first + (1 << 20)])
    return size / (time.process_time() - start) / 1e9


def measure(folder: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Return the times of passes with and without checks."""
    path = simulate(folder / "log", "terabyte", rows=rows).path
    size = sum(file.stat().st_size for file in path.rglob("*.npy"))
    read_all(Dataset(path))
    runs: dict[str, list[tuple[float, float]]] = {"checked": [], "unchecked": []}
    for _ in range(repeats):
        dataset = Dataset(path)
        runs["checked"].append(read_all(dataset))
        runs["unchecked"].append(read_all(dataset))  # everything was checked in the first pass
    start = time.process_time()
    Dataset(path).verify()
    result: dict[str, Any] = {"rows": rows, "bytes": size, "verify_cpu_seconds": round(time.process_time() - start, 3)}
    for name, times in runs.items():
        result[f"{name}_seconds"] = round(median(wall for wall, _ in times), 3)
        result[f"{name}_cpu_seconds"] = round(median(cpu for _, cpu in times), 3)
    result["extra_cpu"] = round(result["checked_cpu_seconds"] / result["unchecked_cpu_seconds"] - 1, 3)
    result["crc32_gb_per_second"] = round(crc_speed(), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rows, options.repeats)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    text = json.dumps({"command": sys.argv[1:], "machine": machine, **result}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
