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
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from lpfs import cli
from lpfs.data.prepare import prepare
from lpfs.data.simulate_stream import StreamSpec, simulate_events, write_stream

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.helpers
RESULTS = Path(__file__).parent / "results" / "online"
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
        state = {
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


def segments_source(folder: Path, spec: StreamSpec, events: int, stack: ExitStack) -> str:
    """Write segments; return the address of the source."""
    segment = max(1000, events // 50)
    run_child(lambda: write_stream(folder / "segments", spec, events=events, segment=segment), folder / "log.txt")
    return str(folder / "segments")


def kafka_source(folder: Path, spec: StreamSpec, events: int, stack: ExitStack) -> str:
    """Start a mock cluster and send events."""
    from tests.helpers.online import MockCluster

    cluster = stack.enter_context(MockCluster())
    run_child(lambda: cluster.send("clicks", rows_of(spec, events)), folder / "log.txt")
    return f"kafka://{cluster.address}/clicks"


def redis_source(folder: Path, spec: StreamSpec, events: int, stack: ExitStack) -> str:
    """Start a redis-server and send events; it is killed a few times while they are written."""
    from tests.helpers.online import RedisServer

    server = stack.enter_context(RedisServer(folder / "redis"))
    run_child(lambda: server.send("clicks", rows_of(spec, events), kills=min(10, events // 1000)), folder / "log.txt")
    return f"redis://127.0.0.1:{server.port}/clicks"


SOURCES = {"segments": segments_source, "kafka": kafka_source, "redis": redis_source}


def rows_of(spec: StreamSpec, events: int) -> Any:
    """Yield the events of a stream as rows."""
    for first in range(0, events, 10_000):
        yield from simulate_events(spec, first, min(10_000, events - first)).iter_rows(named=True)


def run_campaign(
    source: str,
    events: int,
    kills: int,
    folder: Path,
    *,
    fields: int = 20,
    seed: int = 0,
    seconds: tuple[float, float] = (1.0, 6.0),
) -> dict[str, Any]:
    """Run the trainer unbroken and killed on the same events; return the comparison."""
    spec = StreamSpec(
        fields, 6, dies=events // 2, wakes=events // 2, drifts=events // 2, duplicates=0.002, malformed=0.002, seed=seed
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    like = folder / "like"
    first = lambda: simulate_events(spec, 0, 20_000).drop("event")  # noqa: E731
    run_child(lambda: prepare(first(), like, label="click", quiet=True) and None, folder / "log.txt")
    options = [
        "--idle",
        "1",
        "--batch",
        "500",
        "--commit-every",
        str(max(1, events // 500 // 100)),
        "--publish-every",
        "20",
        "-q",
    ]
    with ExitStack() as stack:
        address = SOURCES[source](folder, spec, events, stack)
        start = time.time()
        run_with_kills(
            trainer_command(address, folder / "unbroken", like, options), 0, seconds, seed, folder / "log.txt"
        )
        unbroken_seconds = time.time() - start
        runs = run_with_kills(
            trainer_command(address, folder / "killed", like, options), kills, seconds, seed, folder / "log.txt"
        )
    first, second = read_state(folder / "unbroken"), read_state(folder / "killed")
    equal = {name: first[name] == second[name] for name in first}
    expected, actual = counted(first), counted(second)
    return {
        **{"source": source, "events": events, "fields": fields, "seed": seed, **runs},
        **{"unbroken": expected, "killed": actual, "equal": equal, "all_equal": all(equal.values())},
        "lost_or_doubled": abs(actual["read"] - actual["learned"] - actual["refused"])
        + sum(abs(expected[name] - actual[name]) for name in expected),
        "unbroken_seconds": round(unbroken_seconds, 1),
    }


def main() -> None:
    """Run the campaign and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, default="segments")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 6.0), help="time between start and kill")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run_campaign(
            arguments.source, arguments.events, arguments.kills, Path(folder), seconds=tuple(arguments.seconds)
        )
    out = arguments.out or RESULTS / f"kill_{arguments.source}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
