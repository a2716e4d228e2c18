"""Is every damaged file noticed? Cut files short and flip single bits, then use them and see.

    python benchmarks/damage.py [--cases 2000] [--jobs 2] [--out benchmarks/results/damage.json]

A Dataset, a saved model, a run of select, a run of search, the checkpoints of a training, a finished and an
interrupted comparison are made once from a small simulated log. Each case truncates one file of one of these
folders, or flips one bit of it, and runs everything that reads this folder: commands and functions of the public
API, in this process. The outcome of a case is the worst one of its consumers:

- no effect: the results are bit-equal to those of the intact folder,
- detected: one line with an LpfsError, or a warning beside results that are bit-equal,
- unnoticed: other results and no error,
- traceback, crash, hang, memory: an exception that is no LpfsError, a dead process, more than ``--limit`` seconds,
  more than ``--memory`` MB above what the intact folder needs.

The last two lines are failures and are listed with file, offset and bit. Cases depend on the seed and on the layout
of the folders only. Exit code 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs import cli
from lpfs.errors import LpfsError

FAILURES = ("unnoticed", "traceback", "crash", "hang", "memory")
OUTCOMES = ("no effect", "detected", *FAILURES)  # in this order, the worst one last
MODEL = ("--model-option", "dim=2", "--model-option", "hidden=4", "--device", "cpu")
STEPS = ("--pretrain-steps", "20", "--search-steps", "60")
MEASURED = {"seconds", "rows_per_second", "memory", "train_seconds", "first_in_process", "interrupted", "savings"}
MEASURED |= {"epochs", "memory_ratio", "checksum"}  # a checksum covers measured values
FIELDS = ("user", "ad", "hour", "price", "tags", "device", "noise")


class RefusedError(Exception):
    """A command ended with an error in one line."""


# ------------------------------------------------------------------------------------------- the folders


def make_log(path: Path, rows: int = 240, seed: int = 0) -> None:
    """Write a log of three days with every kind of field; clicks depend on user and ad."""
    rng = random.Random(seed)
    lines = [",".join(("click", "day", *FIELDS))]
    for row in range(rows):
        user, ad = rng.randrange(15), rng.randrange(10)
        click = rng.random() < 0.2 + 0.5 * (ad % 3 == 0) * (user % 2)
        tags = "|".join(rng.sample("wxyz", rng.randrange(1, 3)))
        price = f"{rng.random() * 100:.2f}" if row % 20 else ""
        values = (f"u{user}", f"ad{ad}", rng.randrange(24), price, tags)
        more = (rng.choice(("phone", "tablet", "pc")), f"n{rng.randrange(9)}")
        lines.append(",".join(map(str, (int(click), row * 3 // rows, *values, *more))))
    path.write_text("\n".join(lines) + "\n")


def make_long_log(path: Path, rows: int = 140_000) -> None:
    """Write a log of one day with columns of more than 64 KiB and 1 MiB, which a Dataset stores differently."""
    rng = random.Random(2)
    lines = (
        f"{rng.randrange(2)},u{rng.randrange(20)},{rng.choice(('', '1', '2.5'))},{rng.choice(('x', 'y', 'x|y'))}"
        for _ in range(rows)
    )
    path.write_text("\n".join(("click,user,price,tags", *lines)) + "\n")


def make_originals(root: Path, folders: Iterable[str]) -> None:
    """Make the folders that are damaged later, and those that their consumers need."""
    root.mkdir()
    torch.set_num_threads(1)
    with working_directory(root):
        make_log(Path("log.csv"))
        make_log(Path("rows.csv"), rows=60, seed=1)
        command("prepare", "log.csv", "--label", "click", "--time", "day", "--out", "data")
        command("train", "data", "--steps", 20, *MODEL, "--out", "trained")
        if "long" in folders:
            make_long_log(Path("long.csv"))
            command("prepare", "long.csv", "--label", "click", "--parts", 1, "--out", "long")
        if "run" in folders:
            command("select", "data", "--keep", 3, "--no-curve", *STEPS, *MODEL, "--out", "run")
        if {"found", "small"} & set(folders):
            command("search", "trained", "data", "--search-steps", 60, "--keep", 3, "--device", "cpu", "--out", "found")
            command("prune", "found", "--out", "small")
        if "fitted" in folders:
            train(Path("fitted"), Path("data"), steps=8)
        if {"compared", "stopped"} & set(folders):
            make_comparisons()


def make_comparisons() -> None:
    """Make a finished comparison, and one that was stopped in its last search."""
    lpfs.simulate("simulated", "small", rows=200, days=2)  # its truth, with the names of our fields
    truth = json.loads(Path("simulated/truth.json").read_text())
    truth["fields"] = [{**record, "name": name} for record, name in zip(truth["fields"], FIELDS, strict=False)]
    Path("truth.json").write_text(json.dumps(truth))
    methods = ("--methods", "lpfs++,mutual_information", "--keep", "2,3", "--seeds", 1, "--truth", "truth.json")
    command("compare", "data", *methods, *STEPS, *MODEL, "--out", "compared")
    shutil.copytree("compared", "stopped")
    for pattern in ("results/*-k3-*", "searches/lpfs++*k3*", "comparison.*", "results.csv", "report.html"):
        for path in sorted(Path("stopped").glob(pattern)):
            path.unlink()


@contextlib.contextmanager
def working_directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def train(folder: Path, data: Path, steps: int) -> torch.nn.Module:
    """Train with checkpoints, or go on from the newest one."""
    rows = lpfs.Dataset(data)
    torch.manual_seed(0)
    model = lpfs.make_model("mlp", rows.schema, dim=2, hidden=(4,))
    stream = rows.stream(16, shuffle=True, seed=1)
    settings: dict[str, Any] = {"checkpoint_every": 4, "log_every": 2, "quiet": True}
    lpfs.fit(model, stream, "adam", folder=folder, resume=True, steps=steps, **settings)
    return model


# ------------------------------------------------------------------------------------------- the consumers


def command(*words: Any) -> str:
    """Run a command in this process and return its output; raise RefusedError if it ends with an error in one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([str(word) for word in (*words, "--quiet")])
    if code == 0:
        return out.getvalue()
    lines = [line for line in err.getvalue().splitlines() if line.startswith("lpfs: error:")]
    if len(lines) != 1 or "out of memory" in lines[0]:
        raise RuntimeError(f"exit code {code} with {err.getvalue()[-300:]!r}")
    raise RefusedError(lines[0])


