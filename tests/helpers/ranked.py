"""Jobs that tests run in several processes; every rank writes its results to a file.

python tests/helpers/ranked.py FOLDER JOB …      with RANK, WORLD_SIZE and the rest set as by torchrun
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lpfs.data.dataset import Dataset
from lpfs.embeddings.row_grad import RowGrad, RowParameter
from lpfs.errors import InputError, StateError
from lpfs.gates.attach import attach
from lpfs.methods.sampling import shuffle_fields
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.callbacks import Callback
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group, joined, leader_first
from lpfs.train.distributed.reduce import check_parameters_equal, rank_batches, reduce_grads
from lpfs.train.evaluate import evaluate, predict_batch, predictions
from lpfs.train.fit import fit
from lpfs.train.step import bce_loss, make_optimizer
from tests.helpers.known_truth import SMALL

ROOT = Path(__file__).parents[2]
BATCH = 51  # split over two ranks: 26 rows and 25
ROWS, STEPS = 1000, 60


class ReversedRows:
    """The batches of a stream with reversed rows: the same sums with other rounding."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self):
        for batch in self.stream:
            order = torch.arange(len(batch)).flip(0)
            reordered = shuffle_fields(batch, self.stream.schema, self.stream.schema.names, order)
            yield replace(reordered, labels=batch.labels[order])


def make(log: Dataset, name: str = "mlp", optimizer: str = "adagrad"):
    torch.manual_seed(3)
    model = make_model(name, log.schema, **SMALL)
    return model, make_optimizer(Training(optimizer=optimizer, lr=0.05), model.parameters())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all tensors of a model and its optimizer."""
    states = optimizer.state_dict()["state"].items()
    moments = {f"{number} {key}": tensor for number, state in states for key, tensor in state.items()}
    return {**{name: tensor.clone() for name, tensor in model.state_dict().items()}, **moments}


class RandomNumbers(Callback):
    """Draws a random number in every step, as dropout does, and stores it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def within_step(self, state: Any) -> None:
        self.seen.append(float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, values: Any) -> None:
        self.seen = list(values["seen"])


def trained(log: Dataset, folder: Path | None = None, *, steps: int = 30, optimizer: str = "adagrad", **options: Any):
    """Train for some steps, with checkpoints; return the results."""
    model, row_optimizer = make(log, optimizer=optimizer)
    part = log.part(0, ROWS)
    random = RandomNumbers()
    done = fit(
        model,
        part.stream(BATCH, shuffle=True, seed=1),
        row_optimizer,
        valid=log.part(ROWS, 1200).stream(64),
        folder=folder,
        callbacks=[random],
        steps=steps,
        evaluate_every=10,
        checkpoint_every=8,
        clip=1.0,
        quiet=True,
        **options,
    )
    assert done.metrics is not None
    return {
        "state": state_of(model, row_optimizer),
        "auc": done.metrics.auc,
        "logloss": done.metrics.logloss,
        "rows": done.rows,
        "resumed": done.resumed,
        "drawn": random.seen,
        "after": float(torch.rand(())),
    }


def searched(log: Dataset, *, reverse: bool = False, holdout: bool = False, method: str = "lpfs++", **target: Any):
    """Pretrain, search; return the gates of every step and the kept fields."""
    model, optimizer = make(log)
    part = log.part(0, ROWS)
    fit(model, part.stream(BATCH, shuffle=True), optimizer, steps=60, quiet=True)
    course: list[torch.Tensor] = []

    def record_gates(module: nn.Module, args: Any) -> None:
        gates = getattr(model, "lpfs_gates", None)
        if gates is not None and module.training:
            course.append(gates.x.detach().clone())

    model.register_forward_pre_hook(record_gates)
    stream: Any = part.stream(BATCH, shuffle=True, seed=2)
    options = {} if method not in ("lpfs", "lpfs++") else {"centre": False}
    selection = search(
        model,
        ReversedRows(stream) if reverse else stream,
        method,
        optimizer=optimizer,
        steps=STEPS,
        holdout=log.part(ROWS, 1200).stream(40, shuffle=True, seed=5) if holdout else None,
        valid=log.part(ROWS, 1200).stream(64),
        config=Training(quiet=True),
        **options,
        **target,
    )
    gates = getattr(model, "lpfs_gates", None)
    x = None if gates is None else gates.x.detach().clone()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"course": course, "x": x, "kept": list(selection.kept), "state": state, "history": len(selection.history)}


