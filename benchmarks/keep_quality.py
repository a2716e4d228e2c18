"""keep=K against permutation and against a sweep of fixed λ: AUC of the kept fields, trained from scratch.

    python benchmarks/keep_quality.py --preset industrial-small --part 8 4 2 --seeds 5 --sweep 6
    python benchmarks/keep_quality.py --source census.parquet --label label --split split --keep 3 5 10 20

One protocol for all: ``lpfs.select``'s periods and recipe, one pretrained model a seed, the same steps of search.
Every result is a line of JSON lines, written as it comes; a second call does only what is missing. The same set of
fields is trained once a seed.
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
from lpfs.methods.ranking import top
from lpfs.methods.registry import entry_of
from lpfs.methods.wish import Wish
from lpfs.pipeline import stages
from lpfs.pipeline.data import prepare_dataset
from lpfs.pipeline.plan import RunPlan, plan_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="simulate this log")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--source", help="or read this table")
    parser.add_argument("--label")
    parser.add_argument("--time")
    parser.add_argument("--split")
    parser.add_argument("--keep", type=int, nargs="*", default=[])
    parser.add_argument("--part", type=int, nargs="*", default=[], help="keep one in so many of the fields")
    parser.add_argument("--methods", nargs="*", default=["lpfs++", "lpfs", "permutation"])
    parser.add_argument("--sweep", type=int, default=0, help="so many fixed λ for LPFS++")
    spans = "λ from 2 to the one to 2 to the other, times 1 / (6.4 Ση)"
    parser.add_argument("--span", type=float, nargs=2, default=(0.0, 5.0), help=spans)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed: processes may share the seeds")
    parser.add_argument("--no-reference", action="store_true", help="leave out the model of all fields")
    parser.add_argument("--settings", type=json.loads, default={}, help="of select, as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data", type=Path, help="keep the Dataset here")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    scratch = Path(tempfile.mkdtemp(prefix="keep_quality"))
    try:
        run(given, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    summary(given.out)


def run(given: argparse.Namespace, scratch: Path) -> None:
    wanted = Settings(label=given.label, time=given.time, split=given.split, keep=1, **given.settings)
    if given.preset:
        dataset = lpfs.simulate(given.data or scratch / "log", given.preset, rows=given.rows)
    elif (Path(given.source) / "dataset.json").exists():
        dataset = lpfs.Dataset(given.source)
    else:
        place = given.data.parent if given.data else scratch
        dataset = prepare_dataset(given.source, wanted, place, True)
    total = len(dataset.schema)
    sizes = sorted({*given.keep, *(max(1, total // part) for part in given.part)})
    for seed in range(given.first, given.first + given.seeds):
        work = plan_run(replace(wanted, seed=seed), dataset, scratch / f"seed{seed}", False, Console(quiet=True))
        Runs(work, given.out, dataset.fingerprint).all(sizes, given)


class Runs:
    """All runs of one seed."""

    def __init__(self, work: RunPlan, out: Path, fingerprint: str) -> None:
        self.work, self.out, self.seed, self.fingerprint = work, out, work.settings.seed, fingerprint
        self.trained: stages.Trained | None = None
        self.known: dict[tuple[str, ...], dict[str, float]] = {}
        self.number = 0
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        self.done = [each for each in lines if each["seed"] == self.seed]
        for each in self.done:
            self.known[tuple(each["kept"])] = each["scores"]

    def all(self, sizes: list[int], given: argparse.Namespace) -> None:
        methods, sweep, span = given.methods, given.sweep, given.span
        if not given.no_reference and not self.has("all", None):
            self.write("all", None, list(self.work.schema.names), 0.0, {})
        for method in methods:
            missing = [size for size in sizes if not self.has(method, size)]
            if missing and not entry_of(method).each_keep:
                self.rank(method, missing)
                continue
            for size in missing:
                self.search(method, Wish(keep=size), size)
        if sweep:
            gates = lpfs.Gates(self.work.schema.names, lpfs.gate_function("lpfs++"), self.work.steps.search)
            first = 1 / (6.4 * gates.schedule.total_lr(gates.steps))
            for number in range(sweep):
                penalty = first * 2.0 ** (span[0] + (span[1] - span[0]) * number / max(1, sweep - 1))
                if not self.has("lpfs++ at a fixed λ", round(penalty, 6)):
                    self.search("lpfs++", Wish(penalty=penalty), round(penalty, 6), "lpfs++ at a fixed λ")

    def has(self, method: str, size: float | None) -> bool:
        return any(each["method"] == method and each["asked"] == size for each in self.done)

    def rank(self, method: str, sizes: list[int]) -> None:
        """Search once, and cut the ranking at every size."""
        found, seconds = self.find(method, Wish(keep=sizes[0]))
        for size in sizes:
            self.write(method, size, list(top(found.made["scores"], size)), seconds, {})

    def search(self, method: str, wish: Wish, asked: float, name: str | None = None) -> None:
        try:
            found, seconds = self.find(method, wish)
        except lpfs.errors.AllGatesZeroError:
            print(f"seed {self.seed} {name or method} {asked}: every gate went to zero", flush=True)
            return
        smallest = min(abs(found.gates[each]) for each in found.kept)
        dropped = max((abs(found.gates[each]) for each in found.dropped), default=0.0)
        gates = {"smallest_kept": smallest, "largest_dropped": dropped}
        self.write(name or method, asked, list(found.kept), seconds, gates)

    def find(self, method: str, wish: Wish) -> tuple[lpfs.Selection, float]:
        """Search from a copy of the pretrained model; return what is found, and in how many seconds."""
        if self.trained is None:
            self.trained = stages.pretrain(self.work, self.seed)
        self.number += 1
        options = {**self.work.settings.options} if method.startswith("lpfs") else {}
        settings = replace(self.work.settings, method=method, options=options)
        work = replace(self.work, target=wish, settings=settings, run_dir=self.work.run_dir / str(self.number))
        begin = time.perf_counter()
        _, _, found = stages.search_fields(work, copy.deepcopy(self.trained), self.seed)
        return found, time.perf_counter() - begin

    def write(
        self, method: str, asked: float | None, kept: list[str], seconds: float, gates: dict[str, float]
    ) -> None:
        order = [name for name in self.work.schema.names if name in set(kept)]
        key = tuple(order)
        if key not in self.known:
            self.known[key] = self.retrain(order)
        line = {
            "seed": self.seed,
            "method": method,
            "asked": asked,
            "count": len(order),
            "scores": self.known[key],
            "search_seconds": round(seconds, 2),
            **gates,
            "kept": order,
            "fingerprint": self.fingerprint,
            "settings": self.work.settings.to_json() | {"source": []},
            "recipe": self.work.steps.to_json(),
        }
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        scores = self.known[key]
        print(
            f"seed {self.seed} {method:<20} {asked!s:>9}: {len(order):>3} fields, AUC {scores['test']:.5f} "
            f"(validation {scores['valid']:.5f}), search {seconds:.1f} s",
            flush=True,
        )

    def retrain(self, names: list[str]) -> dict[str, float]:
        self.number += 1
        work = replace(
            self.work, run_dir=self.work.run_dir / f"retrain{self.number}", schema=self.work.schema.subset(names)
        )
        model = stages.new_model(work, self.seed)
        model, _ = stages.train(
            work, model, work.optimizer(model), work.splits.train, work.steps.train, "model", self.seed
        )
        found = {
            name: stages.evaluate_split(work, model, getattr(work.splits, name)) for name in ("valid", "test")
        }
        return {name: each.auc or 0.5 for name, each in found.items()}


def summary(path: Path) -> None:
    """Print mean and spread over seeds."""
    rows: dict[tuple[str, Any], list[float]] = {}
    counts: dict[tuple[str, Any], list[int]] = {}
    for line in path.read_text().splitlines():
        each = json.loads(line)
        rows.setdefault((each["method"], each["asked"]), []).append(each["scores"]["test"])
        counts.setdefault((each["method"], each["asked"]), []).append(each["count"])
    for (method, asked), values in rows.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        fields = f"{min(counts[method, asked])} to {max(counts[method, asked])}"
        print(f"{method:<20} {asked!s:>9} ({fields} fields): {statistics.mean(values):.5f} ± {spread:.5f}")


if __name__ == "__main__":
    main()
