"""What a training step costs: tables the usual ways, ours, ours with gates, and no tables at all, interleaved.

    python benchmarks/train_step.py [--device cuda] [--repeats 30] [--out benchmarks/results/train_step.json]

The net is DLRM-like: 26 fields of Criteo's sizes, scaled to 5.07M rows in all (33.7M on a GPU), dim 16, 13 numbers
through 13-64-16 to a 27th token, concat, MLP 256-128-1; ids follow Zipf's law. A step is forward, backward and
Adagrad on everything. On a GPU, "graph" replays the whole step as a CUDA graph, as ``fit(…, graph=True)`` does,
copies of the batch included, and the 378 crosses of DLRMCross join in, in float32 and with TF32 matrix products.
Every repeat runs all contenders on the same batches, in an order of its own; ratios are taken within a repeat, and
their median and quartiles reported. "MLP alone" is the same net and optimizer with tokens at hand instead of
tables, the gradient of the tokens included: what nothing done to the tables can beat. ``--clock cpu --threads 1``
counts the time of the processor instead of that on the wall, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear, relu

import lpfs
from lpfs.embeddings._backends import use_backend
from lpfs.embeddings.optim import Adagrad, move_rates
from lpfs.embeddings.table import Table
from lpfs.train.dense import fused_layers
from lpfs.train.step import bce_loss

ROWS = {"cpu": 5_070_000, "cuda": 33_700_000}
D, DENSE = 16, 13
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
Data = tuple[Tensor, Tensor, Tensor]
Step = Callable[[Data], None]


def sizes(device: str) -> list[int]:
    """Criteo's fields; the five largest share what the others leave of all rows."""
    large = sorted(CRITEO)[-5:]
    factor = (ROWS[device] - sum(CRITEO) + sum(large)) / sum(large)
    return [int(each * factor) if each in large else each for each in CRITEO]


def batches(rows: int, number: int, device: str) -> list[Data]:
    source = torch.Generator().manual_seed(1)
    made = []
    for _ in range(number):  # Zipf: the density of an id is that of 1 / (1 + id)
        columns = [(size + 1) ** torch.rand(rows, generator=source, dtype=torch.float64) - 1 for size in sizes(device)]
        ids = torch.stack([each.clamp(max=size - 1) for each, size in zip(columns, sizes(device), strict=True)], 1)
        dense, clicks = torch.randn(rows, DENSE, generator=source), torch.rand(rows, generator=source).round()
        made.append((ids.to(device, torch.int32), dense.to(device), clicks.to(device)))
    return made


class Dense(nn.Module):
    """All but the tables: tokens (B, 26, D) and numbers (B, 13) to logits (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, D))
        width = (len(CRITEO) + 1) * D
        self.top = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, tokens: Tensor, dense: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return logits (B,)."""
        token = self.bottom(dense) if gate is None else self.gated(dense, gate)
        logits: Tensor = self.top(torch.cat([tokens.flatten(1), token], 1))
        return logits[:, 0]

    def gated(self, dense: Tensor, gate: Tensor) -> Tensor:
        """Return the token times its gate, the gate on the small weights, as in lpfs.models.layers."""
        first, last = self.bottom[0], self.bottom[2]
        assert isinstance(last, nn.Linear)
        return linear(relu(first(dense)), last.weight * gate, last.bias * gate)


