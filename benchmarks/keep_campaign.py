"""Does keep=K end with exactly K? Many searches without a network, over kinds of fields, gates, sizes and lengths.

    python benchmarks/keep_campaign.py --out benchmarks/results/keep_campaign.json

The loss is ½ Σ importance·(1 - g)² plus noise. A search is good if exactly K gates are alive, all of them with |g|
between 0.2 and 5, and the rest exactly zero. Failures are listed one by one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.errors import LpfsError

Case = tuple[int, str, int, int, str]


def importance(kind: str, size: int, keep: int) -> tuple[torch.Tensor, float]:
    half = torch.linspace(0.001, 0.1, size // 2 + 1)
    few = torch.zeros(size)
    few[: max(1, keep // 2)] = 0.05
    return {
        "graded": (torch.linspace(0.001, 0.1, size), 0.01),
        "ties": (torch.full((size,), 0.02), 0.01),
        "useless": (torch.zeros(size), 0.0),
        "few": (few, 0.01),
        "duplicates": (half.repeat_interleave(2)[:size], 0.01),
        "strong": (torch.linspace(1, 100, size), 0.01),
        "weak": (torch.linspace(1e-6, 1e-4, size), 1e-5),
    }[kind]


def cases() -> Iterator[Case]:
    for steps in (600, 2_000):
        for gate in lpfs.FUNCTIONS:
            for size in (5, 60, 500):
                if steps > 600 and (size == 500 or gate not in ("lpfs", "lpfs++")):
                    continue
                for keep in sorted({1, 2, size // 8 or 1, size // 2, size - 1}):
                    for kind in ("graded", "ties", "useless", "few", "duplicates", "strong", "weak"):
                        yield steps, gate, size, keep, kind


def search(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    steps, gate, size, keep, kind = case
    weights, noise = importance(kind, size, keep)
    random = torch.Generator().manual_seed(0)
    gates = lpfs.Gates([str(n) for n in range(size)], lpfs.gate_function(gate), steps)
    prox = gates.optimizer(keep=keep)
    said = ""
    try:
        for _ in range(steps):
            values = gates()
            prox.zero_grad()
            jolt = noise * torch.randn(size, generator=random)
            (0.5 * weights * (1 - values) ** 2 + jolt * values).sum().backward()
            prox.step()
            gates.step()
    except LpfsError as error:
        said = f"{type(error).__name__}: {error}"
    alive = gates.values[gates.x != 0].abs()
    low, high = (float(alive.min()), float(alive.max())) if alive.numel() else (0.0, 0.0)
    good = not said and alive.numel() == keep and low >= 0.2 and high <= 5
    names = ("steps", "gate", "fields", "keep", "kind")
    return {**dict(zip(names, case, strict=True)), "alive": alive.numel(), "smallest": low, "largest": high,
            "good": good, "error": said}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Does keep=K end with exactly K?")
    parser.add_argument("--out", default="benchmarks/results/keep_campaign.json")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with Pool(arguments.workers) as pool:
        rows = pool.map(search, list(cases()), chunksize=8)
    bad = [row for row in rows if not row["good"]]
    result = {
        "command": "python benchmarks/keep_campaign.py",
        "lpfs": lpfs.__version__,
        "torch": torch.__version__,
        "searches": len(rows),
        "good": len(rows) - len(bad),
        "smallest_gate_kept": min(row["smallest"] for row in rows),
        "largest_gate_kept": max(row["largest"] for row in rows),
        "bad": bad,
    }
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "bad"})
    for row in bad:
        print(row)


if __name__ == "__main__":
    main()
