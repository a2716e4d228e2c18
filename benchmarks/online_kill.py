"""Kill the online trainer again and again with SIGKILL and compare the final state with that of an unbroken run.

    python benchmarks/online_kill.py --source segments --events 1000000 --kills 100

Sources: ``segments`` (files in a folder), ``kafka`` (librdkafka's mock cluster in a process of its own) and ``redis``
(a redis-server with ``appendfsync always``, which is killed too). Every event has a number, its key. Counted are the
events that were learned and those that became dead letters; the unbroken run reads the same events.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lpfs import cli
from lpfs.data.prepare import prepare
from lpfs.data.simulate_stream import StreamSpec, inject_faults, simulate_events, write_stream
from lpfs.errors import StateError
from lpfs.online.state import StateReader

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.helpers
RESULTS = Path(__file__).parent / "results" / "online"
CHUNK = 1000  # events that are written at once
MAX_AHEAD = 7000  # events; about 3 MB
COMPARED = {  # what must be equal besides the weights; times of the clock differ
    "commits": "id, rows, position, sha256, state, dead_letters, kept, publish",
    "metrics": "commit_id, rows, auc, low, high, logloss, calibration",
    "changes": "commit_id, rows, position, field, action, gain, low, high, tested, before, after",
    "alarms": "commit_id, rows, field, kind, size, since, message",
}


def trainer_command(source: str, run: Path, like: Path, options: list[str]) -> list[str]:
    """Return the command line of the trainer."""
    return ["online", source, str(run), "--like", str(like), "--key", "event", *options]


def read_state(run: Path) -> dict[str, Any]:
    """Return everything that a run has committed, without times of the clock."""
    with closing(sqlite3.connect(run / "state.sqlite")) as connection:
        state: dict[str, Any] = {
            table: connection.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchall()
            for table, columns in COMPARED.items()
        }
    state["dead_letters"] = (run / "dead_letters.jsonl").read_bytes()
    return state


def counted(state: dict[str, Any]) -> dict[str, int]:
    """Return how many events a run has learned, refused and read."""
    last = dict(zip(COMPARED["commits"].split(", "), state["commits"][-1], strict=True))
    letters = len(state["dead_letters"].splitlines())
    return {"read": last["rows"], "learned": json.loads(last["state"])["learned"], "refused": letters}


def start_child(function: Callable[[], Any], log: Path) -> int:
    """Run a function in a forked process, which saves the time to import torch; return its id.

    The parent itself never uses polars, whose threads do not survive a fork.
    """
    process = os.fork()
    if process:
        return process
    try:
        with log.open("ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        code = function() or 0
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 70
    os._exit(code)


def run_child(function: Callable[[], Any], log: Path) -> None:
    """Run a function in a process of its own, and wait for it."""
    _, status = os.waitpid(start_child(function, log), 0)
    if status:
        raise SystemExit(log.read_text()[-2000:])


def run_with_kills(words: list[str], kills: int, seconds: tuple[float, float], seed: int, log: Path) -> dict[str, Any]:
    """Run the trainer to its end; kill it at random times until it has been killed ``kills`` times."""
    rng, done, starts = random.Random(seed), 0, 0
    while True:
        starts += 1
        process = start_child(lambda: cli.run(words), log)
        deadline = time.monotonic() + rng.uniform(*seconds)
        ended = 0
        while done < kills and time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                break
            time.sleep(0.005)
        if not ended and done < kills:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            done += 1
            continue
        if not ended:
            _, status = os.waitpid(process, 0)
        if status:
            raise SystemExit(f"the trainer failed: {log.read_text()[-2000:]}")
        return {"kills": done, "starts": starts}


class Segments:
    """Segment files; both runs read the same folder."""

    def __init__(self, folder: Path, spec: StreamSpec, events: int, kills: int) -> None:
        self.folder, self.spec, self.events, self.kills, self.log = folder, spec, events, kills, folder / "log.txt"
        self.feeders: list[int] = []

    def __enter__(self) -> Segments:
        segment = max(1000, self.events // 50)
        run_child(
            lambda: write_stream(self.folder / "segments", self.spec, events=self.events, segment=segment), self.log
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End what is still writing events."""
        for process in self.feeders:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def start(self, run: Path) -> str:
        """Return the address of the source of a run."""
        return str(self.folder / "segments")

    def chunks(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the events in chunks."""
        for first in range(0, self.events, CHUNK):
            yield inject_faults(self.spec, simulate_events(self.spec, first, CHUNK)).to_dicts()


class Kafka(Segments):
    """A topic per run; the producer stays within ``MAX_AHEAD`` events of the last commit, as the mock forgets."""

    def __enter__(self) -> Kafka:
        from tests.helpers.online import MockCluster

        self.cluster = MockCluster().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.cluster.__exit__()

    def start(self, run: Path) -> str:
        self.feeders.append(start_child(lambda: self.feed(run), self.log))
        time.sleep(2.0)  # the first chunk creates the topic
        return f"kafka://{self.cluster.address}/{run.name}"

    def feed(self, run: Path) -> None:
        """Write all events."""
        sent = 0
        for rows in self.chunks():
            wait_for_commits(run, sent)
            self.cluster.send(run.name, rows)
            sent += len(rows)


class Redis(Segments):
    """A stream per run; the server of the second run is killed again and again while events are written."""

    def __enter__(self) -> Redis:
        from tests.helpers.online import RedisServer

        self.server = RedisServer(self.folder / "redis").__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.server.__exit__()

    def start(self, run: Path) -> str:
        with closing(self.server.client()) as client:  # a server that is killed loads only the events of its run
            client.flushall()
            client.bgrewriteaof()
        self.feeders.append(start_child(lambda: self.feed(run), self.log))
        return f"redis://127.0.0.1:{self.server.port}/{run.name}"

    def feed(self, run: Path) -> None:
        """Write all events; in the killed run a thread kills the server at random times."""
        sent, chunks = 0, list(range(0, self.events, CHUNK))
        killed = set(random.Random(1).sample(chunks, min(self.kills, len(chunks)))) if run.name == "killed" else set()
        for first, rows in zip(chunks, self.chunks(), strict=True):
            wait_for_commits(run, sent)
            killer = threading.Timer(random.Random(first).uniform(0, 0.05), self.restart)
            if first in killed:
                killer.start()
            self.server.send(run.name, rows, sent + 1)
            if first in killed:
                killer.join()
            sent += len(rows)

    def restart(self) -> None:
        """Kill the server and start it again."""
        self.server.kill()
        self.server.start()


def wait_for_commits(run: Path, sent: int) -> None:
    """Wait until at most ``MAX_AHEAD`` events were sent after the last commit."""
    while True:
        try:
            committed = StateReader(run).summary()["rows"]
        except StateError:
            committed = 0
        if sent - committed <= MAX_AHEAD:
            return
        time.sleep(0.02)


SOURCES = {"segments": Segments, "kafka": Kafka, "redis": Redis}


def run_campaign(
    source: str,
    events: int,
    kills: int,
    folder: Path,
    *,
    fields: int = 20,
    seed: int = 0,
    seconds: tuple[float, float] = (1.0, 3.0),
    idle: float = 1.0,
) -> dict[str, Any]:
    """Run the trainer unbroken and killed on the same events; return the comparison."""
    times = dict.fromkeys(("dies", "wakes", "drifts"), events // 2)
    spec = StreamSpec(fields, 6, **times, duplicates=0.002, malformed=0.002, seed=seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    like, log = folder / "like", folder / "log.txt"

    def prepare_reference() -> None:
        prepare(simulate_events(spec, 0, 20_000).drop("event"), like, label="click", quiet=True)

    run_child(prepare_reference, log)
    commit = "4" if source != "segments" else str(max(1, events // 500 // 100))
    options = ["--idle", str(idle), "--batch", "500", "--commit-every", commit, "--publish-every", "20", "-q"]
    with SOURCES[source](folder, spec, events, kills) as server:
        runs, started = {}, time.time()
        for name, count in (("unbroken", 0), ("killed", kills)):
            run = folder / name
            command = trainer_command(server.start(run), run, like, options)
            runs[name] = run_with_kills(command, count, seconds, seed, log)
            runs[name]["seconds"] = round(time.time() - started, 1)
            started = time.time()
    first, second = read_state(folder / "unbroken"), read_state(folder / "killed")
    equal = {name: first[name] == second[name] for name in first}
    expected, actual = counted(first), counted(second)
    lost = abs(actual["read"] - actual["learned"] - actual["refused"])
    return {
        **{"source": source, "events": events, "fields": fields, "seed": seed, **runs["killed"]},
        **({"server_kills": kills} if source == "redis" else {}),
        **{"unbroken": expected, "killed": actual, "equal": equal, "all_equal": all(equal.values())},
        "lost_or_doubled": lost + sum(abs(expected[name] - actual[name]) for name in expected),
        "changes": len(first["changes"]),
        "seconds_unbroken": runs["unbroken"]["seconds"],
    }


def main() -> None:
    """Run the campaign and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, default="segments")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 6.0), help="time between start and kill")
    parser.add_argument("--idle", type=float, help="seconds without events after which the trainer ends")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        idle = arguments.idle or (1.0 if arguments.source == "segments" else 20.0)
        where, limits = Path(folder), (arguments.seconds[0], arguments.seconds[1])
        result = run_campaign(arguments.source, arguments.events, arguments.kills, where, seconds=limits, idle=idle)
    out = arguments.out or RESULTS / f"kill_{arguments.source}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
