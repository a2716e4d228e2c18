"""CPU time of the final trainings of a comparison: together, as a fleet, and one by one.

    OMP_NUM_THREADS=1 python benchmarks/fleet_compare.py [--batch 64 128 256 512] [--out FILE]

Unlike fleet.py this is the whole training as ``lpfs compare`` does it: reading the rows, evaluations, sets of fields of
different sizes. The methods are those that need little time; their searches and the pretraining are not counted.
Comparisons with and without a fleet alternate; every one is a process of its own. CPU time does not depend on other
processes as much as time does.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch

import lpfs
from lpfs.compare import runner

METHODS = ["mutual_information", "gbdt", "lasso_logistic", "permutation", "random"]
KEEP = [4, 8, 16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fleet_compare.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        lpfs.simulate(Path(name) / "log", "small", rows=options.rows, seed=0)
        results = [measure(Path(name), batch, options.repeats, options.seeds) for batch in options.batch]
    values = {
        "command": shlex.join(["python", "benchmarks/fleet_compare.py", *sys.argv[1:]]),
        "rows": options.rows,
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch finds them"),
        "torch": torch.__version__,
        "results": results,
    }
    options.out.write_text(json.dumps(values, indent=1) + "\n")


def measure(place: Path, batch: int, repeats: int, seeds: int) -> dict[str, Any]:
    """Return the CPU seconds of all trainings from scratch at a batch size, and the median of the paired ratios."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    models = 0
    for repeat in range(repeats):
        for fleet in (True, False) if repeat % 2 else (False, True):
            out = place / f"{batch}-{repeat}-{fleet}"
            with Clock() as clock:
                lpfs.compare(
                    place / "log",
                    out,
                    methods=METHODS,
                    keep=KEEP,
                    seeds=seeds,
                    fleet=fleet,
                    batch_size=batch,
                    quiet=True,
                )
            seconds[fleet].append(clock.seconds)
            models = len(list((out / "trained").glob("*.json")))
    ratios = [single / fleet for single, fleet in zip(seconds[False], seconds[True], strict=True)]
    result = {
        "batch": batch,
        "models": models,
        "single_seconds": round(statistics.median(seconds[False]), 2),
        "fleet_seconds": round(statistics.median(seconds[True]), 2),
        "times_faster": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    print(json.dumps(result), flush=True)
    return result


class Clock:
    """Counts the CPU seconds of the trainings from scratch, single or as a fleet, while the block runs."""

    NAMES = ("fleet_from_scratch", "from_scratch")

    def __enter__(self) -> Clock:
        self.seconds, self.originals = 0.0, {name: getattr(runner.Runner, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(runner.Runner, name, self.timed(original))
        return self

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with the clock."""

        def method(*args: Any, **options: Any) -> Any:
            start = process_time()
            try:
                return original(*args, **options)
            finally:
                self.seconds += process_time() - start

        return method

    def __exit__(self, *error: object) -> None:
        for name, original in self.originals.items():
            setattr(runner.Runner, name, original)


if __name__ == "__main__":
    main()
