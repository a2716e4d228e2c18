"""Do several processes find what one finds? The same search, on the same global batches, by 1, 2 and 4.

    python benchmarks/ranks.py [--ranks 2 4] [--out benchmarks/results/ranks.json]

A simulated log with known true fields is searched for as many fields as are true: once by one process, once by
one process whose batches have their rows in reverse, and by several. Reversed rows give the same sums, rounded
otherwise: how far that search is from the first is how far rounding alone takes it. Reported are the largest
differences of the gates x at some steps, whether the gates of all ranks are equal to the bit after every step,
and what is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.embeddings.optim import Adagrad
from lpfs.gates.module import ATTRIBUTE
from lpfs.methods.sampling import shuffle_fields
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.distributed import is_distributed_launch
from lpfs.train.distributed.group import current_group, joined

ROWS, BATCH, STEPS, KEEP = 60_000, 256, 600, 15
SHOWN = (1, 10, 50, 100, 200, 400, 600)


class Reversed:
    """Batches with their rows in reverse."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.stream:
            order = torch.arange(len(batch)).flip(0)
            turned = shuffle_fields(batch, self.stream.schema, self.stream.schema.names, order)
            yield replace(turned, labels=batch.labels[order])


def search(log: Dataset, how: str) -> dict[str, Any]:
    """Pretrain and search; return the gates after every step and what is kept."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model("mlp", log.schema, dim=8, hidden=(32,))
    optimizer = Adagrad(model.parameters(), lr=0.02)
    quiet = Training(quiet=True)
    early, late = log.split(0.6, 0.4)
    lpfs.fit(model, early.stream(BATCH, shuffle=True), optimizer, steps=300, config=quiet)
    course: list[torch.Tensor] = []

    def look(module: torch.nn.Module, args: Any) -> None:
        gates = getattr(model, ATTRIBUTE, None)
        if gates is not None and module.training:
            course.append(gates.x.detach().clone())

    model.register_forward_pre_hook(look)
    stream: Any = late.stream(BATCH, shuffle=True, seed=1)
    given = Reversed(stream) if how == "reversed" else stream
    found = lpfs.search(model, given, keep=KEEP, optimizer=optimizer, steps=STEPS, config=quiet, centre=False)
    course.append(getattr(model, ATTRIBUTE).x.detach().clone())
    gates = sorted(found.gates.values(), key=abs)
    return {"course": torch.stack(course), "kept": list(found.kept), "smallest_kept": abs(gates[-KEEP])}


def work(folder: Path, how: str) -> None:
    """Be one process of a search."""
    log = Dataset(folder / "log")
    if not is_distributed_launch():
        torch.save(search(log, how), folder / f"{how}.pt")
        return
    with joined():
        found = search(log, how)
        courses = current_group().concat(found["course"][None].flatten(1), "comparing gates")
        found["equal"] = bool((courses == courses[:1]).all())
        if current_group().is_leader:
            torch.save(found, folder / f"{how}.pt")


def run(folder: Path, how: str, ranks: int) -> dict[str, Any]:
    """Do a search in some processes and return what came out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--work", str(folder), "--how", how]
    several = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = [each.wait() for each in several]
    if any(codes):
        sys.exit(f"{how}: a process failed")
    found: dict[str, Any] = torch.load(folder / f"{how}.pt", weights_only=True)
    return found


def main() -> None:
    """Search in every way and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ranks.json"))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.work, asked.how)
        return
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        lpfs.simulate(folder / "log", "small", rows=ROWS)
        one = run(folder, "one", 1)
        others = {"reversed": run(folder, "reversed", 1)}
        others |= {f"{ranks} ranks": run(folder, f"ranks{ranks}", ranks) for ranks in asked.ranks}
    trials = []
    for name, each in others.items():
        far = (each["course"] - one["course"]).abs().amax(1)
        trials.append(
            {
                "name": name,
                "max_difference_of_x_after": {step: float(far[step]) for step in SHOWN},
                "largest": float(far.max()),
                "ranks_equal_to_the_bit": each.get("equal"),
                "kept_as_one": each["kept"] == one["kept"],
            }
        )
    found = {
        "command": f"python benchmarks/ranks.py --ranks {' '.join(map(str, asked.ranks))}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": ROWS,
        "batch": BATCH,
        "steps": STEPS,
        "keep": KEEP,
        "kept": one["kept"],
        "smallest_kept_gate": one["smallest_kept"],
        "trials": trials,
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