def without_measurements(values: Any) -> Any:
    """Return JSON values without durations and memory, which differ between two equal runs."""
    if isinstance(values, dict):
        return {name: without_measurements(value) for name, value in values.items() if name not in MEASURED}
    return [without_measurements(value) for value in values] if isinstance(values, list) else values


def tensors(model: torch.nn.Module) -> list[Any]:
    """Return names and bytes of the weights of a model."""
    return [(name, tensor.dtype, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]


def read_dataset(path: str) -> Callable[[], Any]:
    """Return a consumer that reads every row, every vocabulary and the schema of a Dataset."""

    def read() -> Any:
        dataset = lpfs.Dataset(path)
        content = hashlib.sha256()
        for batch in dataset.stream(20_000 if path == "long" else 32, prefetch=0):
            for tensor in (batch.ids, batch.dense, batch.labels, batch.missing, *itertools.chain(*batch.bags.values())):
                content.update(b"none" if tensor is None else tensor.numpy().tobytes())
        words = [list(dataset.vocabulary(name) or ()) for name in dataset.schema.names]
        return content.hexdigest(), words, dataset.schema.to_json(), dataset.days(), dataset.fingerprint

    return read


def evaluate(model: str) -> Callable[[], Any]:
    """Return a consumer that evaluates the model of a run on a Dataset."""
    return lambda: command("evaluate", model, "data", "--json", "--device", "cpu")


def encode_like_dataset() -> Any:
    """Evaluate a model on a log that is encoded with the vocabularies of a Dataset."""
    return command("evaluate", "trained", "rows.csv", "--like", "data", "--json", "--device", "cpu")


def train_on_dataset() -> Any:
    """Train a model on a Dataset."""
    record = json.loads(command("train", "data", "--steps", 3, *MODEL, "--out", "new", "--json"))
    return without_measurements(record), tensors(lpfs.load("new/model"))


def load_model() -> Any:
    """Load a model."""
    model = lpfs.load("trained/model")
    return tensors(model), model.schema.to_json(), model.config


def export(run: str) -> Callable[[], Any]:
    """Return a consumer that writes the model of a run as ONNX."""

    def write_onnx() -> Any:
        command("export", run, "--like", "data", "--out", "new.onnx")
        return Path("new.onnx").read_bytes()

    return write_onnx


def resume_training() -> Any:
    """Resume a run of train."""
    record = json.loads(command("train", "--resume", "--out", "trained", "--json"))
    return without_measurements(record), tensors(lpfs.load("trained/model"))


def read_selection() -> Any:
    """Load the selection of a run."""
    return lpfs.Selection.load("run/selection.json").to_json()


def report(folder: str) -> Callable[[], Any]:
    """Return a consumer that writes the report of a folder."""

    def write_report() -> Any:
        command("report", folder, "--out", "new.html")
        return Path("new.html").read_bytes()

    return write_report


def resume_run() -> Any:
    """Resume a run, which reads every checkpoint of it."""
    record = json.loads(command("select", "--resume", "--out", "run", "--json"))
    return without_measurements(record), tensors(lpfs.load("run/model"))


def repeat_run() -> Any:
    """Repeat a run with its settings."""
    record = json.loads(command("select", "--config", "run", "--out", "new", "--json"))
    return without_measurements({**record, "folder": None}), tensors(lpfs.load("new/model"))


def resume_search() -> Any:
    """Resume a run of search."""
    source = [Path(os.environ["DAMAGE_ORIGINALS"], name) for name in ("trained", "data")]
    record = json.loads(command("search", *source, "--resume", "--out", "found", "--json"))
    return without_measurements(record), tensors(lpfs.load("found/model"))


def prune_search() -> Any:
    """Remove the dropped fields of a search from its model."""
    record = json.loads(command("prune", "found", "--out", "new", "--json"))
    return without_measurements(record), tensors(lpfs.load("new/model"))


def continue_training() -> Any:
    """Continue a training from its checkpoints."""
    return tensors(train(Path("fitted"), Path("data"), steps=12))


def write_tables() -> Any:
    """Write the tables of a finished comparison again."""
    return command("compare", "--out", "compared", "--tables-only", "--json"), *comparison_files("compared")


def continue_comparison() -> Any:
    """Do the missing runs of a comparison."""
    record = json.loads(command("compare", "--out", "stopped", "--json"))
    return without_measurements(record), json_files(Path("stopped/results"))


def comparison_files(folder: str) -> list[bytes]:
    """Return the files that a comparison is read from."""
    return [Path(folder, name).read_bytes() for name in ("comparison.json", "comparison.md", "results.csv")]


def json_files(folder: Path) -> Any:
    """Return the JSON files of a folder without measured values."""
    return [without_measurements(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


@dataclass(frozen=True)
class Consumer:
    """A use of a folder: a name, a function, other folders that it needs, and the files that it is run for."""

    name: str
    call: Callable[[], Any]
    needs: tuple[str, ...] = ()
    files: str = ""  # a regular expression; by default all files of the folder


CONSUMERS = {
    "data": (
        Consumer("Dataset", read_dataset("data")),
        Consumer("evaluate", evaluate("trained"), ("trained",)),
        Consumer("evaluate --like", encode_like_dataset, ("trained", "rows.csv")),
        Consumer("train", train_on_dataset),
        Consumer("export", export("trained"), ("trained",), "(?!days)"),
    ),
    "long": (Consumer("Dataset", read_dataset("long")),),
    "trained": (
        Consumer("load", load_model),
        Consumer("evaluate", evaluate("trained"), ("data",)),
        Consumer("export", export("trained"), ("data",), "model"),
        Consumer("train --resume", resume_training, ("data",)),
    ),
    "run": (
        Consumer("Selection.load", read_selection),
        Consumer("report", report("run")),
        Consumer("evaluate", evaluate("run"), ("data",)),
        Consumer("export", export("run"), ("data",), "model"),
        Consumer("select --resume", resume_run, ("data",)),
        Consumer("select --config", repeat_run, ("data",), r"config\.json"),
    ),
    "found": (
        Consumer("report", report("found")),
        Consumer("prune", prune_search, ("data",)),
        Consumer("search --resume", resume_search),
    ),
    "small": (Consumer("report", report("small")), Consumer("evaluate", evaluate("small"), ("data",))),
    "fitted": (Consumer("fit(resume=True)", continue_training, ("data",)),),
    "compared": (Consumer("report", report("compared")), Consumer("compare --tables-only", write_tables, ("data",))),
    "stopped": (Consumer("compare", continue_comparison, ("data",)),),
}
TITLES = {
    "data": "Dataset",
    "long": "long Dataset",
    "trained": "run of train",
    "run": "run of select",
    "found": "run of search",
    "small": "run of prune",
    "fitted": "checkpoints of fit",
    "compared": "comparison",
    "stopped": "interrupted comparison",
}


# ------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """One damaged file: cut to ``offset`` bytes, or with one bit of the byte at ``offset`` flipped."""

    folder: str
    file: str
    offset: int
    bit: int | None

    @property
    def kind(self) -> str:
        """The file without its numbers, so that all files of one kind are counted together."""
        name = re.sub(r"[0-9a-f]{20}", "HASH", self.file)
        return f"{TITLES[self.folder]}: {re.sub(r'[0-9]+', 'N', name)}"

    def apply(self, root: Path) -> None:
        """Damage the file in a copy of the folders."""
        path = root / self.folder / self.file
        data = bytearray(path.read_bytes())
        if self.bit is None:
            del data[self.offset :]
        else:
            data[self.offset] ^= 1 << self.bit
        path.write_bytes(data)


def make_cases(root: Path, folders: Iterable[str], count: int, seed: int) -> list[Case]:
    """Return truncations and bit flips in turn: every file first, in turns of the kinds, then every kind equally."""
    rng = random.Random(seed)
    kinds: dict[str, list[Case]] = defaultdict(list)
    for folder in folders:
        for path in sorted(path for path in (root / folder).rglob("*") if path.is_file() and path.stat().st_size):
            file = Case(folder, path.relative_to(root / folder).as_posix(), path.stat().st_size, None)
            kinds[file.kind].append(file)
    files = [file for names in kinds.values() for file in names]
    turns = max(map(len, kinds.values()))
    order = [names[turn] for turn in range(turns) for names in kinds.values() if turn < len(names)]
    while 2 * len(order) < count:
        order += [names[len(order) // len(kinds) % len(names)] for names in kinds.values()]
    assert set(files) <= set(order)
    cases = []
    for number in range(count):
        file = order[number // 2]
        offset = rng.randrange(file.offset)
        if rng.random() < 0.25:  # near the start and near the end, where headers and footers are
            offset = min(offset % 64, file.offset - 1) if rng.random() < 0.5 else max(0, file.offset - 1 - offset % 64)
        cases.append(Case(file.folder, file.file, offset, rng.randrange(8) if number % 2 else None))
    return cases


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def resident_memory(name: str = "VmRSS") -> int:
    """Return the resident memory in bytes; VmHWM is its peak since the last reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


class Room:
    """The directory of a worker, in which the copies are damaged and used."""

    def __init__(
        self, folder: Path, originals: Path, memory: int, heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        self.heartbeat = heartbeat  # called whenever a consumer starts
        self.folder, self.originals, self.memory, self.memory_before = folder, originals, memory, 0
        self.expected: dict[tuple[str, str], tuple[str, int]] = {}
        os.environ["DAMAGE_ORIGINALS"] = str(originals)
        folder.mkdir(parents=True)

    def use(self, folder: str, consumer: Consumer, case: Case | None) -> tuple[str, list[str]]:
        """Run a consumer on copies of its folders; return a digest of its result, and the warnings.

        The files are copied, not linked: some consumers append to a file.
        """
        self.heartbeat()
        place = self.folder / "copy"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name in {folder, *consumer.needs}:
            source = self.originals / name
            shutil.copytree(source, place / name) if source.is_dir() else shutil.copy(source, place / name)
        if case is not None:
            case.apply(place)
        with working_directory(place), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory, see proc(5)
            self.memory_before = resident_memory()
            result = digest(consumer.call())
        return result, [str(warning.message) for warning in caught]

    def memory_used(self) -> int:
        """Return by how much memory grew at most since the last consumer was started."""
        return resident_memory("VmHWM") - self.memory_before

    def prepare(self, folder: str) -> None:
        """Use the intact folder twice: the results must be equal."""
        for consumer in CONSUMERS[folder]:
            (first, _), (second, _) = (self.use(folder, consumer, None) for _ in range(2))
            if first != second:
                raise RuntimeError(f"{folder}: {consumer.name} gives different results for the same files")
            self.expected[folder, consumer.name] = second, self.memory_used()

    def play(self, case: Case) -> list[dict[str, str]]:
        """Return the outcome of every consumer of a damaged file."""
        if not any(folder == case.folder for folder, _ in self.expected):
            self.prepare(case.folder)
        outcomes = []
        for consumer in CONSUMERS[case.folder]:
            if re.match(consumer.files, case.file):
                outcome, text = self.judge(case, consumer)
                outcomes.append({"consumer": consumer.name, "outcome": outcome, "text": text[:300]})
        return outcomes

    def judge(self, case: Case, consumer: Consumer) -> tuple[str, str]:
        """Return the outcome of one consumer, and the message."""
        expected, memory = self.expected[case.folder, consumer.name]
        try:
            result, messages = self.use(case.folder, consumer, case)
            text = "; ".join(messages)
            outcome = "unnoticed" if result != expected else "detected" if messages else "no effect"
        except KeyboardInterrupt:
            raise
        except (LpfsError, RefusedError) as error:
            text = str(error)
            outcome = "traceback" if "\n" in text else "detected"
        except BaseException as error:  # also the panics of polars, which are no Exception
            outcome, text = "traceback", f"{type(error).__name__}: {error}"
        more = self.memory_used() - memory
        return ("memory", f"{more >> 20} MB more") if more > self.memory else (outcome, text)


# ------------------------------------------------------------------------------------------- the processes


def work(options: argparse.Namespace, cases: list[Case]) -> None:
    """Play the cases of one worker and print the outcomes, one line of JSON each."""
    with os.fdopen(os.dup(1), "w") as channel:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if not options.show:
            os.dup2(null, 2)
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))

        def send(record: dict[str, Any]) -> None:
            print(json.dumps(record), file=channel, flush=True)

        room = Room(options.worker, options.originals, options.memory << 20, heartbeat=lambda: send({}))
        try:
            for number in options.numbers:
                send({"case": number, "outcomes": room.play(cases[number])})
        except Exception as error:  # not of a damaged folder: those of an intact folder, and of this script
            send({"error": f"{type(error).__name__}: {error}"})
            raise


class Worker:
    """A process with its share of the cases; after a crash or a hang a new one does the rest."""

    def __init__(self, numbers: Iterable[int], folder: Path, options: argparse.Namespace) -> None:
        self.left, self.folder, self.options, self.starts = list(numbers), folder, options, 0
        self.outcomes: dict[int, list[dict[str, str]]] = {}
        if self.left:
            self.start()

    def start(self) -> None:
        self.starts += 1
        options = self.options
        arguments = ["--worker", self.folder / str(self.starts), "--originals", options.originals]
        arguments += ["--cases", options.cases, "--seed", options.seed, "--memory", options.memory]
        arguments += ["--folders", *options.folders]
        arguments += ["--numbers", ",".join(map(str, self.left)), *(["--show"] if options.show else [])]
        environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command_line = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command_line, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        self.pipe, self.buffer = self.process.stdout, b""
        self.deadline = time.monotonic() + 120 + self.options.limit

    def listen(self) -> bool:
        """Read new outcomes; return whether there are cases left."""
        if not self.left:
            return False
        ready, _, _ = select.select([self.pipe], [], [], 0.2)
        data = os.read(self.pipe.fileno(), 1 << 16) if ready else b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            record = json.loads(line)
            self.deadline = time.monotonic() + self.options.limit
            if "error" in record:
                raise RuntimeError(record["error"])
            if record:
                self.note(record["case"], record["outcomes"])
        if self.left and ready and not data:
            self.fail("crash", f"exit code {self.process.wait()}")
        elif self.left and time.monotonic() > self.deadline:
            self.fail("hang", f"no result after {self.options.limit} s")
        if not self.left:
            self.end()
        return bool(self.left)

    def note(self, number: int, outcomes: list[dict[str, str]]) -> None:
        assert number == self.left.pop(0)
        self.outcomes[number] = outcomes

    def fail(self, outcome: str, text: str) -> None:
        """Note that a case ended the process, and start a new one."""
        self.end()
        self.note(self.left[0], [{"consumer": "", "outcome": outcome, "text": text}])
        if self.left:
            self.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def run_campaign(options: argparse.Namespace) -> dict[str, Any]:
    """Play all cases and return the counts and the failures."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lpfs-damage-", dir=options.place) as folder:
        options.originals = Path(folder, "originals")
        make_originals(options.originals, options.folders)
        cases = make_cases(options.originals, options.folders, options.cases, options.seed)
        numbers = sorted(range(len(cases)), key=lambda number: (list(CONSUMERS).index(cases[number].folder), number))
        shares = [numbers[rank :: options.jobs] for rank in range(options.jobs)]
        workers = [Worker(share, Path(folder, f"worker{rank}"), options) for rank, share in enumerate(shares)]
        busy = workers
        try:
            while busy := [worker for worker in busy if worker.listen()]:
                pass
        finally:
            for worker in busy:
                worker.end()
    outcomes = {number: texts for worker in workers for number, texts in worker.outcomes.items()}
    return summarize(cases, outcomes, options, time.monotonic() - start)


def summarize(
    cases: list[Case], outcomes: dict[int, list[dict[str, str]]], options: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """Return counts by file kind and by way of damage, and every failure."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    ways: dict[str, Counter[str]] = {"truncation": Counter(), "bit flip": Counter()}
    failures = []
    for number, case in enumerate(cases):
        worst = max((entry["outcome"] for entry in outcomes[number]), key=OUTCOMES.index, default="no effect")
        kinds[case.kind][worst] += 1
        ways["truncation" if case.bit is None else "bit flip"][worst] += 1
        failures += [
            {"case": number, **asdict(case), **entry} for entry in outcomes[number] if entry["outcome"] in FAILURES
        ]
    return {
        "command": f"python benchmarks/damage.py --cases {options.cases} --seed {options.seed}",
        "cases": len(cases),
        "files": len({(case.folder, case.file) for case in cases}),
        "seconds": round(seconds, 1),
        "outcomes": {way: dict(sorted(counts.items())) for way, counts in ways.items()},
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "failures": failures,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="half of them truncations, half of them bit flips")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", nargs="+", choices=list(CONSUMERS), default=list(CONSUMERS), help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one consumer")
    parser.add_argument("--memory", type=int, default=300, help="MB above the memory of the intact folder")
    parser.add_argument("--place", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--show", action="store_true", help="show what workers print on standard error")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--originals", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=lambda text: [int(word) for word in text.split(",")], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options, make_cases(options.originals, options.folders, options.cases, options.seed))
        return 0
    result = run_campaign(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
