"""CPU time of five networks of the curve's size: trained one after another and as a fleet, interleaved and paired.

    OMP_NUM_THREADS=1 python benchmarks/fleet_folds.py [--batch 64 128 256] [--out benchmarks/results/fleet_folds.json]

Each network has its own rows, as the folds of the curve of ``lpfs select`` have. Neither side masks fields: what is
compared is the stacked step with the single one. CPU time of the process does not depend on other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.methods.subset_model import ResidentStream
from lpfs.train.config import Training
from lpfs.train.fit_fleet import fit_fleet

FOLDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of five networks, single and as a fleet.")
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fleet_folds.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data = lpfs.simulate(Path(name) / "log", "small", rows=given.rows, seed=0)
        rows = data.reader(data.schema).read([data.span])
        results = [measure(data.schema, rows, batch, given.steps, given.repeats) for batch in given.batch]
    values = {
        "command": shlex.join(["python", "benchmarks/fleet_folds.py", *sys.argv[1:]]),
        "networks": FOLDS,
        "fields": len(data.schema),
        "rows": given.rows,
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch finds them"),
        "torch": torch.__version__,
        "results": results,
    }
    given.out.write_text(json.dumps(values, indent=1) + "\n")
    for result in results:
        print(json.dumps(result))


def measure(schema: Any, rows: Any, batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """Return the CPU milliseconds of a step of all networks, and the median of the paired ratios."""
    config = Training(steps=steps, quiet=True, log_every=steps)

    def networks() -> tuple[list[Any], list[ResidentStream]]:
        models, streams = [], []
        for fold in range(FOLDS):
            torch.manual_seed(fold)
            models.append(lpfs.make_model("mlp", schema))
            streams.append(ResidentStream(rows, batch, fold))
        return models, streams

    def single() -> None:
        for model, stream in zip(*networks(), strict=True):
            lpfs.fit(model, stream, config=config)

    def fleet() -> None:
        fit_fleet(*networks(), schema=schema, sources=range(FOLDS), config=config)

    kinds = {"single": single, "fleet": fleet}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 1):
        order = list(kinds)
        random.Random(repeat).shuffle(order)
        for name in order:
            start = time.process_time()
            kinds[name]()
            if repeat:  # the first turn is a warm-up
                seconds[name].append(time.process_time() - start)
    ratios = [before / after for before, after in zip(seconds["single"], seconds["fleet"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    times = {name: round(1000 * statistics.median(values) / steps, 3) for name, values in seconds.items()}
    speedup = {"median": round(median, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}
    return {"batch": batch, "cpu_ms_per_step_of_all": times, "speedup": speedup}


if __name__ == "__main__":
    main()