def stepping(
    net: nn.Module,
    tokens: Callable[[Data], Tensor],
    optimizers: Iterable[Any],
    engine: str | None = None,
    gates: Callable[[], Tensor] | None = None,
    gated: Callable[[Data, Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = binary_cross_entropy_with_logits,
) -> Step:
    """Return the step: forward, backward, then ``step`` and ``zero_grad`` of everything that moves."""
    moved = list(optimizers)

    def step(data: Data) -> None:
        with nullcontext() if engine is None else use_backend(engine):
            if gates is None or gated is None:
                logits = net(tokens(data), data[1])
            else:
                values = gates()
                logits = net(gated(data, values[:-1]), data[1], values[-1])
            loss(logits, data[2]).backward()
            for each in moved:
                each.step()
                if isinstance(each, torch.optim.Optimizer):
                    each.zero_grad()

    return step


# --------------------------------------------------------------------------------------------- contenders


def official(device: str) -> Step:
    """One EmbeddingBag a field with sparse gradients, as the official DLRM code has it."""
    bags = nn.ModuleList(nn.EmbeddingBag(size, D, mode="sum", sparse=True) for size in sizes(device)).to(device)
    net = Dense().to(device)
    optimizer = torch.optim.Adagrad([*bags.parameters(), *net.parameters()], lr=0.01)
    offsets: dict[int, Tensor] = {}

    def tokens(data: Data) -> Tensor:
        rows = len(data[0])
        if rows not in offsets:
            offsets[rows] = torch.arange(rows, device=device)
        columns = data[0].long().T
        return torch.stack([bag(columns[n], offsets[rows]) for n, bag in enumerate(bags)], 1)

    return stepping(net, tokens, [optimizer])


def fused(device: str) -> Step:
    """One nn.Embedding for all fields, with sparse gradients: the unit of the ratios."""
    table, net = nn.Embedding(sum(sizes(device)), D, sparse=True).to(device), Dense().to(device)
    starts = torch.tensor([0, *sizes(device)[:-1]], device=device).cumsum(0)
    optimizer = torch.optim.Adagrad([*table.parameters(), *net.parameters()], lr=0.01)
    return stepping(net, lambda data: table(data[0] + starts), [optimizer])


def loss_of_fit(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as ``lpfs.fit`` computes it."""
    return bce_loss(logits[:, None], labels[:, None])


def ours(device: str, engine: str | None, made: list[Any] | None = None) -> Step:
    table, net = Table(sizes(device), D).to(device), Dense().to(device)
    optimizer = Adagrad([*table.parameters(), *net.parameters()], lr=0.01)
    if made is not None:
        made += [optimizer, net]
    return stepping(net, lambda data: table(data[0]), [optimizer], engine, loss=loss_of_fit)


def ours_gated(device: str, engine: str | None, made: list[Any] | None = None) -> Step:
    """Take ours with 27 gates, their proximal step and their schedule."""
    table, net = Table(sizes(device), D).to(device), Dense().to(device)
    gates = lpfs.Gates([f"f{n}" for n in range(len(CRITEO) + 1)], lpfs.gate_function("lpfs++"), 20_000).to(device)
    prox = gates.optimizer(keep=13)
    optimizer = Adagrad([*table.parameters(), *net.parameters()], lr=0.01)
    if made is not None:
        made += [optimizer, net]
    gated = lambda data, gate: table(data[0], gate)  # noqa: E731
    return stepping(net, lambda data: table(data[0]), [optimizer, prox, gates], engine, gates, gated, loss_of_fit)


def mlp_alone(device: str) -> Step:
    net = Dense().to(device)
    ready: dict[int, Tensor] = {}
    optimizer = Adagrad(net.parameters(), lr=0.01)

    def tokens(data: Data) -> Tensor:
        rows = len(data[0])
        if rows not in ready:
            ready[rows] = torch.randn(rows, len(CRITEO), D, device=device).requires_grad_()
        ready[rows].grad = None
        return ready[rows]

    return stepping(net, tokens, [optimizer])


def fbgemm(device: str) -> Step:
    """FBGEMM's table-batched embeddings, which take their own row-wise Adagrad step in backward."""
    names = ("embedding_configs", "table_batched_embeddings_ops_common", "table_batched_embeddings_ops_training")
    kinds, common, training = (importlib.import_module(f"fbgemm_gpu.split_{name}") for name in names)
    place = common.EmbeddingLocation.HOST if device == "cpu" else common.EmbeddingLocation.DEVICE
    kind = training.ComputeDevice.CPU if device == "cpu" else training.ComputeDevice.CUDA
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(size, D, place, kind) for size in sizes(device)],
        optimizer=kinds.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )
    net = Dense().to(device)
    optimizer = Adagrad(net.parameters(), lr=0.01)
    offsets: dict[int, Tensor] = {}

    def tokens(data: Data) -> Tensor:
        rows = len(data[0])
        if rows not in offsets:
            offsets[rows] = torch.arange(rows * len(CRITEO) + 1, device=device)
        out: Tensor = tables(data[0].T.long().flatten(), offsets[rows])  # (B, 26 · D)
        return out

    return stepping(net, tokens, [optimizer])


def fuxictr(device: str) -> Step:
    """FuxiCTR's embedding layer: a table a field with dense gradients, and Adam over all of it, as it trains."""
    features, layers = (importlib.import_module(f"fuxictr.{name}") for name in ("features", "pytorch.layers"))
    known = features.FeatureMap("bench", ".")
    for number, size in enumerate(sizes(device)):
        known.features[f"c{number}"] = {"source": "", "type": "categorical", "vocab_size": size}
    known.num_fields = len(CRITEO)
    tables, net = layers.FeatureEmbedding(known, D).to(device), Dense().to(device)
    optimizer = torch.optim.Adam([*tables.parameters(), *net.parameters()], lr=0.001)

    def tokens(data: Data) -> Tensor:
        columns = data[0].long()
        out: Tensor = tables({f"c{number}": columns[:, number] for number in range(len(CRITEO))})
        return out

    return stepping(net, tokens, [optimizer])


def graphed(step: Step, used: list[Any], device: str) -> Step:
    """Return a step that is captured once a batch size and replayed, batches copied to where it reads them.

    ``used`` has the optimizers and the net, whose layers are fused as in ``lpfs.fit``.
    """
    fused = partial(fused_layers, nn.ModuleList(each for each in used if isinstance(each, nn.Module)))
    for each in used:
        if isinstance(each, torch.optim.Optimizer):
            move_rates(each, torch.device(device))
    held: dict[int, tuple[Data, torch.cuda.CUDAGraph]] = {}
    stream = torch.cuda.Stream()

    def replay(data: Data) -> None:
        rows = len(data[0])
        if rows not in held:
            mine = (data[0].clone(), data[1].clone(), data[2].clone())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), fused():
                for _ in range(3):
                    step(mine)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream), fused():
                step(mine)
            held[rows] = mine, graph
        mine, graph = held[rows]
        for to, of in zip(mine, data, strict=True):
            to.copy_(of)
        graph.replay()

    return replay


