"""Does a job end, and go on, when one of its processes dies or hangs? Let one, and see.

    python benchmarks/kill_rank.py [--ranks 2] [--limit 45] [--out benchmarks/results/kill_rank.json]

A search with gates is trained by several processes under ``torchrun --max-restarts 1``. In the first try one
rank, in the middle of the training, is killed by SIGKILL, is stopped by SIGSTOP, sleeps for ever, or raises an
error; the checkpoints there are then must be whole, another rank must name it, and the second try must go on
from the newest checkpoint to the same end, bit by bit, as a job that nothing happened to. Seconds are from the
moment of the failure until the second try begins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.data.dataset import Dataset
from lpfs.models import make_model
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Checkpoints
from lpfs.train.distributed.group import current_group, joined
from lpfs.train.tensor_io import states_equal

WAYS = ("kill", "stop", "hang", "raise")
STEPS, FAILS, EVERY = 120, 75, 10
VICTIM = 1


class Search(Callback):
    """Drives the gates; on one rank, in the first try, something happens."""

    def __init__(self, gates: lpfs.Gates, way: str, place: Path) -> None:
        self.gates, self.way, self.place = gates, way, place
        self.optimizer = gates.optimizer(keep=6)

    def within_step(self, state: State) -> None:
        """Move the gates."""
        self.optimizer.step()
        self.gates.step()

    def after_step(self, state: State) -> None:
        """Fail, if it is time to."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and current_group().rank == VICTIM and state.step == FAILS and self.way in WAYS:
            (self.place / "failed").write_text(str(time.time()))
            if self.way == "raise":
                raise ArithmeticError("one rank alone went wrong")
            if self.way == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL if self.way == "kill" else signal.SIGSTOP)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take it over."""
        self.optimizer.load_state_dict(dict(values["optimizer"]))


def work(place: Path, way: str) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ["RANK"] == "0":
        (place / "restarted").write_text(str(time.time()))
        saved = Checkpoints(place / "run" / "checkpoints").steps()
        whole = [step for step in saved if Checkpoints(place / "run" / "checkpoints").load(step)]
        (place / "found").write_text(json.dumps({"saved": saved, "whole": whole}))
    torch.manual_seed(1)
    log = Dataset(place.parent / "log")
    model = make_model("mlp", log.schema, dim=4, hidden=(8,))
    gates = lpfs.attach(model, steps=STEPS)
    with joined():
        lpfs.fit(
            model,
            log.stream(128, shuffle=True, seed=3),
            "adagrad",
            parameters=gates.model_parameters(),
            folder=place / "run",
            resume=attempt > 0,
            callbacks=[Search(gates, way, place)],
            steps=STEPS,
            checkpoint_every=EVERY,
            quiet=True,
        )


def launch(place: Path, way: str, ranks: int, limit: float) -> subprocess.CompletedProcess[str]:
    """Run the job under torchrun to its end."""
    place.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", __file__, "--work", str(place), "--way", way]
    env = {**os.environ, "LPFS_RANK_LIMIT": str(limit), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def trial(folder: Path, way: str, ranks: int, limit: float) -> dict[str, Any]:
    """Let one rank fail in a way; return what happened."""
    place = folder / way
    ran = launch(place, way, ranks, limit)
    named = [line.strip() for line in ran.stderr.splitlines() if f"RankError: rank {VICTIM} " in line]
    begun, again = ((place / name).read_text() for name in ("failed", "restarted"))
    last, undisturbed = (Checkpoints(folder / each / "run" / "checkpoints").load(STEPS) for each in (way, "plain"))
    for each in (last, undisturbed):
        each["callbacks"] = each["log"] = None
    return {
        "way": way,
        "exit": ran.returncode,
        "named": named[0] if named else None,
        "seconds_until_restarted": round(float(again) - float(begun), 1),
        "checkpoints": json.loads((place / "found").read_text()),
        "same_end": states_equal(last, undisturbed),
    }


def main() -> None:
    """Let every kind of failure happen once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=45.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kill_rank.json"))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", default="plain", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.work, asked.way)
        return
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        lpfs.simulate(folder / "log", "small", rows=4000)
        plain = launch(folder / "plain", "plain", asked.ranks, asked.limit)
        if plain.returncode:
            sys.exit(plain.stderr)
        trials = [trial(folder, way, asked.ranks, asked.limit) for way in asked.ways]
    found = {
        "command": f"python benchmarks/kill_rank.py --ranks {asked.ranks} --limit {asked.limit:g}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": asked.ranks,
        "limit": asked.limit,
        "steps": STEPS,
        "fails_after_step": FAILS,
        "checkpoint_every": EVERY,
        "trials": trials,
        "all_well": all(each["same_end"] and each["named"] and each["exit"] == 0 for each in trials),
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["all_well"] else 1)


if __name__ == "__main__":
    main()
