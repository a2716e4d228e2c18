"""What 378 crosses cost: a step of DLRMCross against its matrix products alone, interleaved in one process.

    python benchmarks/crosses.py [--device cuda] [--repeats 20] [--out benchmarks/results/crosses.json]

"products" is forward and backward of the top 6048-256-128-1 by itself, on an input that is there already and whose
gradient is wanted. The others write the 27 embeddings and all 351 products, gated, before it: "torch" and "numba"
with these kernels, "index tensors" as a user would. "step" is a whole training step of
``DLRMCross`` with gates, tables and Adagrad. Each ratio is that of two neighbours in time; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import lpfs
from lpfs._imports import has_numba
from lpfs.embeddings.optim import Adagrad
from lpfs.models.crosses import Crosses
from lpfs.models.dlrm import DLRMCross
from lpfs.models.layers import dense_layers

TABLES, ROWS, D, DENSE = 26, 20_000, 16, 13
N = TABLES + 1
PARTS = [*((i,) for i in range(N)), *combinations(range(N), 2)]


def alone(rows: int, device: str) -> dict[str, Callable[[], None]]:
    top = dense_layers(len(PARTS) * D, (256, 128), 1).to(device)
    read = torch.randn(rows, len(PARTS) * D, device=device, requires_grad=True)
    tokens = torch.randn(rows, N, D, device=device, requires_grad=True)
    gate = torch.ones(len(PARTS), device=device, requires_grad=True)
    first, second = (torch.tensor([part[k] for part in PARTS[N:]], device=device) for k in (0, 1))

    def indexed() -> Tensor:
        products = tokens[:, first] * tokens[:, second]
        return (torch.cat([tokens, products], 1) * gate[:, None]).flatten(1)

    def run(make: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            for each in (*top.parameters(), read, tokens, gate):
                each.grad = None
            top(make()).sum().backward()

        return step

    def crosses(kernel: str) -> Callable[[], Tensor]:
        module = Crosses(PARTS, D, kernel=kernel)  # type: ignore[arg-type]
        module.gate = lambda: gate
        return lambda: module(tokens)

    steps = {"products": run(lambda: read), "torch": run(crosses("torch")), "index tensors": run(indexed)}
    if device == "cpu" and has_numba():
        steps["numba"] = run(crosses("numba"))
    return steps


def whole(rows: int, device: str) -> Callable[[], None]:
    random = torch.Generator().manual_seed(1)
    numbers = [lpfs.Field(f"n{n}", "numeric") for n in range(DENSE)]
    ids = [lpfs.Field(f"c{n}", cardinality=ROWS) for n in range(TABLES)]
    model = DLRMCross(lpfs.Schema((*numbers, *ids))).to(device)
    zipf = (ROWS * torch.rand(rows, TABLES, generator=random) ** 3).int().clamp(max=ROWS - 1)
    labels = torch.rand(rows, 1, generator=random).round()
    batch = lpfs.Batch(zipf, torch.randn(rows, DENSE, generator=random), labels).to(device)
    gates = lpfs.attach(model, steps=20_000)
    weights: list[nn.Parameter] = gates.model_parameters()
    optimizer, prox = Adagrad(weights, lr=0.01), gates.optimizer(keep=100)

    def step() -> None:
        optimizer.zero_grad()
        prox.zero_grad()
        binary_cross_entropy_with_logits(model(batch), batch.labels[:, 0]).backward()
        prox.step()
        optimizer.step()
        gates.step()

    return step


def seconds(run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(rows: int, device: str, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    steps = {**alone(rows, device), "step": whole(rows, device)}
    for run in steps.values():
        run()
        run()
    times = [{name: seconds(run, device) for name, run in steps.items()} for _ in range(repeats)]
    result: dict[str, float] = {"batch": rows}
    for name in steps:
        key = name.replace(" ", "_")
        result[f"{key}_ms"] = 1e3 * statistics.median(each[name] for each in times)
        result[f"{key}_ratio"] = statistics.median(each[name] / each["products"] for each in times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What 378 crosses cost a training step.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default="benchmarks/results/crosses.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = (512, 2048) if arguments.device == "cpu" else (512, 4096, 65536)
    rows = [measure(size, arguments.device, arguments.repeats) for size in sizes]
    result = {
        "command": f"python benchmarks/crosses.py --device {arguments.device} --repeats {arguments.repeats} "
        f"--threads {arguments.threads}",
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "rows": rows,
    }
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        ratios = {key.removesuffix("_ratio"): value for key, value in row.items() if key.endswith("_ratio")}
        listed = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
        print(f"B={row['batch']:>6}: products {row['products_ms']:.1f} ms; against them {listed}")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