def with_tf32(step: Step) -> Step:
    def fast(data: Data) -> None:
        torch.set_float32_matmul_precision("high")
        step(data)
        torch.set_float32_matmul_precision("highest")

    return fast


def crossed(device: str) -> tuple[Step, list[Any]]:
    """DLRMCross with a gate on each of its 378 parts."""
    fields = [lpfs.Field(f"c{n}", cardinality=size) for n, size in enumerate(sizes(device))]
    numbers = [lpfs.Field(f"n{n}", kind="numeric") for n in range(DENSE)]
    model = lpfs.make_model("dlrm_cross", lpfs.Schema((*fields, *numbers)), dim=D).to(device)
    gates = lpfs.attach(model, steps=20_000)
    prox = gates.optimizer(keep=189)
    optimizer = Adagrad(gates.model_parameters(), lr=0.01)

    def step(data: Data) -> None:
        logits = model(lpfs.Batch(data[0], data[1], data[2][:, None]))
        binary_cross_entropy_with_logits(logits, data[2]).backward()
        optimizer.step()
        prox.step()
        gates.step()
        optimizer.zero_grad()
        prox.zero_grad()

    return step, [optimizer, model]


def on_gpu() -> dict[str, Step]:
    """Return what only a GPU has: whole steps as graphs, and crosses at its speed."""
    made = {}
    for name, maker in {"lpfs, graph": ours, "lpfs, gated, graph": ours_gated}.items():
        for fast in (False, True):
            moved: list[Any] = []
            step = graphed(maker("cuda", None, moved), moved, "cuda")
            made[name + (", TF32" if fast else "")] = with_tf32(step) if fast else step
    for fast in (False, True):
        plain, moved = crossed("cuda")
        step = graphed(plain, moved, "cuda")
        made["378 crosses, gated, graph" + (", TF32" if fast else "")] = with_tf32(step) if fast else step
    return made


