"""What more processes bring: samples a second of 1 and of 2, what limits it, what the gates cost, bytes moved.

    python benchmarks/scale.py [--repeats 9] [--out benchmarks/results/scale.json]

A DLRM-like net (26 tables of 40,000 rows, dim 16, concat, MLP 256-128-1, Adagrad, gates on every field and their
proximal step) takes steps on batches that are in memory. Two processes are started once; in turns, on the same
batches,

    one              rank 0 takes the steps by itself; rank 1 waits
    two              both share every batch and add their gradients up
    two, silent      both take their part and do not speak: what the cores and the memory alone allow

each with one thread a process, so that whatever else the machine does falls on all of them alike. Medians and
quartiles over the repeats. On a machine that others use too, samples a second say little: two processes get
twice the share of a crowded core. So the processor's time of each process is told as well, by phases of the
step, and ``processor_time_one_against_two``: how much faster two would be on cores of their own if nothing
waited. The time of every kind of message is that of rank 0, waiting for the other rank included. ``gates``
compares adding up the dense gradients with and without the numbers of the gates, and the gates' own message if
they had one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lpfs
from lpfs.data.batch import Batch
from lpfs.data.reader import rank_range
from lpfs.embeddings.optim import Adagrad
from lpfs.models import make_model
from lpfs.schema import Field, Schema
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.distributed.group import RankGroup, current_group, joined, single_process
from lpfs.train.distributed.reduce import COUNTS, DENSE, ROWS
from lpfs.train.step import Stepper

TABLES, VALUES, DIM, HIDDEN = 26, 40_000, 16, (256, 128)
SIZES, STEPS = (512, 2048, 8192), {512: 20, 2048: 8, 8192: 3}
PHASES = ("forward", "backward and messages", "update of tables and weights", "gates")


class Move(Callback):
    """The gates' part of a step."""

    def __init__(self, gates: lpfs.Gates) -> None:
        self.gates, self.prox = gates, gates.optimizer(penalty=1e-4)

    def within_step(self, state: State) -> None:
        """Move the gates."""
        self.prox.step()
        self.gates.step()


class Phases(Callback):
    """The processor's time of this process in each phase of a step."""

    def __init__(self) -> None:
        self.spent, self.last = dict.fromkeys(PHASES, 0.0), 0.0

    def mark(self, phase: str | None = None) -> None:
        """End a phase."""
        now = time.process_time()
        if phase is not None:
            self.spent[phase] += now - self.last
        self.last = now

    def before_backward(self, state: State) -> None:
        """End the forward."""
        self.mark(PHASES[0])

    def before_step(self, state: State) -> None:
        """End the backward, and the messages."""
        self.mark(PHASES[1])

    def within_step(self, state: State) -> None:
        """End the optimizer's step."""
        self.mark(PHASES[2])

    def after_step(self, state: State) -> None:
        """End the gates' step."""
        self.mark(PHASES[3])


def make(ranks: RankGroup) -> tuple[Stepper, Phases]:
    """Return what takes the steps of a model of its own, and what looks at the clock."""
    schema = Schema(tuple(Field(f"c{n}", cardinality=VALUES) for n in range(TABLES)), label="click")
    torch.manual_seed(0)
    model: nn.Module = make_model("mlp", schema, dim=DIM, hidden=HIDDEN)
    gates = lpfs.attach(model, steps=1_000_000)
    state = State(model, Adagrad(gates.model_parameters(), lr=0.01), Training(quiet=True))
    phases = Phases()
    stepper = Stepper(state, [phases, Move(gates)], lambda step: 1.0, None)
    stepper.ranks = ranks
    return stepper, phases


def batches(size: int, count: int, rank: int, world: int) -> list[Batch]:
    """Return a rank's part of batches of Zipf ids, the same batches on every rank."""
    draw = np.random.default_rng(size)
    found = []
    for _ in range(count):
        ids = torch.from_numpy((draw.zipf(1.2, (size, TABLES)) - 1) % VALUES).int()
        labels = torch.from_numpy((draw.random((size, 1)) < 0.2).astype(np.float32))
        rows = slice(*rank_range(0, size, rank, world))
        found.append(Batch(ids[rows], torch.empty(len(ids[rows]), 0), labels[rows]))
    return found


def timed(work: Callable[[], Any], ranks: RankGroup) -> float:
    """Return the seconds that something takes, begun by both ranks at once, until both are done."""
    ranks.gather_values(0, "meeting")
    begin = time.perf_counter()
    work()
    ranks.gather_values(0, "meeting")
    return time.perf_counter() - begin


