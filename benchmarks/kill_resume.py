"""Does training go on bit by bit after ``kill -9`` at any moment? Kill it and see.

    python benchmarks/kill_resume.py [--kills 100] [--out benchmarks/results/kill_resume.json]

A small model with gates, dropout, a shuffled stream, evaluations and a checkpoint every few steps is trained in a
process of its own and killed by SIGKILL: a third of the times from outside, after a random time; a third at a
random operation on the files of the run (open, rename, remove, …); a third with a tensor of a checkpoint half
written. It is started again with ``resume=True`` each time. Whenever a run gets to its end nevertheless, its last
checkpoint (weights, gates, both optimizers, generators, position, a hash of every batch in order) and its log are
compared with those of a run that nobody killed. Processes are forked, so that each costs no import of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which optimizers import when they are made: once here, not in every process
from torch import Tensor, nn

import lpfs
from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema
from lpfs.train import tensor_io
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Checkpoints
from lpfs.train.loggers import TIMING_KEYS
from lpfs.train.tensor_io import states_equal

FIELDS, VALUES, ROWS, STEPS = 6, 30, 2000, 150
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


class Net(nn.Module):
    """An embedding a field, dropout, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VALUES, 4) for _ in range(FIELDS))
        self.net = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * FIELDS, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: lpfs.Batch) -> Tensor:
        """Return logits (B,)."""
        parts = [table(batch.ids[:, number]) for number, table in enumerate(self.tables)]
        logits: Tensor = self.net(torch.cat(parts, 1))[:, 0]
        return logits


class Search(Callback):
    """Drives the gates and their optimizer, and keeps a hash of the batches in order."""

    def __init__(self, gates: lpfs.Gates) -> None:
        self.gates, self.order = gates, ""
        self.optimizer = gates.optimizer(keep=3)

    def after_step(self, state: State) -> None:
        """Move the gates."""
        assert state.batch is not None
        self.order = hashlib.sha256(self.order.encode() + state.batch.ids.numpy().tobytes()).hexdigest()
        self.optimizer.step()
        self.gates.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the hash."""
        return {"optimizer": self.optimizer.state_dict(), "order": self.order}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take them over."""
        self.optimizer.load_state_dict(dict(values["optimizer"]))
        self.order = values["order"]


def make_log(out: Path) -> None:
    names = [f"f{number}" for number in range(FIELDS)]
    numbers = np.random.default_rng(0)
    effects = numbers.normal(size=(FIELDS, VALUES)) * np.linspace(0, 1.5, FIELDS)[:, None]
    ids = numbers.integers(VALUES, size=(FIELDS, ROWS))
    odds = 1 / (1 + np.exp(-effects[np.arange(FIELDS)[:, None], ids].sum(0)))
    clicks = (numbers.random(ROWS) < odds).astype(np.float32)
    schema = Schema(tuple(Field(name, cardinality=VALUES) for name in names), label="click")
    with DatasetWriter(out, schema, fingerprint="kills", settings={}) as writer:
        day = writer.day("0")
        day.append(ids=dict(zip(names, ids, strict=True)), labels={"click": clicks})


def train(data: Path, folder: Path) -> None:
    """Train to the end, or go on from where it was killed."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    fitted, held_out = Dataset(data).split(0.8, 0.2)
    model = Net()
    gates = lpfs.attach(model, {f"f{number}": model.tables[number] for number in range(FIELDS)}, steps=STEPS)
    lpfs.fit(
        model,
        fitted.stream(32, shuffle=True, seed=3),
        "adam",
        parameters=gates.model_parameters(),
        valid=held_out.stream(100),
        folder=folder,
        resume=True,
        callbacks=[Search(gates)],
        steps=STEPS,
        schedule="rise",
        clip=1.0,
        evaluate_every=20,
        checkpoint_every=7,
        log_every=4,
        keep="best",
        quiet=True,
    )


def forked(work: Callable[[], None]) -> int:
    """Run something in a process of its own and return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process and return how it ended: 0, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_at_file_event(folder: Path, number: int, note: int) -> None:
    """Be killed right before the n-th operation on a file of the run."""
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in FILE_EVENTS and str(folder) in str(args[0]):
            left -= 1
            if not left:
                os.write(note, event.encode())
                die()

    sys.addaudithook(hook)


