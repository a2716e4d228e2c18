"""Where the time of a training step on a GPU goes: every kernel of a captured step, against the bytes it must move.

    python benchmarks/kernels.py [--cases fleet step sort gates] [--out benchmarks/results/kernels_h200.json]

``step`` is the gated step of train_step.py, captured, in float32 and TF32, at batches of 512 and 65,536; ``fleet`` a
captured step of 1 and 32 replicas of fleet.py at 512; ``gates`` the steps of gate_overhead.py without a graph, plain
and gated, whose time is that of the host: there the number of kernels and the operations of the host are listed. The
profiler slows the host, so the time per step is measured without it. ``busy_us`` is the sum over the kernels of a
step. ``floor_us`` is what cannot be undercut: the bytes of inputs, rows, gradients and activations, each read or
written once, at the measured speed of a copy, plus the multiplications of the dense layers at the measured speed of a
large product.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fleet as fleet_benchmark
import gate_overhead
import torch
import train_step
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.fit import fit

PROFILED = 10  # steps in the profiler
TIMED = 100
CASES = ["fleet", "step", "sort", "gates"]


def measured_rates() -> dict[str, float]:
    """Return bytes per second of a copy, and multiplications per second of a product in float32 and TF32."""
    source = torch.empty(2**30, device="cuda").uniform_()
    target = torch.empty_like(source)
    rates = {"bytes": 8 * 2**30 / seconds(lambda: target.copy_(source), 10)}
    left, right = torch.randn(2, 8192, 8192, device="cuda").unbind()
    for name, precision in (("float32", "highest"), ("tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        rates[name] = 8192**3 / seconds(lambda: left @ right, 5)
    torch.set_float32_matmul_precision("highest")
    return rates


def seconds(run: Callable[[], object], count: int = TIMED) -> float:
    """Return the seconds of one call, from the clock, after some calls that are not counted."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def kernels_of(run: Callable[[], object], steps: int = PROFILED) -> list[dict[str, Any]]:
    """Return the kernels of one call: name, launches and microseconds, longest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA" and event.name != "ProfilerStep*":
            entry = totals.setdefault(event.name, [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time_total
    rows = [
        {"kernel": name[:140], "launches": count / steps, "us": round(total / steps, 2)}
        for name, (count, total) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def host_operations(run: Callable[[], object], steps: int = PROFILED, most: int = 40) -> list[dict[str, Any]]:
    """Return the operations of the host in one call: name, calls, microseconds without their children."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    rows = [
        {"operation": event.key, "calls": event.count / steps, "us": round(event.self_cpu_time_total / steps, 1)}
        for event in profiler.key_averages()
        if event.self_cpu_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])[:most]


def report(name: str, run: Callable[[], object], floor: dict[str, float] | None = None) -> dict[str, Any]:
    """Measure one case and print its largest kernels."""
    step = seconds(run)
    kernels = kernels_of(run)
    busy = sum(row["us"] for row in kernels)
    launches = sum(row["launches"] for row in kernels)
    print(f"{name}: {1e6 * step:.0f} us per step, kernels {busy:.0f} us in {launches:.0f} launches, floor {floor}")
    for row in kernels[:16]:
        print(f"    {row['us']:9.1f} us {row['launches']:5.1f} x {row['kernel'][:100]}")
    result = {"case": name, "us_per_step": round(1e6 * step, 1), "busy_us": round(busy, 1), "launches": launches}
    return {**result, **(floor or {}), "kernels": kernels}


def floor_of(rates: dict[str, float], precision: str, moved: float, multiplied: float) -> dict[str, float]:
    """Return the microseconds of the bytes and of the multiplications."""
    transfer, product = 1e6 * moved / rates["bytes"], 1e6 * multiplied / rates[precision]
    return {"bytes_us": round(transfer, 1), "products_us": round(product, 1), "floor_us": round(transfer + product, 1)}


def dense_floor(rows: int, widths: list[int]) -> tuple[float, float]:
    """Return bytes of activations (written, read forward and backward; the same for gradients) and multiplications."""
    activations = sum(widths[1:])
    return 4.0 * rows * activations * 5, 3.0 * rows * sum(a * b for a, b in itertools.pairwise(widths))


def step_cases(rates: dict[str, float]) -> list[dict[str, Any]]:
    """Measure the captured, gated step of train_step.py."""
    results = []
    fields, dim = len(train_step.CRITEO), train_step.D
    for rows in (512, 65_536):
        data = train_step.batches(rows, 8, "cuda")
        unique = sum(len(torch.unique(data[0][0][:, field])) for field in range(fields))
        looked_up = 4.0 * rows * fields * dim
        # ids twice; embeddings: read from rows, written, read; gradients: written, read; rows: weight and sum, twice
        moved = 8.0 * rows * fields + 5 * looked_up + 4 * 4.0 * unique * dim
        bottom, top = [13, 64, 16], [(fields + 1) * dim, 256, 128, 1]
        activation, products = (
            sum(pair) for pair in zip(dense_floor(rows, bottom), dense_floor(rows, top), strict=True)
        )
        for precision in ("float32", "tf32"):
            made: list[Any] = []
            step = train_step.graphed(train_step.ours_gated("cuda", None, made), made, "cuda")
            step = train_step.with_tf32(step) if precision == "tf32" else step
            position = iter(range(10**9))
            floor = floor_of(rates, precision, moved + activation, products)
            run = lambda step=step, position=position, data=data: step(data[next(position) % len(data)])  # noqa: E731
            results.append(report(f"step, batch {rows}, {precision}", run, floor))
            torch.cuda.empty_cache()
    return results


