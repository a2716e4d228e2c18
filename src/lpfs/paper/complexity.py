"""complexity: bytes of the gates, the step with and without them, and the search against pretraining."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lpfs.compare.run_dir import read
from lpfs.data.batch import Batch
from lpfs.gates.attach import attach
from lpfs.gates.functions import gate_function
from lpfs.gates.module import Gates
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials
from lpfs.pipeline import stages
from lpfs.plots import KEPT, SECOND
from lpfs.train.evaluate import predict_batch
from lpfs.train.step import bce_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = Scale(1_000_000, "dlrm", batch_size=128, pretrain=800, search=200, seeds=2)
FULL = Scale(model="dlrm", batch_size=512, seeds=2)
SIZES = (27, 378, 392, 1000)
PAIRS = 60  # steps of each kind that are timed in turns …
WARM = 10  # … after so many to warm up


def run(job: Job) -> Found:
    """Count bytes, time steps, and time a whole search; the last seed counts, the first warms up."""
    sizes = {count: bytes_of(count) for count in SIZES}
    trials = Trials(job)
    for seed in job.seeds:
        found = trials.search(seed, keep=trials.size(0.5))
    one = (read(trials.runs.store.seed(seed) / "cost.json") or {}).get("seconds")
    two, recipe = found["seconds"], trials.base.steps
    step = timed(trials, seed)
    ours: dict[str, Any] = {
        "bytes": {str(count): each for count, each in sizes.items()},
        "step": step,
        "T1": {"seconds": one, "steps": recipe.pretrain},
        "T2": {"seconds": two, "steps": recipe.search},
        "T2/T1": two / one if one else None,
    }
    x, moving = (sizes[392][key] for key in ("x", "moving"))
    part = "-" if not one else f"{two / one:.2f} ({recipe.search:,} steps to {recipe.pretrain:,})"
    rows = [
        ("x of 392 fields", "4N = 1,568 bytes", f"{x:,} bytes"),
        ("g, gradient, momentum and x", "about 16N = 6,272 bytes", f"{moving:,} bytes"),
        ("all buffers of the gates", "-", f"{sizes[392]['all']:,} bytes"),
        ("step with gates to one without", "negligible", f"{step['ratio']:.3f} (median of {PAIRS} pairs)"),
        ("T2 to T1", "about 1/4", part),
    ]

    def figure(figure: Figure) -> None:
        axes = figure.add_subplot(1, 2, 1)
        for key, colour in (("moving", KEPT), ("all", SECOND)):
            axes.plot(SIZES, [sizes[count][key] for count in SIZES], "o-", color=colour, label=TITLES[key])
        axes.set_xlabel("fields")
        axes.set_ylabel("bytes")
        axes.legend(frameon=False, fontsize=8)
        axes = figure.add_subplot(1, 2, 2)
        axes.bar(["without", "with gates"], [step["plain"] * 1e3, step["gated"] * 1e3], color=KEPT)
        axes.set_ylabel("milliseconds a step")

    return Found(ours, {"bytes_of_x": "4N", "bytes": "4·4N", "T2/T1": 0.25}, rows, figure, (8.0, 3.2))


TITLES = {"moving": "g, x, gradient, momentum", "all": "with all buffers"}


def bytes_of(count: int) -> dict[str, int]:
    """Return the bytes of so many gates: x alone, what moves with it, and everything."""
    gates = Gates([f"f{number}" for number in range(count)], gate_function("lpfs++"), 100)
    prox = gates.optimizer(penalty=0.1)
    values = gates()
    values.sum().backward()
    prox.step()
    assert gates.x.grad is not None
    moving = [gates.x, gates.x.grad, values, *(each for each in prox.state[gates.x].values())]
    every = [*gates.parameters(), *gates.buffers(), gates.x.grad, values, *prox.state[gates.x].values()]
    return {
        "x": size(gates.x),
        "moving": sum(map(size, moving)),
        "all": sum(map(size, every)),
    }


def size(value: Any) -> int:
    """Return the bytes of a tensor; nothing for what is none."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def timed(trials: Trials, seed: int) -> dict[str, float]:
    """Return the seconds of a step without and with gates, in turns on the same batches, and their ratio."""
    work = trials.base
    steps: list[Callable[[Batch], None]] = []
    for gated in (False, True):
        model = stages.new_model(work, seed)
        optimizer, others = work.optimizer(model), []
        if gated:
            gates = attach(model, steps=10 * PAIRS)
            others = [gates.optimizer(penalty=0.01), gates]

        def step(batch: Batch, model: Any = model, optimizer: Any = optimizer, others: Any = others) -> None:
            optimizer.zero_grad()
            logits, labels = predict_batch(model, batch)
            bce_loss(logits, labels).backward()
            for each in (optimizer, *others):
                each.step()

        steps.append(step)
    stream = work.stream(work.splits.early, work.schema.names, train=True, seed=seed)
    batches = list(islice(iter(stream), WARM + PAIRS))
    pairs = []
    for number in range(WARM + PAIRS):
        batch, pair = batches[number % len(batches)], []
        for take in steps:
            begin = time.perf_counter()
            take(batch)
            if work.device.type == "cuda":
                torch.cuda.synchronize()
            pair.append(time.perf_counter() - begin)
        if number >= WARM:
            pairs.append(pair)
    return {
        "plain": median(each[0] for each in pairs),
        "gated": median(each[1] for each in pairs),
        "ratio": median(each[1] / each[0] for each in pairs),
    }