def contenders(device: str) -> dict[str, Step]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, so that torch does not warn
    fast = "numba" if device == "cpu" else None
    made = {
        "official DLRM": official(device),
        "fused nn.Embedding": fused(device),
        "lpfs, plain torch": ours(device, "torch"),
        "lpfs": ours(device, fast),
        "lpfs, gated": ours_gated(device, fast),
        "MLP alone": mlp_alone(device),
    }
    if device == "cuda":
        made |= on_gpu()
    if importlib.util.find_spec("fbgemm_gpu") is None:
        print("FBGEMM is not installed here: left out (pip install --no-deps fbgemm-gpu-cpu==1.8.0)")
    else:
        made["FBGEMM"] = fbgemm(device)
    if importlib.util.find_spec("fuxictr") is None:
        print("FuxiCTR is not installed here: left out (pip install fuxictr)")
    else:
        made["FuxiCTR, Adam"] = fuxictr(device)
    return made


# -------------------------------------------------------------------------------------------- measurement

RATIOS = {  # name -> time of the first / time of the second
    "gated against official DLRM": ("official DLRM", "lpfs, gated"),
    "ungated against official DLRM": ("official DLRM", "lpfs"),
    "ungated against MLP alone": ("MLP alone", "lpfs"),
    "gate overhead": ("lpfs, gated", "lpfs"),
}
GPU_RATIOS = {"gate overhead in a graph": ("lpfs, gated, graph", "lpfs, graph")}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(step: Step, data: list[Data], device: str, clock: Callable[[], float]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = clock()
    for each in data:
        step(each)
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - started) / len(data)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "lower_quartile": round(low, 4), "upper_quartile": round(high, 4)}


def measure(made: dict[str, Step], rows: int, device: str, repeats: int, inner: int, clock: str) -> dict[str, Any]:
    data = batches(rows, 4 * inner, device)
    for step in made.values():
        seconds(step, data, device, CLOCKS[clock])
    times: dict[str, list[float]] = {name: [] for name in made}
    shuffle = random.Random(0)
    for repeat in range(repeats):
        part = [data[(repeat * inner + n) % len(data)] for n in range(inner)]
        for name in shuffle.sample(list(made), len(made)):
            times[name].append(seconds(made[name], part, device, CLOCKS[clock]))
    unit = times["fused nn.Embedding"]
    wanted = RATIOS | (GPU_RATIOS if device == "cuda" else {})
    ratios = {name: [a / b for a, b in zip(times[of], times[to], strict=True)] for name, (of, to) in wanted.items()}
    return {
        "batch": rows,
        "rows_per_second": {name: round(rows / statistics.median(each)) for name, each in times.items()},
        "ms": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "fastest_ms": {name: round(1e3 * min(each), 3) for name, each in times.items()},
        "speed": {name: spread([a / b for a, b in zip(unit, each, strict=True)]) for name, each in times.items()},
        "ratios": {name: spread(each) for name, each in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training step costs.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--inner", type=int, default=5, help="steps a measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--batch", type=int, nargs="*", help="batch sizes")
    parser.add_argument("--out", default="benchmarks/results/train_step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    made = contenders(arguments.device)
    wanted = arguments.batch or ((512, 2048, 4096) if arguments.device == "cpu" else (512, 4096, 65536))
    rows = []
    for size in wanted:
        row = measure(made, size, arguments.device, arguments.repeats, arguments.inner, arguments.clock)
        rows.append(row)
        print(f"B={size}")
        for name, each in row["speed"].items():
            fastest = row["fastest_ms"][name]
            print(f"  {name:<32} {row['ms'][name]:>8.2f} ms (fastest {fastest:.2f}), speed {each['median']:.2f}")
        for name, each in row["ratios"].items():
            low, high = each["lower_quartile"], each["upper_quartile"]
            print(f"  {name:<32} {each['median']:.3f} ({low:.3f} to {high:.3f})")
    result = {
        "command": f"python {shlex.join(sys.argv)}",
        "load": os.getloadavg()[0],
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "threads": arguments.threads,
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "table_rows": sum(sizes(arguments.device)),
        "unit": "speed is relative to one fused nn.Embedding(sparse=True) with torch.optim.Adagrad",
        "rows": rows,
    }
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
