"""What do gates, probes, commits and bundles cost the online trainer?

    python benchmarks/online_overhead.py --rounds 12

Four trainers read the same segments (40 fields, Parquet) in turns, one block of batches each, so that a busy machine
slows all of them alike; their CPU time is compared: ``plain`` (all fields, nothing written), ``gates`` (with gates and
probes, from the selection that they converge to), ``commits`` (and commits) and ``bundles`` (and bundles). The rate
includes reading and encoding the events, progressive validation and drift monitoring. ``learn`` is the time of the
learner alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lpfs._console import Console
from lpfs.data.prepare import prepare
from lpfs.data.simulate_stream import StreamSpec, simulate_events, write_stream
from lpfs.online.learner import LearnerSettings
from lpfs.online.run import OnlineSettings, OnlineTrainer
from lpfs.online.source import SegmentSource

OUT = Path(__file__).parent / "results" / "online" / "overhead.json"
NEVER = 1 << 40


class TimedTrainer(OnlineTrainer):
    """Measures the CPU time of the learner."""

    learn_seconds = 0.0

    def measure(self) -> None:
        """Wrap ``learn``."""
        learn = self.learner.learn

        def timed(batch: Any) -> Any:
            began = time.process_time()
            progress = learn(batch)
            self.learn_seconds += time.process_time() - began
            return progress

        self.learner.learn = timed  # type: ignore[method-assign]

    def run_batches(self, count: int) -> float:
        """Train on some batches; return the CPU seconds."""
        began = time.process_time()
        for _ in range(count):
            events = self._collect(0.0)
            assert events is not None
            self.process(events)
            if self._window_batches >= self.settings.commit_every:
                self.commit()
        return time.process_time() - began


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=40, help="batches of a trainer in its turn")
    parser.add_argument("--values", type=int, default=1000, help="values of a field")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = StreamSpec(values=arguments.values, dies=NEVER, wakes=NEVER, drifts=NEVER)
    events = (arguments.rounds + 1) * arguments.block * 1024
    learner = LearnerSettings()
    settings = {
        "plain": OnlineSettings(replace(learner, gates=None), commit_every=NEVER, publish_every=0),
        "gates": OnlineSettings(learner, commit_every=NEVER, publish_every=0),
        "commits": OnlineSettings(learner, publish_every=0),
        "bundles": OnlineSettings(learner, publish_every=5),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(simulate_events(spec, 0, 50_000).drop("event"), folder / "like", label="click", quiet=True)
        write_stream(folder / "segments", spec, events=events, segment=50_000)
        quiet, useful = Console(quiet=True), sorted(spec.useful(0))
        trainers = {
            kind: TimedTrainer(
                SegmentSource(folder / "segments"), folder / kind, folder / "like", options,
                opened=None if kind == "plain" else useful, console=quiet,
            )
            for kind, options in settings.items()
        }  # fmt: skip
        for trainer in trainers.values():
            trainer.learner.batches = learner.warmup  # gates are at work from the start
            trainer.run_batches(arguments.block)
            trainer.measure()
        seconds: dict[str, list[float]] = {kind: [] for kind in trainers}
        for _ in range(arguments.rounds):
            for kind, trainer in trainers.items():
                seconds[kind].append(trainer.run_batches(arguments.block))
        rows = arguments.block * 1024
        result = {
            "rounds": arguments.rounds,
            "rows_per_round": rows,
            "fields": spec.fields,
            "ids": spec.fields * spec.values,
            "cpu": platform.processor() or platform.machine(),
            "rows_per_cpu_second": {kind: round(rows / statistics.median(times)) for kind, times in seconds.items()},
            "overhead_of_the_rate": {
                kind: round(statistics.median(a / b for a, b in zip(times, seconds["plain"], strict=True)) - 1, 4)
                for kind, times in seconds.items()
            },
            "overhead_of_learn_alone": {
                kind: round(trainer.learn_seconds / trainers["plain"].learn_seconds - 1, 4)
                for kind, trainer in trainers.items()
            },
            "kept": {kind: len(trainer.learner.kept) for kind, trainer in trainers.items()},
            "seconds": {kind: [round(value, 4) for value in times] for kind, times in seconds.items()},
        }
        for trainer in trainers.values():
            trainer.store.close()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    main()