def slope(log: Dataset) -> torch.Tensor:
    """Return the gradient of the gates (N,) on some rows, summed over the ranks."""
    model, _ = make(log)
    gates = attach(model, steps=STEPS)
    with torch.no_grad():
        gates.x.copy_(torch.linspace(0.2, 1.4, len(gates.names)))
    for batch in rank_batches(log.stream(log.rows)):
        loss = bce_loss(*predict_batch(model, batch))
        loss.backward()
        if current_group().is_distributed:
            reduce_grads(current_group(), list(model.parameters()), len(batch), loss)
    assert gates.x.grad is not None
    return gates.x.grad.clone()


# ------------------------------------------------------------------------------------------------- jobs


def sums(folder: Path, log: Dataset) -> dict[str, Any]:
    """Reduce gradients of small integers: every sum is exact in any order."""
    rank = current_group().rank
    results: dict[str, Any] = {}
    for case, (first, second) in {"even": (2, 2), "uneven": (3, 1), "none": (4, 0)}.items():
        rows = first if rank == 0 else second
        rng = np.random.default_rng([7, rank])
        dense, unused, once = (nn.Parameter(torch.zeros(3, 2)) for _ in range(3))
        weight, narrow = RowParameter(torch.zeros(9, 2)), RowParameter(torch.zeros(5, 1))
        sparse = nn.Embedding(6, 2, sparse=True).weight
        if rows:
            dense.grad = torch.tensor(rng.integers(-8, 8, (3, 2)) * 4.0, dtype=torch.float32)
            row_ids = torch.tensor(rng.permutation(9)[:4])
            weight.row_grads.append(RowGrad(row_ids[:3], torch.tensor(rng.integers(-8, 8, (3, 2)) * 4.0).float()))
            if rank == 0:
                weight.row_grads.append(RowGrad(row_ids[2:], torch.tensor(rng.integers(-8, 8, (2, 2)) * 4.0).float()))
                once.grad = torch.full((3, 2), 4.0)
                narrow.row_grads.append(RowGrad(torch.tensor([4]), torch.tensor([[8.0]])))
            ids = torch.tensor(rng.integers(0, 6, (1, 3)))
            sparse.grad = torch.sparse_coo_tensor(ids, torch.ones(3, 2) * 4, (6, 2))
        before = {"dense": dense.grad, "once": once.grad}
        before = {name: torch.zeros(3, 2) if grad is None else grad.clone() for name, grad in before.items()}
        before["sparse"] = torch.zeros(6, 2) if sparse.grad is None else sparse.grad.to_dense()
        before["weight"] = spread(weight)
        parameters = [dense, weight, unused, once, narrow, sparse]
        total, loss = reduce_grads(current_group(), parameters, rows, torch.tensor(float(rank + 1) if rows else 0.0))
        assert unused.grad is None
        results[case] = {
            "rows": rows,
            "before": before,
            "total": total,
            "loss": float(loss),
            "after": {
                "dense": dense.grad,
                "once": once.grad,
                "sparse": None if sparse.grad is None else sparse.grad.to_dense(),
                "weight": spread(weight),
                "narrow": spread(narrow),
            },
        }
    return results


def spread(weight: RowParameter) -> torch.Tensor:
    """Return a gradient by rows in the shape of its weight."""
    out = torch.zeros_like(weight)
    for piece in weight.row_grads:
        out.index_add_(0, piece.rows, piece.values)
    return out.detach()


