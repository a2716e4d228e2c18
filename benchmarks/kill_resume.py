"""Does work go on bit for bit after ``kill -9`` at any moment? Kill it and compare.

    python benchmarks/kill_resume.py [training] [--kills 100]
    python benchmarks/kill_resume.py commands [--kills 200] [--jobs 2]

``training``: a small model with gates, dropout, a shuffled stream, evaluations and a checkpoint every few steps is
trained in a process of its own and killed by SIGKILL: a third of the times from outside, after a random time; a third
at a random operation on the files of the run (open, rename, remove, …); a third with a tensor of a checkpoint half
written. It is started again with ``resume=True`` each time. Whenever a run gets to its end nevertheless, its last
checkpoint (weights, gates, both optimizers, generators, position, a hash of every batch in order) and its log are
compared with those of a run that was not killed.

``commands``: whole commands on a tiny log are killed once, half of the times after a random time and half of the times
before a random operation on files, and are then continued in the documented way. The result (kept fields, gates,
metrics, bytes of the models, of the history and of the Dataset) must be that of the command that was not killed, and
no temporary file may be left. Every kill has a seed of its own, so that one can be repeated: ``--only select-17``.
Finished kills are in ``--out`` with the suffix ``.partial``, from which an interrupted campaign continues.

Both write to ``benchmarks/results/kill_resume.json``. Processes are forked, so that each costs no import of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which optimizers import when they are made: once here, not in every process
from torch import Tensor, nn

import lpfs
import lpfs.compare.runner
import lpfs.data.prepare
import lpfs.pipeline.plan
import lpfs.pipeline.select
import lpfs.train.fit
from lpfs import cli
from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema
from lpfs.train import tensor_io
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Checkpoints
from lpfs.train.loggers import TIMING_KEYS
from lpfs.train.tensor_io import states_equal

FIELDS, VALUES, ROWS, STEPS = 6, 30, 2000, 150
CHECKPOINT_EVERY = 7  # steps of a command
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
COMMANDS = ("select", "resume", "replace", "compare", "prepare")
COLUMNS = ("--label", "click", "--time", "day")
SMALL = ("--pretrain-steps", "10", "--batch-size", "64", "--model-option", "dim=2", "--model-option", "hidden=4")
KEEP = ("--search-steps", "50", "--keep", "2", "--method", "lpfs++", "--finish", "both")
SELECT = ("select", "log.csv", *COLUMNS, *SMALL, *KEEP, "--out", "out")
OLD_SELECT = (*SELECT, "--method", "permutation", "--finish", "none")
PLAN = ("--methods", "lpfs++,permutation", "--keep", "2", "--seeds", "1")
COMPARE = ("compare", "log.csv", *COLUMNS, *SMALL, "--search-steps", "50", *PLAN, "--out", "out")
PREPARE = ("prepare", "log.csv", *COLUMNS, "--out", "out", "--replace")
OLD_PREPARE = (*PREPARE, "--keep-all")
STAGES = (
    *("pretrain", "all_fields", "curve", "search", "retrained", "hot_start"),
    *("model", "selection.json", "report.html"),
)
TIMES = {"seconds", "rows_per_second", "train_seconds", "memory", "first_in_process", "interrupted", "created", "code"}
TIMES |= {"rows_per_second_low", "rows_per_second_high"}
TIMES |= {"epochs", "memory_ratio", "search_memory", "search_seconds", "checksum"}  # a checksum covers measured values


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
    except BaseException:
        traceback.print_exc()
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


def write_csv(path: Path) -> None:
    """Write a log in which the click depends on user and ad only."""
    numbers, lines = random.Random(0), ["click,day,user,ad,site,noise"]
    for row in range(400):
        user, ad, site, noise = (numbers.randrange(size) for size in (6, 5, 4, 8))
        click = numbers.random() < 0.05 + 0.45 * (user % 2) + 0.45 * (ad % 2)
        lines.append(f"{int(click)},{row // 100},u{user},a{ad},s{site},n{noise}")
    path.write_text("\n".join(lines) + "\n")


def run_command(place: Path, arguments: Sequence[str], events: Any = None, seconds: float | None = None) -> int:
    """Run a command in a directory and return its exit code; kill it before the n-th file event or after a time.

    ``events`` is a number, or a pipe to which the number of file events is written.
    """

    def work() -> None:
        torch.set_num_threads(1)
        lpfs.pipeline.plan.CHECKPOINT_EVERY = CHECKPOINT_EVERY
        lpfs.train.fit.SECONDS_BETWEEN_INTERRUPTIONS = 0.0  # a checkpoint whenever one is due by steps
        os.chdir(place)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in FILE_EVENTS and isinstance(args[0], str | os.PathLike) and is_output(os.fspath(args[0])):
                count += 1
                if count == limit:
                    die()

        limit = events if isinstance(events, int) else 0
        sys.addaudithook(hook)
        code = cli.run(list(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
        if events and not limit:
            os.write(events[0], str(count).encode())
        os._exit(code)

    child = forked(work)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return ended(child)


def is_output(path: str) -> bool:
    """Return whether a path is the output of a command, or a temporary file or directory for it."""
    name = path.removeprefix(f"{os.getcwd()}/")
    return name.startswith(("out", ".out"))


class Place:
    """A directory in which commands are run, and the results of commands that were not killed."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory / "place", directory / "place" / "out"
        self.directory.mkdir(parents=True)
        write_csv(self.directory / "log.csv")
        self.whole: dict[str, dict[str, Any]] = {}
        self.cost: dict[str, tuple[int, float]] = {}  # file events and seconds of the command
        self.old: dict[str, Path] = {}  # copies of outputs that are replaced
        for name, arguments in (("old run", OLD_SELECT), ("old Dataset", OLD_PREPARE)):
            self.finish(arguments)
            self.old[name] = directory / name
            self.out.rename(self.old[name])
        for name in ("select", "replace", "compare", "prepare"):
            self.start(name)
            listen, note = os.pipe()
            begin = time.perf_counter()
            code = run_command(self.directory, self.arguments(name), [note])
            seconds = time.perf_counter() - begin
            if code:
                raise SystemExit(f"{name}: the command that is not killed failed: {self.log()}")
            self.cost[name] = int(os.read(listen, 100)), seconds
            os.close(listen)
            os.close(note)
            self.whole[name] = self.result()
        self.whole["resume"], self.cost["resume"] = self.whole["select"], self.cost["select"]
        if self.whole["replace"] != self.whole["select"]:
            raise SystemExit(f"two runs differ: {differences(self.whole['select'], self.whole['replace'])}")

    def start(self, name: str) -> None:
        """Make the output that a command starts with: none, or an older one to replace."""
        for path in self.directory.iterdir():
            if path.name != "log.csv":
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if name in ("replace", "prepare"):
            old = self.old["old run" if name == "replace" else "old Dataset"]
            shutil.copytree(old, self.out)

    def arguments(self, name: str) -> Sequence[str]:
        """Return the arguments of a command."""
        select = {"select": SELECT, "resume": (*SELECT, "--resume"), "replace": (*SELECT, "--replace")}
        return {**select, "compare": COMPARE, "prepare": PREPARE}[name]

    def log(self) -> str:
        """Return the last line that a command printed."""
        return ((self.directory / "log.txt").read_text().splitlines() or [""])[-1]

    def finish(self, arguments: Sequence[str]) -> None:
        """Run a command to its end."""
        if run_command(self.directory, arguments):
            raise SystemExit(f"{' '.join(arguments)}: {self.log()}")

    def stage(self) -> str:
        """Return what a killed command was doing, from the files that it left."""
        for name in (".moving", ".replaced", ".removed"):
            if (self.out / name).is_dir():
                return f"replacing: {name}"
        if (self.out / "plan.json").exists():
            done = [name for name in ("seeds", "searches", "trained", "results") if (self.out / name).is_dir()]
            last = "tables" if (self.out / "comparison.json").exists() else done[-1] if done else "plan"
            return f"{last}, work in progress" if any((self.out / "work").glob("*")) else last
        reached = [name for name in STAGES if (self.out / name).exists()]
        if any(path.name.endswith(".tmp") for path in (*self.directory.glob(".out.lpfs-*"), *self.out.glob(".*.tmp"))):
            return f"{reached[-1] if reached else 'prepare'}, staging"
        return reached[-1] if reached else "prepare"

    def result(self) -> dict[str, Any]:
        """Return what must be equal: bytes of files, and JSON without times."""
        values: dict[str, Any] = {}
        for path in sorted(self.out.rglob("*")):
            name = path.relative_to(self.out).as_posix()
            if path.is_dir() or name.startswith(
                ("pretrain/", "search/", "all_fields/", "curve/", "retrained/", "hot_start/", "seeds/")
            ):
                continue
            if path.name in ("report.html", "comparison.md", "results.csv"):  # made from the others, with times
                values[name] = True
            elif path.suffix == ".json" and not name.startswith(("data/", "model/")):
                values[name] = without_times(json.loads(path.read_text()))
            else:
                values[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        left = [path.name for path in self.directory.iterdir() if path.name.startswith(".")]
        return {**values, "left": left}


def tree_bytes(directory: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def without_times(values: Any) -> Any:
    """Return JSON values without those that depend on the clock."""
    if isinstance(values, dict):
        return {name: without_times(value) for name, value in values.items() if name not in TIMES}
    return [without_times(value) for value in values] if isinstance(values, list) else values


def differences(expected: Any, found: Any, name: str = "") -> list[str]:
    """Return the names of the values that differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(expected.keys() | found.keys())
        return [text for key in names for text in differences(expected.get(key), found.get(key), f"{name}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for key, (left, right) in pairs for text in differences(left, right, f"{name}/{key}")]
    return [] if expected == found else [name]


def kill_command(place: Place, name: str, number: int, seed: int) -> dict[str, Any]:
    """Kill a command once, continue it, and return what differs from the command that was not killed."""
    numbers = random.Random(f"{seed}-{name}-{number}")
    events, seconds = place.cost[name]
    how = ("time", "file")[number % 2]
    begin, arguments, killed = time.perf_counter(), place.arguments(name), False
    while not killed:
        place.start(name)
        if name == "resume":  # of a run that was killed before
            run_command(place.directory, SELECT, numbers.randint(1, events))
        if how == "file":
            code = run_command(place.directory, arguments, numbers.randint(1, events))
        else:
            code = run_command(place.directory, arguments, seconds=numbers.uniform(0, seconds))
        killed = code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            break
    record: dict[str, Any] = {"kill": f"{name}-{number}", "how": how, "stage": place.stage(), "recovered": False}
    if not killed:
        return {**record, "problem": f"exit code {code}: {place.log()}"}
    problem = ""
    if name == "replace" and numbers.random() < 0.5:  # the other way to go on, if the new run was started
        code = run_command(place.directory, (*SELECT, "--resume"))
        text = (place.directory / "log.txt").read_text()
        record["recovered"] = "older run is restored" in text
        if code and "cannot be resumed with" in text:  # the old run is there, and must be complete
            different = differences(tree_bytes(place.old["old run"]), tree_bytes(place.out))
            problem = f"the old run differs: {', '.join(different[:5])}" if different else ""
            code = run_command(place.directory, arguments)
    else:
        code = run_command(place.directory, (*SELECT, "--resume") if name == "select" else arguments)
        record["recovered"] = "restored" in (place.directory / "log.txt").read_text()
    if code:
        problem = f"exit code {code}: {place.log()}"
    elif not problem:
        different = differences(place.whole[name], place.result())
        problem = f"differs: {', '.join(different[:5])}" if different else ""
    return {**record, "problem": problem, "seconds": round(time.perf_counter() - begin, 1)}


def kill_commands(kills: int, seed: int, jobs: int, only: str | None, partial: Path) -> dict[str, Any]:
    """Do the missing kills in several processes; return counts and failures."""
    names = [f"{COMMANDS[number % len(COMMANDS)]}-{number // len(COMMANDS)}" for number in range(kills)]
    names = [only] if only else names
    lines = partial.read_text().splitlines() if partial.exists() else []
    done = {record["kill"]: record for record in map(json.loads, lines) if record["seed"] == seed and not only}
    missing = [name for name in names if name not in done]

    def work(job: int) -> None:
        with tempfile.TemporaryDirectory(prefix="lpfs-kills-") as directory:
            place = Place(Path(directory))
            for name in missing[job::jobs]:
                command, number = name.rsplit("-", 1)
                record = {"seed": seed, **kill_command(place, command, int(number), seed)}
                print(json.dumps(record), flush=True)
                with partial.open("a") as file:
                    file.write(json.dumps(record) + "\n")

    if missing:
        children = [forked(partial_work(work, job)) for job in range(min(jobs, len(missing)))]
        codes = [ended(child) for child in children]
        if any(codes):
            raise SystemExit("a process of the campaign failed; start the same command again to continue")
        lines = partial.read_text().splitlines()
        done = {record["kill"]: record for record in map(json.loads, lines) if record["seed"] == seed}
    records = [done[name] for name in names]
    return {
        "kills": len(records),
        "kills_by_command": {
            command: dict(sorted(Counter(x["stage"] for x in records if x["kill"].startswith(f"{command}-")).items()))
            for command in COMMANDS
        },
        "kills_by_moment": dict(sorted(Counter(record["how"] for record in records).items())),
        "older_runs_restored": sum(record["recovered"] for record in records),
        "failures": [record for record in records if record["problem"]],
        "seconds_per_kill": round(sum(record.get("seconds", 0) for record in records) / len(records), 1),
        "seed": seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def partial_work(work: Callable[[int], None], job: int) -> Callable[[], None]:
    return lambda: work(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("campaign", nargs="?", choices=["training", "commands"], default="training")
    parser.add_argument("--kills", type=int, help="100 of training, 200 of commands by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that kill commands")
    parser.add_argument("--only", help="one kill of commands, such as select-17")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kill_resume.json"))
    args = parser.parse_args()
    kills = args.kills or {"training": 100, "commands": 200}[args.campaign]
    partial = args.out.with_suffix(".partial")
    if args.campaign == "commands":
        result = kill_commands(kills, args.seed, args.jobs, args.only, partial)
        is_good = not result["failures"]
    else:
        with tempfile.TemporaryDirectory() as place:
            result = run(kills, args.seed, Path(place))
        is_good = result["identical"]
    values = json.loads(args.out.read_text()) if args.out.exists() else {}
    values[args.campaign] = {"command": f"python benchmarks/kill_resume.py {args.campaign} --kills {kills}", **result}
    print(json.dumps(values[args.campaign], indent=1))
    if not args.only:
        args.out.write_text(json.dumps(values, indent=1) + "\n")
        partial.unlink(missing_ok=True)
    if not is_good:
        raise SystemExit("what was killed and continued differs from what was not")


if __name__ == "__main__":
    main()
