"""What gates cost: one training step with gates against one without, interleaved.

    python benchmarks/gate_overhead.py [--device cuda] [--repeats 30] [--out benchmarks/results/gate_overhead.json]
    python benchmarks/gate_overhead.py --device cuda --graph     # steps in a CUDA graph, with and without Triton
    python benchmarks/gate_overhead.py --parts                   # what each part of the gates' work costs
    python benchmarks/gate_overhead.py --against OTHER_TREE/src  # gated steps of two source trees, paired

The model is one that a user might bring: 26 nn.Embedding tables (sparse gradients), a dense branch, concat, MLP
256-128-1, with torch's own Adagrad. Plain steps, steps with gates on the outputs of the tables (the default) and with
gates on the columns of the Linear that reads them (``reader=…, at="reader"``) alternate on the same batches; the ratio
of each pair is kept, and its median and quartiles are reported. ``gates_alone_us`` is the time of the gates' forward
and backward pass, the proximal step and ``gates.step()`` without a model. On a GPU it is measured with and without the
Triton kernels, and with ``--graph`` also for the steps captured in a CUDA graph, where the kernels replace about a
hundred small ones. With the environment variable CPU_TIME set, the time of the processor is measured instead of
the time of the clock: for a machine with other work, with OMP_NUM_THREADS=1. ``--parts`` adds steps with hooks that
multiply by constants, and by a parameter without any optimizer: the least that torch needs for e * g.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs

TABLES, ROWS, D, DENSE = 26, 20_000, 16, 13
Data = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """26 tables and a dense branch, concatenated, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({f"c{n}": nn.Embedding(ROWS, D, sparse=True) for n in range(TABLES)})
        self.dense = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, D))
        width = (TABLES + 1) * D
        self.top = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return logits (B,)."""
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        logits: Tensor = self.top(torch.cat([*parts, self.dense(dense)], 1)).squeeze(1)
        return logits


class PlainMultiply:
    """Multiplies the outputs of tables by constants, or by a parameter, with nothing but torch."""

    def __init__(self, model: Net, device: str, trained: bool) -> None:
        self.values = nn.Parameter(torch.ones(TABLES + 1, device=device), requires_grad=trained)
        self.parts: tuple[Tensor, ...] = ()
        model.register_forward_pre_hook(self.unbind)
        for number, module in enumerate((*model.emb.values(), model.dense)):
            module.register_forward_hook(lambda _, __, output, number=number: output * self.parts[number])

    def unbind(self, module: nn.Module, arguments: Any) -> None:
        """Split the values of this forward pass."""
        self.values.grad, self.parts = None, self.values.unbind()


def make_step(
    device: str, gated: bool, part: str | None = None, at: Literal["output", "reader"] = "output"
) -> Callable[[Data], None]:
    """Return a function that takes one training step; ``part``: with ``constants`` or a ``parameter`` as gates."""
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # explicitly, so that torch does not warn
    model = Net().to(device)
    steppers: list[lpfs.ProxSGD | lpfs.Gates] = []
    parameters: list[nn.Parameter] = list(model.parameters())
    if gated:
        fields = {**dict(model.emb.items()), "dense": model.dense}
        gates = lpfs.attach(model, fields, steps=20_000, reader=model.top[0], at=at)
        parameters, steppers = gates.model_parameters(), [gates.optimizer(keep=13), gates]
    if part is not None:
        PlainMultiply(model, device, trained=part == "parameter")
    optimizer = torch.optim.Adagrad(parameters, lr=0.01)

    def step(data: Data) -> None:
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(data[0], data[1]), data[2]).backward()
        optimizer.step()
        for stepper in steppers:
            stepper.step()

    return step


def make_batch(rows: int, device: str) -> Data:
    """Return ids, dense values and labels."""
    random = torch.Generator().manual_seed(1)
    zipf = (ROWS * torch.rand(rows, TABLES, generator=random) ** 3).long().clamp(max=ROWS - 1)
    dense, clicks = torch.randn(rows, DENSE, generator=random), torch.rand(rows, generator=random).round()
    return zipf.to(device), dense.to(device), clicks.to(device)


def seconds(run: Callable[[], None], device: str) -> float:
    """Return the seconds that a call takes."""
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.process_time if os.environ.get("CPU_TIME") else time.perf_counter
    started = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def measure(rows: int, device: str, repeats: int, inner: int, parts: bool) -> dict[str, Any]:
    """Return the milliseconds of the steps and their ratios to plain ones, in an order of their own in every repeat."""
    data = make_batch(rows, device)
    steps = {
        "plain": make_step(device, gated=False),
        "gates": make_step(device, gated=True),
        "gates at reader": make_step(device, gated=True, at="reader"),
    }
    if parts:
        steps |= {part: make_step(device, gated=False, part=part) for part in ("constants", "parameter")}
    times: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str) -> None:
        for _ in range(inner):
            steps[name](data)

    for name in steps:
        run(name)
    for repeat in range(repeats):
        for name in random.Random(repeat).sample(list(steps), len(steps)):
            times[name].append(seconds(partial(run, name), device) / inner)
    ratios = {
        name: summarize([a / b for a, b in zip(values, times["plain"], strict=True)]) for name, values in times.items()
    }
    medians = {name: round(1e3 * statistics.median(values), 4) for name, values in times.items()}
    return {"batch": rows, "ms": medians, "against_plain": ratios}


def summarize(ratios: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of some ratios."""
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "ratio_lower_quartile": quartiles[0],
        "ratio_upper_quartile": quartiles[2],
    }