def words(folder: Path, log: Dataset) -> dict[str, Any]:
    """Run everything that ranks exchange besides gradients."""
    ranks = current_group()
    seen = {"agreed": ranks.run_on_leader(lambda: {"by": [current_group().world, (1, float("inf"))]}, "agreeing")}

    def wrong() -> None:
        raise InputError("no such field")

    def odd() -> None:
        raise ZeroDivisionError("odd")

    for name, function in {"input": wrong, "odd": odd}.items():
        try:
            ranks.run_on_leader(function, "failing")
        except Exception as error:
            seen[name] = [type(error).__name__, str(error)]
    with leader_first("writing") as second:
        seen["second"] = second
        seen["there"] = (folder / "turn").exists()
        (folder / "turn").touch()
    parts = ranks.concat(torch.full((ranks.rank, 2), 5.0), "joining")
    seen["joined"], seen["collected"] = parts, ranks.gather_values({"rank": ranks.rank}, "collecting")
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, float(ranks.rank))
    try:
        check_parameters_equal(ranks, model)
    except StateError as error:
        seen["difference"] = str(error)
    return seen


def judged(folder: Path, log: Dataset) -> dict[str, Any]:
    """Evaluate a model by days, with weights, and on fewer batches than ranks."""
    model, _ = make(log)
    whole = evaluate(model, log.stream(64))
    weighed = evaluate(model, log.stream(64), weights=lambda batch: 1.0 + batch.labels[:, 0])
    few = evaluate(model, log.part(0, 40).stream(64))
    return {
        "whole": whole.to_json(),
        "weighed": weighed.to_json(),
        "few": few.to_json(),
        "logits": torch.tensor(predictions(model, log.stream(64)).logits),
    }


def fitted(folder: Path, log: Dataset) -> dict[str, Any]:
    """Train with each kind of optimizer state, and write checkpoints."""
    first = trained(log, folder / "fit")
    half = trained(log, folder / "half", steps=16)
    return {"adagrad": first, "adam": trained(log, steps=12, optimizer="adam"), "half": half}


def resumed(folder: Path, log: Dataset) -> dict[str, Any]:
    """Resume from a checkpoint of one process, and from one of these ranks."""
    return {
        "plain": trained(log, folder / "plain-half", resume=True),
        "half": trained(log, folder / "half", resume=True),
    }


def gates(folder: Path, log: Dataset) -> dict[str, Any]:
    """Search with several targets and methods."""
    return {
        "slope": slope(log.part(0, BATCH)),
        "penalty": searched(log, penalty=0.02),
        "keep": searched(log, keep=3),
        "holdout": searched(log, keep=3, holdout=True),
        "loss": searched(log, max_auc_loss=0.02),
        "chi2": searched(log, keep=3, method="chi2"),
        "stg": searched(log, keep=3, method="stg"),
    }


JOBS = {job.__name__: job for job in (sums, words, judged, fitted, resumed, gates)}


# ---------------------------------------------------------------------------------------------- processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], world: int, limit: float = 30.0, **more: str) -> list[subprocess.Popen[str]]:
    """Start a command in several processes, as torchrun does."""
    port = str(free_port())
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "LPFS_RANK_LIMIT": str(limit),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        **more,
    }
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], within: float = 240.0) -> list[tuple[int, str, str]]:
    """Wait for processes; return exit code, output and error output of each."""
    deadline = time.monotonic() + within
    results = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            out, err = process.communicate()
        results.append((process.returncode, out, err))
    return results


def together(folder: Path, *jobs: str, world: int = 2) -> list[dict[str, Any]]:
    """Run jobs in several processes; return the results of each rank."""
    results = ended(start([sys.executable, __file__, str(folder), *jobs], world))
    assert all(code == 0 for code, _, _ in results), "\n".join(err for _, _, err in results)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_dir = Path(sys.argv[1])
    with joined() as group:
        job_results = {name: JOBS[name](run_dir, Dataset(run_dir / "log")) for name in sys.argv[2:]}
    torch.save(job_results, run_dir / f"rank-{group.rank}.pt")