class InsideFit(Callback):
    """Keeps a function that replays the captured step of a running ``fit``."""

    def __init__(self, name: str, floor: dict[str, float], results: list[dict[str, Any]]) -> None:
        self.name, self.floor, self.results = name, floor, results
        self.stepper: Any = None

    def after_step(self, state: State) -> None:
        if state.step == state.steps:
            graphs = [value for value in _captured if value is not None]
            self.results.append(report(self.name, graphs[-1].replay, self.floor))


_captured: list[Any] = []


def remember_graphs() -> None:
    """Keep every captured graph, to replay it outside of ``fit``."""
    from lpfs.train.step import GraphStepper

    capture = GraphStepper._capture

    def remember(self: Any, *arguments: Any) -> None:
        capture(self, *arguments)
        _captured.append(self.graph)

    GraphStepper._capture = remember  # type: ignore[method-assign,assignment]


def fleet_cases(rates: dict[str, float]) -> list[dict[str, Any]]:
    """Measure a captured step of one model and of 32 replicas, without copies of the batch."""
    remember_graphs()
    results: list[dict[str, Any]] = []
    rows, dim, fields = 512, 16, fleet_benchmark.FIELDS
    for precision in ("float32", "tf32"):
        for replicas in (1, 32):
            settings = argparse.Namespace(
                device="cuda", warmup=5, steps=5, replicas=[replicas], own=False, batch=rows, clock="wall"
            )
            bench = fleet_benchmark.Bench(settings, precision)
            config = Training(steps=8, graph=True, quiet=True, precision=precision)
            activation, products = dense_floor(rows * replicas, [fields * dim, 256, 128, 1])
            weights = fields * dim * 256 + 256 * 128 + 128
            unique = sum(len(torch.unique(bench.streams[0][0].ids[:, field])) for field in range(fields))
            moved = 5 * 4.0 * rows * fields * dim * replicas + 4 * 4.0 * unique * dim * replicas
            floor = floor_of(rates, precision, moved + activation + 7 * 4.0 * weights * replicas, products)
            watch = InsideFit(f"fleet, {replicas} replicas, batch {rows}, {precision}", floor, results)
            fleet, streams = bench._fleet(replicas)
            fit(fleet, streams, fleet.make_optimizer(config), callbacks=[watch], config=config)
    return results


def sort_with_kernel(keys: Tensor) -> Callable[[], object]:
    """Return the sort of the Triton backend for keys (F, B)."""
    from lpfs.embeddings import _triton

    fields, rows = keys.shape
    starts = torch.arange(fields + 1, device="cuda") * 2**20
    ids, order, result = keys.t().contiguous(), torch.empty_like(keys), torch.empty_like(keys)
    arguments = ids, starts, result, order, rows, *ids.stride()

    def run() -> None:
        _triton._sort_field[(fields,)](*arguments, WIDE=True, SIZE=rows)

    run()
    assert torch.equal(order, torch.sort(keys, dim=1, stable=True)[1].int())
    return run


def sort_cases() -> list[dict[str, Any]]:
    """Measure ways to sort the keys of a batch: all at once, or field by field."""
    results = []
    for rows, fields in ((512, 26), (512, 1280), (4096, 26), (65_536, 26)):
        keys = torch.randint(0, 2**20, (fields, rows), device="cuda", dtype=torch.int32)
        flat = (keys + 2**20 * torch.arange(fields, device="cuda", dtype=torch.int32)[:, None]).flatten()
        packed = flat.long() << 32 | torch.arange(len(flat), device="cuda")
        ways: dict[str, Callable[[], object]] = {
            "flat int32": partial(torch.sort, flat, stable=True),
            "by field int32": partial(torch.sort, keys, dim=1, stable=True),
            "flat int64 packed": partial(torch.sort, packed),
        }
        if rows <= 4096:
            ways["by field, one kernel"] = sort_with_kernel(keys)
        for name, run in ways.items():
            graph = torch.cuda.CUDAGraph()
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
            results.append(report(f"sort, {rows} x {fields}, {name}", graph.replay))
            del graph
    return results


def gate_cases() -> list[dict[str, Any]]:
    """Measure plain and gated steps of a user's model, without a graph."""
    results = []
    for rows in (512, 65_536):
        data = gate_overhead.make_batch(rows, "cuda")
        for gated in (False, True):
            step = gate_overhead.make_step("cuda", gated)
            run = lambda step=step, data=data: step(data)  # noqa: E731
            result = report(f"{'gated' if gated else 'plain'} user model, batch {rows}", run)
            result["host"] = host_operations(run)
            for row in result["host"][:25]:
                print(f"    host {row['us']:9.1f} us {row['calls']:6.1f} x {row['operation'][:80]}")
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rates = measured_rates()
    print({name: f"{rate:.3g}" for name, rate in rates.items()})
    results: list[dict[str, Any]] = []
    if "fleet" in args.cases:
        results += fleet_cases(rates)
    if "step" in args.cases:
        results += step_cases(rates)
    if "sort" in args.cases:
        results += sort_cases()
    if "gates" in args.cases:
        results += gate_cases()
    written = {
        "command": shlex.join(["python", "benchmarks/kernels.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rates_per_second": rates,
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
