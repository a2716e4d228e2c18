"""What gates cost: one training step with them against one without, interleaved in one process.

    python benchmarks/gate_overhead.py [--device cuda] [--repeats 30] [--out benchmarks/results/gate_overhead.json]

The model is what a user brings: 26 nn.Embedding tables (sparse gradients), a dense branch, concat, MLP 256-128-1,
with torch's own Adagrad. Gated and plain steps alternate on the same batches; the ratio of each pair is kept, and
its median and quartiles are reported. "gates alone" is the time of the gates' forward, the proximal step and
``gates.step()`` by themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs

TABLES, ROWS, D, DENSE = 26, 20_000, 16, 13


class Net(nn.Module):
    """26 tables and a dense branch, concatenated, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({f"c{n}": nn.Embedding(ROWS, D, sparse=True) for n in range(TABLES)})
        self.dense = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, D))
        width = (TABLES + 1) * D
        self.top = nn.Sequential(
            nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return logits (B,)."""
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        logits: Tensor = self.top(torch.cat([*parts, self.dense(dense)], 1)).squeeze(1)
        return logits


def make(device: str, gated: bool) -> Callable[[tuple[Tensor, Tensor, Tensor]], None]:
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, so that torch does not warn
    model = Net().to(device)
    others: list[lpfs.ProxSGD | lpfs.Gates] = []
    parameters: list[nn.Parameter] = list(model.parameters())
    if gated:
        gates = lpfs.attach(model, {**dict(model.emb.items()), "dense": model.dense}, steps=20_000)
        parameters, others = gates.model_parameters(), [gates.optimizer(keep=13), gates]
    optimizer = torch.optim.Adagrad(parameters, lr=0.01)

    def step(data: tuple[Tensor, Tensor, Tensor]) -> None:
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(data[0], data[1]), data[2]).backward()
        optimizer.step()
        for each in others:
            each.step()

    return step


def seconds(run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(rows: int, device: str, repeats: int, inner: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(1)
    zipf = (ROWS * torch.rand(rows, TABLES, generator=random) ** 3).long().clamp(max=ROWS - 1)
    dense, clicks = torch.randn(rows, DENSE, generator=random), torch.rand(rows, generator=random).round()
    data = (zipf.to(device), dense.to(device), clicks.to(device))
    steps = {False: make(device, gated=False), True: make(device, gated=True)}

    def several(gated: bool) -> Callable[[], None]:
        def run() -> None:
            for _ in range(inner):
                steps[gated](data)

        return run

    for each in (False, True):
        several(each)()
    pairs = []
    for repeat in range(repeats):
        order = (False, True) if repeat % 2 else (True, False)
        times = {each: seconds(several(each), device) / inner for each in order}
        pairs.append((times[False], times[True]))
    ratios = [gated / plain for plain, gated in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "batch": rows,
        "plain_ms": 1e3 * statistics.median(plain for plain, _ in pairs),
        "gated_ms": 1e3 * statistics.median(gated for _, gated in pairs),
        "ratio": statistics.median(ratios),
        "ratio_lower_quartile": quartiles[0],
        "ratio_upper_quartile": quartiles[2],
        "gates_alone_us": 1e6 * _alone(device),
    }


def _alone(device: str) -> float:
    gates = lpfs.Gates([f"f{n}" for n in range(TABLES + 1)], lpfs.gate_function("lpfs++"), 20_000).to(device)
    prox = gates.optimizer(keep=13)

    def run() -> None:
        for _ in range(200):
            gates().sum().backward()
            prox.step()
            gates.step()
            prox.zero_grad()

    run()
    return statistics.median(seconds(run, device) / 200 for _ in range(7))


def main() -> None:
    parser = argparse.ArgumentParser(description="What gates cost a training step.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--inner", type=int, default=5, help="steps a measurement")
    parser.add_argument("--out", default="benchmarks/results/gate_overhead.json")
    arguments = parser.parse_args()
    sizes = (512, 2048, 4096) if arguments.device == "cpu" else (512, 4096, 65536)
    rows = [measure(size, arguments.device, arguments.repeats, arguments.inner) for size in sizes]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    result = {
        "command": f"python benchmarks/gate_overhead.py --device {arguments.device} --repeats {arguments.repeats}",
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "repeats": arguments.repeats,
        "rows": rows,
    }
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"B={row['batch']:>6}: plain {row['plain_ms']:.2f} ms, gated {row['gated_ms']:.2f} ms, "
            f"ratio {row['ratio']:.3f} ({row['ratio_lower_quartile']:.3f} to {row['ratio_upper_quartile']:.3f}), "
            f"gates alone {row['gates_alone_us']:.0f} µs"
        )
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
