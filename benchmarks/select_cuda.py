"""Where the wall time of ``lpfs select`` goes, by stage: steps, reading, evaluations, checkpoints and the rest.

    python benchmarks/select_cuda.py [--rows 4000000] [--device cuda] [--out benchmarks/results/select_cuda_h200.json]

A simulated Terabyte log is searched with the defaults of ``select``. The clock is attached to the training loop: the
time in steps is that of the loop without waiting for batches, evaluations and checkpoints. The device is synchronized
at the ends of these parts, not between steps. ``rows_per_second`` of a stage is compared with the same step in
``train_step.py`` (rows of the weights; those of the gates of a search are not counted): ``share_at_benchmark_speed`` is
the share of the wall time that the rows of all trainings would take at that speed. Needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.data.batch import Batch
from lpfs.pipeline import select, stages, warnings
from lpfs.pipeline.plan import StageTimer
from lpfs.train import fit as fit_module

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = {"cuda": ("train_step_h200.json", ", graph"), "cpu": ("train_step.json", "")}
BATCH_SIZE = 512  # of a log that is read once
OTHER = "between and after"  # evaluations on the test rows, warnings, files of the result
PARTS: dict[str, list[tuple[Any, str]]] = {  # name of a part -> functions that are timed
    "evaluate": [(fit_module.TrainingRun, "_evaluate"), (stages, "score_rows"), (stages, "evaluate_split")],
    "checkpoint": [(fit_module.TrainingRun, "_save")],
    "start": [(fit_module.TrainingRun, "open")],
    "count values": [(warnings, "_count")],
    "other warnings": [(select, "find_warnings")],
    "speed of models": [(stages, "serving_speed")],
    "results": [(select, "_write_results")],
}


class Clock:
    """Seconds by stage and part; a part within another one does not count for the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stage = OTHER
        self.seconds: dict[str, dict[str, float]] = {}
        self.rows: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self._parts, self._since = ["other"], time.perf_counter()

    def count(self) -> None:
        """Add the time since the last call to the current part."""
        now = time.perf_counter()
        parts = self.seconds.setdefault(self.stage, {})
        parts[self._parts[-1]] = parts.get(self._parts[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str, *, synchronize: bool = True) -> Iterator[None]:
        """Count the block as a part."""
        if synchronize:
            self.synchronize()
        self.count()
        self._parts.append(name)
        try:
            yield
        finally:
            if synchronize:
                self.synchronize()
            self.count()
            self._parts.pop()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def enter(self, stage: str) -> Iterator[None]:
        """Count the block as a stage."""
        self.synchronize()
        self.count()
        self.stage = stage
        try:
            yield
        finally:
            self.synchronize()
            self.count()
            self.stage = OTHER


class TimedBatches:
    """Batches of a stream; the time to get them counts as reading."""

    def __init__(self, batches: Iterable[Batch], clock: Clock) -> None:
        self.batches, self.clock = batches, clock

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            with self.clock.part("read", synchronize=False):
                batch = next(batches, None)
            if batch is None:
                return
            self.clock.rows[self.clock.stage] = self.clock.rows.get(self.clock.stage, 0) + len(batch)
            self.clock.steps[self.clock.stage] = self.clock.steps.get(self.clock.stage, 0) + 1
            yield batch


def attach_clock(clock: Clock) -> None:
    """Time the stages and the parts of every training."""
    stage, loop = StageTimer.stage, fit_module._training_loop

    @contextmanager
    def timed_stage(self: StageTimer, name: str, heading: str) -> Iterator[None]:
        with stage(self, name, heading), clock.enter(name):
            yield

    def timed_loop(run: Any, stream: Iterable[Batch]) -> None:
        with clock.part("steps"):
            loop(run, TimedBatches(stream, clock))

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with clock.part(name):
                return function(*arguments, **options)

        return call

    StageTimer.stage = timed_stage  # type: ignore[method-assign]
    fit_module._training_loop = timed_loop
    for part, functions in PARTS.items():
        for owner, attribute in functions:
            setattr(owner, attribute, timed(getattr(owner, attribute), part))


def benchmark_speeds(device: str) -> dict[str, float]:
    """Return the rows per second of a step in ``train_step.py``, without and with gates."""
    file, kind = BENCHMARKS[device]
    table = next(row for row in json.loads((RESULTS / file).read_text())["rows"] if row["batch"] == BATCH_SIZE)[
        "rows_per_second"
    ]
    return {"plain": table[f"lpfs{kind}"], "gated": table[f"lpfs, gated{kind}"]}


def summarize(clock: Clock, wall: float, speeds: dict[str, float]) -> dict[str, Any]:
    """Return seconds, rows and speeds by stage, and the shares of the wall time."""
    table, expected = {}, 0.0
    for stage, parts in clock.seconds.items():
        entry: dict[str, Any] = {"seconds": round(sum(parts.values()), 2)}
        entry["parts"] = {name: round(seconds, 2) for name, seconds in sorted(parts.items(), key=lambda item: -item[1])}
        if rows := clock.rows.get(stage):
            speed = speeds["gated" if stage == "search" else "plain"]
            busy = parts["steps"] + parts["read"]
            entry |= {"steps": clock.steps[stage], "rows": rows, "rows_per_second": round(rows / busy)}
            entry |= {"benchmark_rows_per_second": round(speed), "of_benchmark": round(rows / busy / speed, 3)}
            expected += rows / speed
        table[stage] = entry
    totals: dict[str, float] = {}
    for parts in clock.seconds.values():
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {
        "wall_seconds": round(wall, 2),
        "shares": {name: round(seconds / wall, 3) for name, seconds in sorted(totals.items(), key=lambda i: -i[1])},
        "share_in_steps": round((totals.get("steps", 0.0) + totals.get("read", 0.0)) / wall, 3),
        "share_at_benchmark_speed": round(expected / wall, 3),
        "stages": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of lpfs select by stage and part.")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--device", default="cuda", choices=tuple(BENCHMARKS))
    parser.add_argument("--keep", type=int, help="as in lpfs select")
    parser.add_argument("--data", type=Path, help="directory of a simulated Dataset; default: simulate it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data = given.data or Path(name) / "data"
        start = time.perf_counter()
        if not data.exists():
            lpfs.simulate(data, "terabyte", rows=given.rows, seed=0)
        simulated = time.perf_counter() - start
        clock = Clock(torch.device(given.device))
        attach_clock(clock)
        start = time.perf_counter()
        settings = {} if given.keep is None else {"keep": given.keep}
        outcome = lpfs.select(data, Path(name) / "run", quiet=True, device=given.device, **settings)
        clock.synchronize()
        clock.count()
        wall = time.perf_counter() - start
    words = ["--rows", str(given.rows), "--device", given.device]
    words += [] if given.keep is None else ["--keep", str(given.keep)]
    values = {
        "command": shlex.join(["python", "benchmarks/select_cuda.py", *words]),
        "rows": given.rows,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "polars_imported": "polars" in sys.modules,
        "simulate_seconds": round(simulated, 2),
        "kept": len(outcome.kept),
        "model": outcome.chosen,
        "test_auc": {model: round(scores["auc"], 5) for model, scores in outcome.metrics.items()},
        **summarize(clock, wall, benchmark_speeds(given.device)),
    }
    text = json.dumps(values, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