def measure_alone(device: str, fused: bool | None = None, graph: bool = False) -> float:
    """Return the microseconds of the gates' own work in a step."""
    gates = lpfs.Gates([f"f{n}" for n in range(TABLES + 1)], lpfs.gate_function("lpfs++"), 20_000)
    gates.fused = fused
    gates.to(device)
    prox = gates.optimizer(keep=13)
    gradient = gates.x.grad = torch.zeros_like(gates.x)

    def step() -> None:
        gradient.zero_()
        gates().sum().backward()
        prox.step()
        gates.step()

    run_one = step
    if graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        run_one = captured.replay

    def run() -> None:
        for _ in range(200):
            run_one()

    run()
    return 1e6 * statistics.median(seconds(run, device) / 200 for _ in range(7))


def work(device: str, rows: int) -> None:
    """Take steps on request: a number of steps on each line of stdin, its seconds per step on stdout."""
    step, data = make_step(device, gated=True), make_batch(rows, device)
    for line in sys.stdin:
        count = int(line)

        def run(count: int = count) -> None:
            for _ in range(count):
                step(data)

        print(seconds(run, device) / count, flush=True)


def compare_trees(other: str, device: str, rows: int, repeats: int, inner: int) -> dict[str, float]:
    """Return gated steps of this source tree relative to those of another one, in alternating order."""
    here = str(Path(lpfs.__file__).parent.parent)
    workers = {}
    for tree in (other, here):
        command = [sys.executable, __file__, "--worker", str(rows), "--device", device]
        environment = {**os.environ, "PYTHONPATH": tree}
        workers[tree] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(tree: str, count: int) -> float:
        worker = workers[tree]
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(f"{count}\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    for tree in workers:
        ask(tree, 20)
    pairs = []
    for repeat in range(repeats):
        order = (other, here) if repeat % 2 else (here, other)
        times = {tree: ask(tree, inner) for tree in order}
        pairs.append((times[other], times[here]))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    return {
        "batch": rows,
        "other_ms": 1e3 * statistics.median(before for before, _ in pairs),
        "here_ms": 1e3 * statistics.median(after for _, after in pairs),
        **summarize([after / before for before, after in pairs]),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What gates cost a training step.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--inner", type=int, default=5, help="steps per measurement")
    parser.add_argument("--graph", action="store_true", help="also capture the gates' own step in a CUDA graph")
    parser.add_argument("--parts", action="store_true", help="also measure parts of the gates' work")
    parser.add_argument("--against", help="another source tree; its gated steps are paired with those of this one")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="benchmarks/results/gate_overhead.json")
    arguments = parser.parse_args()
    device, repeats, inner = arguments.device, arguments.repeats, arguments.inner
    if arguments.worker:
        work(device, arguments.worker)
        return
    sizes = arguments.batch or ((512, 2048, 4096) if device == "cpu" else (512, 4096, 65536))
    result: dict[str, Any] = {
        "command": f"python benchmarks/gate_overhead.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "repeats": repeats,
    }
    if arguments.against:
        result["rows"] = [compare_trees(arguments.against, device, sizes[0], repeats, inner)]
    else:
        result["rows"] = [measure(size, device, repeats, inner, arguments.parts) for size in sizes]
        variants = [(None, False)] if device == "cpu" else [(None, False), (False, False)]
        variants += [(None, True), (False, True)] if arguments.graph else []
        names = {
            (None, False): "default",
            (False, False): "torch",
            (None, True): "graph",
            (False, True): "graph, torch",
        }
        result["gates_alone_us"] = {names[key]: measure_alone(device, *key) for key in variants}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        ratios = row.get("against_plain")
        if ratios is None:
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
        else:
            print(row["batch"], {name: round(ratio["ratio"], 4) for name, ratio in ratios.items()}, row["ms"])
    for name, microseconds in result.get("gates_alone_us", {}).items():
        print(f"gates alone ({name}): {microseconds:.0f} µs")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
