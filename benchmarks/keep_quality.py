"""AUC of the fields kept by keep=K, by permutation, and by a sweep of fixed λ, trained from scratch.

    python benchmarks/keep_quality.py --preset industrial-small --part 8 4 2 --seeds 5 --sweep 6 --out auc.jsonl
    python benchmarks/keep_quality.py --source census.parquet --label label --split split --keep 3 5 10 20 --out …

All searches use the splits and steps of ``lpfs.select`` and one pretrained model per seed. Every result is one
line of a JSON lines file, written immediately; a second call does only what is missing. The same set of fields is
trained once per seed.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs._console import Console
from lpfs.methods.base import top_k
from lpfs.methods.registry import make_method
from lpfs.pipeline import stages
from lpfs.pipeline.data import prepare_dataset
from lpfs.pipeline.plan import RunPlan, build_plan
from lpfs.pipeline.settings import Settings

FIXED_PENALTY = "lpfs++ at a fixed λ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="preset of a simulated log")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--source", help="a table, or the directory of a Dataset")
    parser.add_argument("--label")
    parser.add_argument("--time")
    parser.add_argument("--split")
    parser.add_argument("--keep", type=int, nargs="*", default=[])
    parser.add_argument("--part", type=int, nargs="*", default=[], help="keep the number of fields divided by this")
    parser.add_argument("--methods", nargs="*", default=["lpfs++", "lpfs", "permutation"])
    parser.add_argument("--sweep", type=int, default=0, help="number of fixed λ for LPFS++")
    span_help = "exponents of 2 of the first and the last λ, in units of 1 / (6.4 Ση)"
    parser.add_argument("--span", type=float, nargs=2, default=(0.0, 5.0), help=span_help)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed, so that processes can share the seeds")
    parser.add_argument("--no-reference", action="store_true", help="leave out the model of all fields")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of select, as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data", type=Path, help="directory of the Dataset, which is kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    scratch = Path(tempfile.mkdtemp(prefix="keep_quality"))
    try:
        run(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print_summary(options.out)


def run(options: argparse.Namespace, scratch: Path) -> None:
    """Do the missing runs of all seeds."""
    console = Console(quiet=True)
    settings = Settings(label=options.label, time=options.time, split=options.split, keep=1, **options.settings)
    if options.preset:
        dataset = lpfs.simulate(options.data or scratch / "log", options.preset, rows=options.rows)
    elif (Path(options.source) / "dataset.json").exists():
        dataset = lpfs.Dataset(options.source)
    else:
        directory = options.data.parent if options.data else scratch
        dataset = prepare_dataset(options.source, settings, directory, console)
    total = len(dataset.schema)
    sizes = sorted({*options.keep, *(max(1, total // part) for part in options.part)})
    for seed in range(options.first, options.first + options.seeds):
        plan = build_plan(replace(settings, seed=seed), dataset, scratch / f"seed{seed}", console)
        plan.check()
        SeedRuns(plan, options.out).run(sizes, options)


class SeedRuns:
    """All runs of one seed."""

    def __init__(self, plan: RunPlan, out: Path) -> None:
        self.plan, self.out, self.seed = plan, out, plan.settings.seed
        self.pretrained: stages.Trained | None = None
        self.count = 0  # of searches and trainings, each with a directory of its own
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        self.done = [record for record in lines if record["seed"] == self.seed]
        self.aucs = {tuple(record["kept"]): record["scores"] for record in self.done}

    def run(self, sizes: list[int], options: argparse.Namespace) -> None:
        """Do the missing runs."""
        if not options.no_reference and not self.is_done("all", None):
            self.write("all", None, list(self.plan.schema.names), 0.0, {})
        for method in options.methods:
            missing = [size for size in sizes if not self.is_done(method, size)]
            if missing and not make_method(method).search_per_k:
                self.rank(method, missing)
                continue
            for size in missing:
                self.search(method, size, keep=size)
        if options.sweep:
            steps, (first_power, last_power) = self.plan.steps.search, options.span
            gates = lpfs.Gates(self.plan.schema.names, lpfs.gate_function("lpfs++"), steps)
            unit = 1 / (6.4 * gates.schedule.total_lr(gates.steps))
            for number in range(options.sweep):
                power = first_power + (last_power - first_power) * number / max(1, options.sweep - 1)
                penalty = unit * 2.0**power
                if not self.is_done(FIXED_PENALTY, round(penalty, 6)):
                    self.search("lpfs++", round(penalty, 6), FIXED_PENALTY, penalty=penalty)

    def is_done(self, method: str, target: float | None) -> bool:
        """Return whether a result exists."""
        return any(record["method"] == method and record["target"] == target for record in self.done)

    def rank(self, method: str, sizes: list[int]) -> None:
        """Search once, and keep the best fields of its ranking for every size."""
        selection, seconds = self.find(method, keep=sizes[0])
        for size in sizes:
            self.write(method, size, list(top_k(selection.made["scores"], size)), seconds, {})

    def search(self, method: str, target: float, name: str | None = None, **kind: float) -> None:
        """Search for one target, and evaluate the kept fields."""
        try:
            selection, seconds = self.find(method, **kind)
        except lpfs.errors.AllGatesZeroError:
            print(f"seed {self.seed} {name or method} {target}: all gates became zero", flush=True)
            return
        gates = {
            "smallest_kept": min(abs(selection.gates[field]) for field in selection.kept),
            "largest_dropped": max((abs(selection.gates[field]) for field in selection.dropped), default=0.0),
        }
        self.write(name or method, target, list(selection.kept), seconds, gates)

    def find(self, method: str, **target: Any) -> tuple[lpfs.Selection, float]:
        """Search from a copy of the pretrained model; return the selection and the seconds."""
        if self.pretrained is None:
            self.pretrained = stages.pretrain(self.plan, self.seed)
        self.count += 1
        options = dict(self.plan.settings.options) if method.startswith("lpfs") else {}
        run_dir = self.plan.run_dir / str(self.count)
        plan = self.plan.for_search(run_dir, self.seed, method=method, options=options, **target)
        start = time.perf_counter()
        selection = stages.search_fields(plan, copy.deepcopy(self.pretrained), self.seed)[2]
        return selection, time.perf_counter() - start

    def write(
        self, method: str, target: float | None, kept: list[str], seconds: float, gates: dict[str, float]
    ) -> None:
        """Train the kept fields from scratch, if they were not, and write the result."""
        names = tuple(name for name in self.plan.schema.names if name in set(kept))
        if names not in self.aucs:
            self.aucs[names] = self.retrain(list(names))
        aucs = self.aucs[names]
        record = {
            "seed": self.seed,
            "method": method,
            "target": target,
            "count": len(names),
            "scores": aucs,
            "search_seconds": round(seconds, 2),
            **gates,
            "kept": list(names),
            "fingerprint": self.plan.dataset.fingerprint,
            "settings": self.plan.settings.to_json() | {"source": []},
            "steps": self.plan.steps.to_json(),
        }
        with self.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"seed {self.seed} {method:<20} {target!s:>9}: {len(names):>3} fields, AUC {aucs['test']:.5f} "
            f"(validation {aucs['valid']:.5f}), search {seconds:.1f} s",
            flush=True,
        )

    def retrain(self, names: list[str]) -> dict[str, float]:
        """Return the validation and test AUC of fields trained from scratch."""
        self.count += 1
        run_dir = self.plan.run_dir / f"retrain{self.count}"
        plan = replace(self.plan, run_dir=run_dir, schema=self.plan.schema.subset(names))
        model = stages.new_model(plan, self.seed)
        optimizer, rows = plan.optimizer(model), plan.splits.train
        stages.train(plan, model, optimizer, rows, plan.steps.train, "model", self.seed)
        splits = {"valid": plan.splits.valid, "test": plan.splits.test}
        return {name: stages.evaluate_split(plan, model, rows).auc or 0.5 for name, rows in splits.items()}


def print_summary(path: Path) -> None:
    """Print mean and standard deviation over seeds."""
    aucs: dict[tuple[str, Any], list[float]] = {}
    counts: dict[tuple[str, Any], list[int]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        key = record["method"], record["target"]
        aucs.setdefault(key, []).append(record["scores"]["test"])
        counts.setdefault(key, []).append(record["count"])
    for (method, target), values in aucs.items():
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        fields = f"{min(counts[method, target])} to {max(counts[method, target])}"
        print(f"{method:<20} {target!s:>9} ({fields} fields): {statistics.mean(values):.5f} ± {deviation:.5f}")


if __name__ == "__main__":
    main()
