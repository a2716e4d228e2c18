"""What the tests let several processes do together: each job writes what it saw, one file a rank.

python tests/train/ranked.py FOLDER JOB …      as torchrun would start it: RANK, WORLD_SIZE and the rest are set
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
from known_truth import SMALL
from torch import nn

from lpfs.data.dataset import Dataset
from lpfs.embeddings.row_grad import RowGrad, RowParameter
from lpfs.errors import InputError, StateError
from lpfs.gates.attach import attach
from lpfs.methods.search import search
from lpfs.methods.shuffled import shuffled
from lpfs.models import make_model
from lpfs.train.callbacks import Callback
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group, joined, leader_first
from lpfs.train.distributed.reduce import check_parameters_equal, rank_batches, reduce_grads
from lpfs.train.evaluate import evaluate, predict_batch, predictions
from lpfs.train.fit import fit
from lpfs.train.step import bce_loss, make_optimizer

HERE = Path(__file__).parent
BATCH = 51  # shared by two: 26 rows and 25
ROWS, STEPS = 1000, 60


class InOrder:
    """The batches of a stream with their rows in another order: the same sums, rounded otherwise."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self):
        for batch in self.stream:
            order = torch.arange(len(batch)).flip(0)
            turned = shuffled(batch, self.stream.schema, self.stream.schema.names, order)
            yield replace(turned, labels=batch.labels[order])


def made(log: Dataset, name: str = "mlp", optimizer: str = "adagrad"):
    torch.manual_seed(3)
    model = make_model(name, log.schema, **SMALL)
    return model, make_optimizer(Training(optimizer=optimizer, lr=0.05), model.parameters())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor of a model and its optimizer."""
    states = optimizer.state_dict()["state"].items()
    moved = {f"{number} {key}": each for number, state in states for key, each in state.items()}
    return {**{name: each.clone() for name, each in model.state_dict().items()}, **moved}


class Drawn(Callback):
    """Draws in every step, as dropout does, and keeps what it drew."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def within_step(self, state: Any) -> None:
        self.seen.append(float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, values: Any) -> None:
        self.seen = list(values["seen"])


def trained(log: Dataset, folder: Path | None = None, *, steps: int = 30, optimizer: str = "adagrad", **how: Any):
    """Train for some steps, with checkpoints; return everything that came out."""
    model, moving = made(log, optimizer=optimizer)
    part = log.part(0, ROWS)
    drawn = Drawn()
    done = fit(
        model,
        part.stream(BATCH, shuffle=True, seed=1),
        moving,
        valid=log.part(ROWS, 1200).stream(64),
        folder=folder,
        callbacks=[drawn],
        steps=steps,
        evaluate_every=10,
        checkpoint_every=8,
        clip=1.0,
        quiet=True,
        **how,
    )
    assert done.metrics is not None
    return {
        "state": state_of(model, moving),
        "auc": done.metrics.auc,
        "logloss": done.metrics.logloss,
        "rows": done.rows,
        "resumed": done.resumed,
        "drawn": drawn.seen,
        "after": float(torch.rand(())),
    }