def measure(size: int, repeats: int) -> dict[str, Any]:
    """Measure one batch size."""
    ranks, steps = current_group(), STEPS[size]
    whole, mine = (batches(size, steps, *part) for part in ((0, 1), (ranks.rank, ranks.world)))
    with single_process():
        apart, silent = make(current_group()), make(current_group())
    shared = make(ranks)

    def go(made: tuple[Stepper, Phases], given: list[Batch]) -> None:
        stepper, phases = made
        phases.mark()
        for each in given:
            stepper.train_batch(each, lambda: "a step")

    makers = {"one": (apart, whole if ranks.is_leader else []), "two": (shared, mine), "two, silent": (silent, mine)}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(repeats + 1):
        if turn == 1:  # the first turn warms up and compiles
            ranks.traffic.clear()
            for (_, phases), _ in makers.values():
                phases.spent = dict.fromkeys(PHASES, 0.0)
        for name, (made, given) in makers.items():
            took = timed(partial(go, made, given), ranks)
            if turn:
                seconds[name].append(took)
    done = repeats * steps
    spent = {
        name: ranks.gather_values({phase: 1000 * each / done for phase, each in made[1].spent.items()}, "clocks")
        for name, (made, _) in makers.items()
    }
    totals = {name: max(sum(each.values()) for each in several) for name, several in spent.items()}
    said = {name: ranks.traffic[name] for name in (COUNTS, DENSE, ROWS)}
    rates = {name: spread([size * steps / each for each in several]) for name, several in seconds.items()}
    pairs = [a / b for a, b in zip(seconds["one"], seconds["two"], strict=True)]
    ceiling = [a / b for a, b in zip(seconds["one"], seconds["two, silent"], strict=True)]
    return {
        "batch": size,
        "steps": steps,
        "samples_per_second": rates,
        "two_against_one": spread(pairs),
        "two_silent_against_one": spread(ceiling),
        "two_step_ms": 1000 * statistics.median(seconds["two"]) / steps,
        "processor_ms_a_step": {"one": spent["one"][0], "two": spent["two"], "two, silent": spent["two, silent"]},
        "processor_time_one_against_two": totals["one"] / totals["two"],
        "processor_time_one_against_two_silent": totals["one"] / totals["two, silent"],
        "messages": {
            name: {"bytes_a_step": each.bytes / done, "ms_a_step": 1000 * each.seconds / done}
            for name, each in said.items()
        },
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def gates_cost(repeats: int) -> dict[str, Any]:
    """Return what N numbers more cost in the message of the dense gradients, and what one of their own would."""
    ranks = current_group()
    dense = sum(TABLES * DIM * a + a for a in HIDDEN[:1]) + HIDDEN[0] * HIDDEN[1] + 2 * HIDDEN[1] + 1
    lengths = {"dense gradients": dense, "dense gradients and gates": dense + TABLES, "gates alone": TABLES}
    found: dict[str, list[float]] = {name: [] for name in lengths}
    for turn in range(20 * repeats + 5):
        for name, length in lengths.items():
            flat = torch.ones(length)
            begin = time.perf_counter()
            ranks.all_reduce(flat, "gates")
            if turn >= 5:
                found[name].append(1e6 * (time.perf_counter() - begin))
    return {
        "gates": TABLES,
        "bytes_of_gates": 4 * TABLES,
        "bytes_of_dense_gradients": 4 * dense,
        "microseconds": {name: spread(each) for name, each in found.items()},
        "more_with_gates": spread(
            [b - a for a, b in zip(found["dense gradients"], found["dense gradients and gates"], strict=True)]
        ),
    }


def work(out: Path, repeats: int) -> None:
    """Be one of the ranks; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with joined(limit=300) as ranks:
        rows = [measure(size, repeats) for size in SIZES]
        gates = gates_cost(repeats)
    if ranks.is_leader:
        about = {
            "command": f"python benchmarks/scale.py --repeats {repeats}",
            "cores": os.cpu_count(),
            "load_average": {"before": load, "after": os.getloadavg()[0]},
            "torch": torch.__version__,
            "python": platform.python_version(),
            "lpfs": lpfs.__version__,
            "tables": TABLES,
            "rows_a_table": VALUES,
            "dim": DIM,
            "repeats": repeats,
        }
        out.write_text(json.dumps({**about, "rows": rows, "gates": gates}, indent=1) + "\n")


def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, **place, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        yield subprocess.Popen(command, env=env)


def main() -> None:
    """Start two processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale.json"))
    asked = parser.parse_args()
    if "RANK" in os.environ:
        work(asked.out, asked.repeats)
        return
    both = list(started([sys.executable, __file__, "--repeats", str(asked.repeats), "--out", str(asked.out)]))
    codes = [each.wait() for each in both]
    if any(codes):
        sys.exit(max(map(abs, codes)))
    print(asked.out.read_text())


if __name__ == "__main__":
    main()
