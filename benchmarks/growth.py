"""How the cost of a training step grows: with the number of fields, rows in the tables, the batch, and replicas.

    python benchmarks/growth.py [--device cuda] [--repeats 15] [--out benchmarks/results/growth.json]

The model is the MLP that ``select`` uses (dim 16, 256-128-1) with a gate on every field; the step is forward,
backward, Adagrad on everything, and the proximal step. Two of the three are held while the third grows. Ids are
drawn by Zipf's law. The plot is written beside the JSON. Its last panel is the cost of a step of a fleet, in steps of a
single run, from the results of ``fleet.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import lpfs
from lpfs.embeddings.optim import Adagrad

FIELDS, ROWS, BATCHES = (27, 100, 400), (1_000_000, 10_000_000, 50_000_000), (512, 2048, 8192)
FLEETS = {  # results of fleet.py, by device and batch
    "CPU time of one thread, batch 64": "fleet_cpu.json",
    "H200, batch 512": "fleet_before_h200.json",
}
HELD = {"fields": 27, "rows": 10_000_000, "batch": 2048}


def batch_of(fields: int, size: int, rows: int, device: str, seed: int) -> lpfs.Batch:
    source = torch.Generator().manual_seed(seed)
    ids = (size + 1) ** torch.rand(rows, fields, generator=source, dtype=torch.float64) - 1
    labels = torch.rand(rows, 1, generator=source).round()
    return lpfs.Batch(ids.to(torch.int32), torch.empty(rows, 0), labels).to(device)


def measure(fields: int, rows: int, batch: int, device: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    size = rows // fields
    schema = lpfs.Schema(tuple(lpfs.Field(f"f{n}", cardinality=size) for n in range(fields)))
    model = lpfs.make_model("mlp", schema).to(device)
    gates = lpfs.attach(model, steps=20_000)
    prox, optimizer = gates.optimizer(keep=fields // 2), Adagrad(gates.model_parameters(), lr=0.01)
    data = [batch_of(fields, size, batch, device, seed) for seed in range(8)]
    times = []
    for repeat in range(repeats + 3):
        each = data[repeat % len(data)]
        begin = time.perf_counter()
        binary_cross_entropy_with_logits(model(each), each.labels[:, 0]).backward()
        prox.step()
        optimizer.step()
        gates.step()
        optimizer.zero_grad()
        prox.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 3:
            times.append(1e3 * (time.perf_counter() - begin))
    low, middle, high = statistics.quantiles(times, n=4)
    found = {"fields": fields, "rows": rows, "batch": batch}
    print(
        f"{fields:>4} fields, {rows:>11,} rows, batch {batch:>5}: {middle:8.2f} ms ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return {**found, "ms": round(middle, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


def plot(results: dict[str, list[dict[str, Any]]], path: Path, device: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, 4, figsize=(14.5, 3.6), layout="constrained")
    axes = all_axes[:3]
    for axis in axes[1:]:
        axis.sharey(axes[0])
        axis.tick_params(labelleft=False)
    plot_replicas(all_axes[3], path.parent)
    titles = {"fields": "number of fields", "rows": "rows in the tables", "batch": "batch size"}
    for axis, (name, rows) in zip(axes, results.items(), strict=True):
        x = [each[name] for each in rows]
        axis.fill_between(
            x, [each["lower_quartile"] for each in rows], [each["upper_quartile"] for each in rows], alpha=0.25
        )
        axis.plot(x, [each["ms"] for each in rows], marker="o")
        held = ", ".join(f"{titles[key]} {value:,}" for key, value in HELD.items() if key != name)
        axis.set_title(held, fontsize=8, color="0.4")
        axis.set_xlabel(titles[name])
        short = [f"{each // 1_000_000}M" if name == "rows" else f"{each:,}" for each in x]
        axis.set_xticks(x, short)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms a step, median and quartiles")
    figure.suptitle(
        f"A training step of the MLP backbone: with gates on {device}, and of many replicas without gates", fontsize=11
    )
    figure.savefig(path, dpi=130)


def plot_replicas(axis: Any, folder: Path) -> None:
    """Draw the duration of a step of R replicas in steps of a single run; R single runs are the dashed line."""
    counts = [1]
    for label, file in FLEETS.items():
        if not (folder / file).exists():
            continue
        for result in json.loads((folder / file).read_text())["results"]:
            counts = [entry["replicas"] for entry in result["fleet"]]
            costs = [entry["replicas"] / entry["times_faster"]["median"] for entry in result["fleet"]]
            precision = "" if result["precision"] == "float32" else f", {result['precision'].upper()}"
            axis.plot(counts, costs, marker="o", label=label + precision)
    axis.plot(counts, counts, color="0.5", linestyle="--", linewidth=1, label="one after another")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for ticks in (axis.set_xticks, axis.set_yticks):
        ticks(counts, [f"{count}" for count in counts])
    axis.minorticks_off()
    axis.set_ylim(top=4 * counts[-1])
    axis.set_xlabel("replicas of a fleet")
    axis.set_ylabel("steps of a single run")
    axis.set_title("40 fields; median of paired ratios", fontsize=8, color="0.4")
    axis.legend(fontsize=7, frameon=False)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the cost of a training step grows.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.json"))
    parser.add_argument("--plot", action="store_true", help="only draw the plot of results that are there")
    given = parser.parse_args()
    if given.plot:
        values = json.loads(given.out.read_text())
        plot(values["results"], given.out.with_suffix(".png"), values["device"])
        return
    results: dict[str, list[dict[str, Any]]] = {}
    for name, sweep in {"fields": FIELDS, "rows": ROWS, "batch": BATCHES}.items():
        results[name] = [
            measure(**{**HELD, name: value}, device=given.device, repeats=given.repeats) for value in sweep
        ]
    device = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    values = {
        "command": f"python {shlex.join(sys.argv)}",
        "device": device,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "results": results,
    }
    given.out.write_text(json.dumps(values, indent=1) + "\n")
    try:
        plot(results, given.out.with_suffix(".png"), device)
    except ImportError:
        print(f"matplotlib is not here; draw it later: python benchmarks/growth.py --plot --out {given.out}")


if __name__ == "__main__":
    main()