def searched(log: Dataset, *, turned: bool = False, held: bool = False, method: str = "lpfs++", **wish: Any):
    """Pretrain a little, search; return the gates of every step and what is kept."""
    model, optimizer = made(log)
    part = log.part(0, ROWS)
    fit(model, part.stream(BATCH, shuffle=True), optimizer, steps=60, quiet=True)
    course: list[torch.Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        gates = getattr(model, "lpfs_gates", None)
        if gates is not None and module.training:
            course.append(gates.x.detach().clone())

    model.register_forward_pre_hook(look)
    stream: Any = part.stream(BATCH, shuffle=True, seed=2)
    options = {} if method not in ("lpfs", "lpfs++") else {"centre": False}
    found = search(
        model,
        InOrder(stream) if turned else stream,
        method,
        optimizer=optimizer,
        steps=STEPS,
        held=log.part(ROWS, 1200).stream(40, shuffle=True, seed=5) if held else None,
        valid=log.part(ROWS, 1200).stream(64),
        config=Training(quiet=True),
        **options,
        **wish,
    )
    gates = getattr(model, "lpfs_gates", None)
    x = None if gates is None else gates.x.detach().clone()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    return {"course": course, "x": x, "kept": list(found.kept), "state": state, "history": len(found.history)}


def slope(log: Dataset) -> torch.Tensor:
    """The gradient of the gates (N,) on some rows, in the middle of a search; of all ranks, if there are some."""
    model, _ = made(log)
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
    """Gradients of small whole numbers: every sum is exact, whatever its order."""
    rank = current_group().rank
    found: dict[str, Any] = {}
    for case, (mine, others) in {"even": (2, 2), "uneven": (3, 1), "none": (4, 0)}.items():
        rows = mine if rank == 0 else others
        draw = np.random.default_rng([7, rank])
        dense, unused, once = (nn.Parameter(torch.zeros(3, 2)) for _ in range(3))
        weight, narrow = RowParameter(torch.zeros(9, 2)), RowParameter(torch.zeros(5, 1))
        sparse = nn.Embedding(6, 2, sparse=True).weight
        if rows:
            dense.grad = torch.tensor(draw.integers(-8, 8, (3, 2)) * 4.0, dtype=torch.float32)
            some = torch.tensor(draw.permutation(9)[:4])
            weight.row_grads.append(RowGrad(some[:3], torch.tensor(draw.integers(-8, 8, (3, 2)) * 4.0).float()))
            if rank == 0:
                weight.row_grads.append(
                    RowGrad(some[2:], torch.tensor(draw.integers(-8, 8, (2, 2)) * 4.0).float())
                )
                once.grad = torch.full((3, 2), 4.0)
                narrow.row_grads.append(RowGrad(torch.tensor([4]), torch.tensor([[8.0]])))
            ids = torch.tensor(draw.integers(0, 6, (1, 3)))
            sparse.grad = torch.sparse_coo_tensor(ids, torch.ones(3, 2) * 4, (6, 2))
        before = {"dense": dense.grad, "once": once.grad}
        before = {name: torch.zeros(3, 2) if each is None else each.clone() for name, each in before.items()}
        before["sparse"] = torch.zeros(6, 2) if sparse.grad is None else sparse.grad.to_dense()
        before["weight"] = spread(weight)
        parameters = [dense, weight, unused, once, narrow, sparse]
        total, loss = reduce_grads(
            current_group(), parameters, rows, torch.tensor(float(rank + 1) if rows else 0.0)
        )
        assert unused.grad is None
        found[case] = {
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
    return found


def spread(weight: RowParameter) -> torch.Tensor:
    """A gradient by rows in the shape of its weight."""
    out = torch.zeros_like(weight)
    for piece in weight.row_grads:
        out.index_add_(0, piece.rows, piece.values)
    return out.detach()


def words(folder: Path, log: Dataset) -> dict[str, Any]:
    """Everything that is said beside tensors."""
    ranks = current_group()
    seen = {"agreed": ranks.run_on_leader(lambda: {"by": [current_group().world, (1, float("inf"))]}, "agreeing")}

    def wrong() -> None:
        raise InputError("no such field")

    def odd() -> None:
        raise ZeroDivisionError("odd")

    for name, make in {"input": wrong, "odd": odd}.items():
        try:
            ranks.run_on_leader(make, "failing")
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
    """Evaluation of a model, by days, with weights; of one batch, fewer than the ranks."""
    model, _ = made(log)
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
    """Training, with each kind of state; a checkpoint of these ranks, to be read by one process."""
    first = trained(log, folder / "fit")
    half = trained(log, folder / "half", steps=16)
    return {"adagrad": first, "adam": trained(log, steps=12, optimizer="adam"), "half": half}


def resumed(folder: Path, log: Dataset) -> dict[str, Any]:
    """Go on from what one process left, and from what these ranks left before."""
    return {
        "plain": trained(log, folder / "plain-half", resume=True),
        "half": trained(log, folder / "half", resume=True),
    }


def gates(folder: Path, log: Dataset) -> dict[str, Any]:
    """Searches in several ways."""
    return {
        "slope": slope(log.part(0, BATCH)),
        "penalty": searched(log, penalty=0.02),
        "keep": searched(log, keep=3),
        "held": searched(log, keep=3, held=True),
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
    source = str(HERE.parent.parent / "src")
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "LPFS_RANK_LIMIT": str(limit),
        "PYTHONPATH": os.pathsep.join([str(HERE), source]),
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
    """Wait for processes; return exit code and what each printed."""
    latest = time.monotonic() + within
    found = []
    for each in processes:
        try:
            out, err = each.communicate(timeout=max(0.1, latest - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in processes:
                one.kill()
            out, err = each.communicate()
        found.append((each.returncode, out, err))
    return found


def together(folder: Path, *jobs: str, world: int = 2) -> list[dict[str, Any]]:
    """Do jobs in several processes; return what each rank saw."""
    said = ended(start([sys.executable, __file__, str(folder), *jobs], world))
    assert all(code == 0 for code, _, _ in said), "\n".join(err for _, _, err in said)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    with joined() as mine:
        results = {name: JOBS[name](place, Dataset(place / "log")) for name in sys.argv[2:]}
    torch.save(results, place / f"rank-{mine.rank}.pt")
