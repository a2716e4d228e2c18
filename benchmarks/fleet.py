"""Throughput of R replicas trained as one fleet, against R single runs of ``fit`` one after another.

    python benchmarks/fleet.py [--device cuda] [--replicas 1 8 32 64] [--repeats 7] [--before TREE] [--out FILE]

The model is the default, an MLP 256-128-1 on embeddings of dim 16, of 40 fields whose ids follow Zipf's law; the
optimizer is Adagrad. The batch size is 64 on a CPU and 512 on a GPU, where steps are captured as CUDA graphs in both
cases, by ``fit(…, graph=True)``. Only steps after the warm-up are timed. Every repeat measures the single run and all
sizes of the fleet in an order of its own, on the same batches; ratios are taken within a repeat, and their median and
quartiles reported. R single runs are R times the time of one. ``own`` gives every replica batches of its own.
``--before TREE`` also measures, in turn with the others, the single run of an older version of the package, whose
source is in TREE/src (``git archive COMMIT src | tar x -C TREE``), in a process of its own.
``--search`` measures searches with LPFS++ instead, for several K with several seeds: R single searches, captured on a
GPU, against one fleet of R searches (``lpfs.methods.gate_fleet``). Every three replicas are the K of one seed, whose
rows and held-out rows are its own, and the gates learn from the latter.
With several threads the single run on one thread is measured too, because it can be the faster one. ``--clock cpu
--threads 1`` counts the time of the processor, for a machine that others use too. At the end, single runs are compared
with their replicas: parameters, and logits of one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lpfs
from lpfs.data.batch import Batch
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.lpfs import LPFSPlusPlus
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.schema import Field, Schema, Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

if TYPE_CHECKING:  # an older version has no fleet
    from lpfs.train.fleet import Fleet, FleetStream

with suppress(ImportError):
    from lpfs.methods.gate_fleet import search_together

FIELDS = 40
SIZES = [(10, 30, 100, 1000, 10_000)[number % 5] for number in range(FIELDS)]
SCHEMA = Schema(tuple(Field(f"field {number}", cardinality=size) for number, size in enumerate(SIZES)))
BATCHES = 16  # different batches
COMPARED = 4  # replicas that are compared with single runs
COMPARED_STEPS = 200
SEARCHED = (4, 10, 20)  # K of the searches of a seed
SINGLE, BEFORE, ONE_THREAD = 0, -1, -2  # single runs among the sizes of fleets: of an older version, on one thread
FASTER_THAN = {SINGLE: "", BEFORE: "_than_before", ONE_THREAD: "_than_one_thread"}  # the end of a key of the results


def make_batches(rows: int, seed: int, device: str) -> list[Batch]:
    """Return batches whose labels depend on some of the fields."""
    source = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(BATCHES):  # Zipf: the density of an id is that of 1 / (1 + id)
        columns = [(size + 1) ** torch.rand(rows, generator=source, dtype=torch.float64) - 1 for size in SIZES]
        ids = torch.stack([x.long().clamp(max=size - 1) for x, size in zip(columns, SIZES, strict=True)], 1).int()
        odds = ((ids[:, :8] % 3) - 1).sum(1, keepdim=True) / 2
        labels = (torch.rand(rows, 1, generator=source) < odds.sigmoid()).float()
        batches.append(Batch(ids, torch.zeros(rows, 0), labels).to(device))
    return batches


def make_replica(seed: int) -> Model:
    """Return an untrained model."""
    torch.manual_seed(seed)
    return make_model("mlp", SCHEMA)


class Rows(list[Batch]):
    """Batches that know their fields, for a fleet."""

    schema = SCHEMA


class Timer(Callback):
    """Measures the seconds of all steps after the warm-up."""

    def __init__(self, warmup: int, device: str, clock: str) -> None:
        self.warmup, self.device = warmup, device
        self.clock = time.process_time if clock == "cpu" else time.perf_counter
        self.start = self.seconds = 0.0

    def after_step(self, state: State) -> None:
        if state.step in (self.warmup, state.steps):
            if self.device != "cpu":
                torch.cuda.synchronize()
            now = self.clock()
            self.start, self.seconds = (now, 0.0) if state.step == self.warmup else (self.start, now - self.start)


class Bench:
    """One configuration: its batches, and the seconds per step of a single run or a fleet."""

    def __init__(self, args: argparse.Namespace, precision: str) -> None:
        self.args, self.graph = args, args.device != "cpu"
        self.config = Training(
            steps=args.warmup + args.steps,
            precision=precision,  # type: ignore[arg-type]
            graph=self.graph,
            check_every=50 if self.graph else 1,
            log_every=10**6,
            quiet=True,
        )
        count = max(args.replicas) if args.own else 1
        if args.search:
            count = -(-max(args.replicas) // len(SEARCHED))
            self.holdouts = [make_batches(args.batch, 1000 + seed, args.device) for seed in range(count)]
        self.streams = [make_batches(args.batch, seed, args.device) for seed in range(count)]

    def single(self) -> float:
        """Return the seconds of a step of one model, or of the search for the middle K."""
        timer = Timer(self.args.warmup, self.args.device, self.args.clock)
        if self.args.search:
            self._search(1, timer)
            return float(timer.seconds / self.args.steps)
        model = make_replica(0).to(self.args.device)
        fit(model, self.streams[0], callbacks=[timer], config=self.config)
        return float(timer.seconds / self.args.steps)

    def fleet(self, replicas: int) -> float:
        """Return the seconds of a step of all replicas."""
        timer = Timer(self.args.warmup, self.args.device, self.args.clock)
        if self.args.search:
            tasks = [self._task(number) for number in range(replicas)]
            search_together([make_method("lpfs++")] * replicas, tasks, callbacks=[timer])
            return float(timer.seconds / self.args.steps)
        fleet, streams = self._fleet(replicas)
        fit(fleet, streams, fleet.make_optimizer(self.config), callbacks=[timer], config=self.config)
        return float(timer.seconds / self.args.steps)

    def _fleet(self, replicas: int) -> tuple[Fleet, FleetStream]:
        from lpfs.train.fleet import Fleet, FleetStream

        sources = list(range(replicas)) if self.args.own else [0] * replicas
        models = [make_replica(seed) for seed in range(replicas)]
        fleet = Fleet(models, SCHEMA, sources=sources).to(self.args.device)
        return fleet, FleetStream(fleet, self.streams[: max(sources) + 1])

    def _task(self, number: int) -> SearchTask:
        """Return a search; every three of them have the same seed, and so the same rows and initial weights."""
        seed, config = number // len(SEARCHED), self.config
        model = make_replica(seed).to(self.args.device)
        rows = Rows(self.streams[seed])
        target = SelectionTarget(keep=SEARCHED[number % len(SEARCHED)])
        optimizer, steps = make_optimizer(config, model.parameters()), self.args.warmup + self.args.steps
        return SearchTask(
            model, optimizer, rows, None, target, steps, seed, training=config, holdout=Rows(self.holdouts[seed])
        )

    def _search(self, number: int, *callbacks: Callback) -> Selection:
        """Do one search alone."""
        task, cost, method = self._task(number), SearchCost(), make_method("lpfs++")
        assert isinstance(method, LPFSPlusPlus)
        callback, copies = method.start(task, cost)
        task.fit(callback, cost, *callbacks)
        return method.finish(callback, task, copies)

    def compare_searches(self) -> dict[str, Any]:
        """Return how the results of a fleet of searches differ from those of single searches."""
        tasks = [self._task(number) for number in range(len(SEARCHED))]
        together = search_together([make_method("lpfs++")] * len(tasks), tasks)
        pairs = [(found, self._search(number)) for number, found in enumerate(together)]
        gates = [abs(one.gates[name] - other.gates[name]) for one, other in pairs for name in one.gates]
        same = sum(one.kept == other.kept for one, other in pairs)
        return {"searches": len(pairs), "same_kept_fields": same, "gates": max(gates)}

    def compare(self) -> dict[str, float]:
        """Return the largest differences between replicas and single runs after some steps."""
        config = Training(steps=COMPARED_STEPS, graph=self.graph, quiet=True, precision=self.config.precision)
        fleet, streams = self._fleet(COMPARED)
        fit(fleet, streams, fleet.make_optimizer(config), config=config)
        parameters, logits, moved = [], [], []
        for seed in range(COMPARED):
            model, source = make_replica(seed).to(self.args.device), fleet.sources[seed]
            fit(model, self.streams[source], config=config)
            trained = make_replica(seed).to(self.args.device)
            trained.load_state_dict(fleet.replica_state(seed))
            other = trained.state_dict()
            differences = [(weight - other[name]).abs() for name, weight in model.state_dict().items()]
            parameters.append(max(float(difference.max()) for difference in differences))
            everything = torch.cat([difference.flatten() for difference in differences])
            moved.append(float((everything > 1e-3).double().mean()))
            with torch.no_grad():
                batch = self.streams[source][0]
                logits.append(float((model(batch) - trained(batch)).abs().max()))
        return {
            **{"steps": COMPARED_STEPS, "replicas": COMPARED, "parameters": max(parameters), "logits": max(logits)},
            "fraction_of_parameters_above_1e-3": max(moved),  # the sign of a gradient near 0, in a step of Adagrad
        }


class OlderVersion:
    """A process that measures single runs with the source of an older version, when it is asked to."""

    def __init__(self, tree: Path, precision: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), *_other_paths()])}
        command = [sys.executable, __file__, *sys.argv[1:], "--answer", precision]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def single(self) -> float:
        """Return the seconds of a step of one model."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("the process of the older version failed; its error is above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _other_paths() -> list[str]:
    """Return the entries of PYTHONPATH that are not this version of the package."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in entries if entry and not (Path(entry) / "lpfs").exists()]


def answer_requests(args: argparse.Namespace) -> None:
    """Measure one single run for every line of the input."""
    if not Path(lpfs.__file__).resolve().is_relative_to(args.before.resolve()):
        sys.exit(f"{lpfs.__file__} is not in {args.before}: give a directory that has src/lpfs")
    bench = Bench(args, args.answer)
    for _ in sys.stdin:
        print(bench.single(), flush=True)


def summary(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}  # type: ignore[dict-item]


def measure(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Measure one configuration."""
    bench = Bench(args, precision)
    older = None if args.before is None else OlderVersion(args.before, precision)
    singles = {"single": SINGLE}
    if older is not None:
        singles["single_before"] = BEFORE
    if args.device == "cpu" and args.threads > 1:
        singles["single_one_thread"] = ONE_THREAD
    contenders = [*singles.values(), *args.replicas]
    seconds: dict[int, list[float]] = {size: [] for size in contenders}
    for repeat in range(args.repeats):
        for size in random.Random(repeat).sample(contenders, len(contenders)):
            if older is not None and size == BEFORE:
                seconds[size].append(older.single())
                continue
            torch.set_num_threads(1 if size == ONE_THREAD else args.threads)
            seconds[size].append(bench.fleet(size) if size > 0 else bench.single())
        print(f"repeat {repeat + 1}: " + ", ".join(f"{n}: {1e3 * seconds[n][-1]:.3f} ms" for n in contenders))
    torch.set_num_threads(args.threads)
    if older is not None:
        older.close()
    rows = []
    for size in args.replicas:
        step = statistics.median(seconds[size])
        row = {
            "replicas": size,
            "ms_per_step": round(1e3 * step, 4),
            "rows_per_second": round(size * args.batch / step),
        }
        for single in singles.values():
            ratios = [size * one / fleet for one, fleet in zip(seconds[single], seconds[size], strict=True)]
            row["times_faster" + FASTER_THAN[single]] = summary(ratios)
        rows.append(row)
        print(f"{precision}, R = {size}: {row}")
    medians = {name: statistics.median(seconds[single]) for name, single in singles.items()}
    return {
        "precision": precision,
        **{
            name: {"ms_per_step": round(1e3 * median, 4), "rows_per_second": round(args.batch / median)}
            for name, median in medians.items()
        },
        "fleet": rows,
        "largest_difference": bench.compare_searches() if args.search else bench.compare(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--replicas", type=int, nargs="+", help="default: 1 8 32 64, of searches 3 9 30")
    parser.add_argument("--batch", type=int, help="default: 64 on a CPU, 512 on a GPU")
    parser.add_argument("--steps", type=int, help="timed steps, default: 20 on a CPU, 300 on a GPU")
    parser.add_argument("--warmup", type=int, help="steps before, default: 4 on a CPU, 30 on a GPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--search", action="store_true", help="gate searches for several K and seeds")
    parser.add_argument("--own", action="store_true", help="batches of its own for every replica")
    parser.add_argument("--before", type=Path, metavar="TREE", help="source of an older version, to compare with")
    parser.add_argument("--answer", help=argparse.SUPPRESS)  # the precision that a process of --before measures
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    args.batch = args.batch or (512 if on_gpu else 64)
    args.replicas = args.replicas or ([3, 9, 30] if args.search else [1, 8, 32, 64])
    args.steps = args.steps or (300 if on_gpu else 100 if args.search else 20)  # the control of λ needs some steps
    args.warmup = args.warmup or (30 if on_gpu else 4)
    torch.set_num_threads(args.threads)
    if args.answer is not None:
        answer_requests(args)
        return
    results = [measure(args, precision) for precision in (["float32", "tf32"] if on_gpu else ["float32"])]
    report = {
        "command": shlex.join(["python", "benchmarks/fleet.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        **{"threads": args.threads, "clock": args.clock, "batch": args.batch, "fields": FIELDS},
        **{"own": args.own, "search": args.search},
        "results": results,
    }
    print(json.dumps(report["results"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