def die_in_tensor(number: int, note: int) -> None:
    """Be killed with half of the n-th piece of a checkpoint written."""
    left, whole = number, tensor_io._write_bytes

    def put(file: Any, digest: Any, data: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            file.write(data[: len(data) // 2])
            file.flush()
            os.write(note, b"half a tensor")
            die()
        whole(file, digest, data)

    tensor_io._write_bytes = put


def one_kill(data: Path, folder: Path, how: str, numbers: random.Random, seconds: float) -> tuple[int, str]:
    """Train until killed or done; return how it ended and what was going on."""
    listen, note = os.pipe()
    number = numbers.randint(1, 60 if how == "file" else 150)

    def work() -> None:
        if how == "file":
            die_at_file_event(folder, number, note)
        elif how == "tensor":
            die_in_tensor(number, note)
        train(data, folder)

    child = forked(work)
    os.close(note)
    if how == "time":
        time.sleep(numbers.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
    code = ended(child)
    what = os.read(listen, 100).decode()
    os.close(listen)
    return code, what or "any moment"


def saving(folder: Path) -> bool:
    """Say whether the kill left a checkpoint that is not finished."""
    return any((folder / "checkpoints").glob(".step-*.tmp"))


def result(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the last checkpoint and the log of a run, times left out."""
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.load(checkpoints.steps()[-1])
    del state["log"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return state, [{name: value for name, value in line.items() if name not in TIMING_KEYS} for line in lines]


def run(kills: int, seed: int, place: Path) -> dict[str, Any]:
    data, numbers = place / "log", random.Random(seed)
    if ended(forked(lambda: make_log(data))) or ended(forked(lambda: train(data, place / "whole"))):
        raise SystemExit("the run that nobody kills failed")
    begin = time.perf_counter()
    ended(forked(lambda: train(data, place / "again")))
    seconds = time.perf_counter() - begin
    folders, found, half = [place / "again"], Counter[str](), 0
    folder, done = place / "killed-0", 0
    while done < kills:
        code, what = one_kill(data, folder, ("time", "file", "tensor")[done % 3], numbers, seconds)
        if code == -signal.SIGKILL:
            done += 1
            found[what] += 1
            half += saving(folder)
        elif code == 0:
            folders.append(folder)
            folder = place / f"killed-{len(folders)}"
        else:
            raise SystemExit(f"training ended with {code} after {done} kills")
    if ended(forked(lambda: train(data, folder))):
        raise SystemExit("the last run failed")
    folders.append(folder)
    state, lines = result(place / "whole")
    different = []
    for each in folders:
        theirs, log = result(each)
        if not states_equal(state, theirs) or log != lines:
            different.append(each.name)
    return {
        "kills": done,
        "kills_in_the_middle_of_a_save": half,
        "kills_by_moment": dict(sorted(found.items())),
        "runs_compared": len(folders),
        "runs_that_differ": different,
        "identical": not different,
        "lines_of_log_compared": len(lines),
        "tensors_compared": len(state["model"]),
        "steps": STEPS,
        "seconds_of_a_run": round(seconds, 2),
        "seed": seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kill_resume.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = run(args.kills, args.seed, Path(place))
    text = json.dumps({"command": f"python benchmarks/kill_resume.py --kills {args.kills}", **found}, indent=1)
    args.out.write_text(text + "\n")
    print(text)
    if not found["identical"]:
        raise SystemExit("a run that was killed and resumed differs from one that was not")


if __name__ == "__main__":
    main()
