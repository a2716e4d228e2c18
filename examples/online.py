"""A stream, a trainer and a server on this machine for two minutes, and one page to watch.  (make demo-online)

A simulator writes events of 24 fields in segments. One field stops to predict clicks at T1, another starts to at T2,
and from T3 on a third has ever more new values. The trainer predicts every event before it learns from it, closes and
reopens fields, and publishes the model of the selected ones; the server swaps to each new model while requests come
in. The demo ends by itself and prints what happened.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lpfs.data.prepare import prepare
from lpfs.data.simulate_stream import StreamSpec, simulate_events
from lpfs.online.bundle import current
from lpfs.online.state import StateReader

parser = argparse.ArgumentParser(description="Online selection on a simulated stream.")
parser.add_argument("--seconds", type=float, default=120.0, help="about how long the demo takes")
parser.add_argument("--rate", type=int, default=5000, help="events per second")
parser.add_argument("--port", type=int, default=8000, help="of the server, on 127.0.0.1")
parser.add_argument("--out", type=Path, help="directory of segments and run; by default a new temporary one")
given = parser.parse_args()
FIELDS = 24


def start(stack: ExitStack, *words: object) -> subprocess.Popen[bytes]:
    """Start a command of lpfs, which ends at the latest with the demo."""
    process = subprocess.Popen([sys.executable, "-m", "lpfs", *map(str, words)])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def send_request(rows: list[dict[str, Any]]) -> str:
    """Send rows to the server; return the version of the model that answered."""
    body = json.dumps({"rows": rows}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{given.port}/predict", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.load(answer)["version"])


def main() -> None:
    out = given.out or Path(tempfile.mkdtemp(prefix="lpfs-online-"))
    events = int(given.rate * max(20.0, given.seconds - 20.0))
    times = [int(share * events) for share in (0.5, 0.7, 0.6)]
    spec = StreamSpec(FIELDS, dies=times[0], wakes=times[1], drifts=times[2])
    history = simulate_events(spec, 0, 20_000)
    prepare(history.drop("event"), out / "like", label="click", quiet=True)
    segments, run, answers, failed = out / "segments", out / "run", Counter[str](), 0
    segments.mkdir(parents=True)
    with ExitStack() as stack:
        schedule = ("--fields", FIELDS, "--events", ",".join(map(str, times)))
        simulator = start(
            *(stack, "simulate", "--stream", "--rows", events, "--rate", given.rate, "--segment", given.rate // 2),
            *(*schedule, "--out", segments, "-q"),
        )
        trainer = start(
            *(stack, "online", segments, run, "--like", out / "like", "--key", "event", "--idle", 3),
            *("--batch", 512, "--commit-every", 20),
        )
        while current(run / "bundles") is None and trainer.poll() is None:
            time.sleep(0.2)
        server = start(stack, "serve", run / "bundles", "--port", given.port)
        print(f"watch http://127.0.0.1:{given.port}/  (all files are in {out})", flush=True)
        rows, ends = history.drop("click", "event").head(5).to_dicts(), time.monotonic() + given.seconds + 60
        ready = False
        while not ready and server.poll() is None and time.monotonic() < ends:
            with suppress(OSError):
                ready = bool(send_request(rows))
            time.sleep(0.1)
        while trainer.poll() is None and time.monotonic() < ends:
            try:
                answers[send_request(rows)] += 1
            except OSError as error:
                print(f"a request failed: {error}")
                failed += 1
            time.sleep(0.05)
        simulator.wait()
    report(run, spec, answers, failed)


def report(run: Path, spec: StreamSpec, answers: Counter[str], failed: int) -> None:
    """Print what happened."""
    reader = StateReader(run)
    summary, metrics, kept = reader.summary(), reader.metrics(), set(reader.summary()["kept"])
    useful = spec.useful(summary["rows"])
    print(
        f"\n{summary['rows']:,} events, {summary['commits']} commits, AUC of the last window {metrics[-1]['auc']:.4f}"
    )
    print(f"the field 'dies' died at event {spec.dies:,}, 'wakes' woke at {spec.wakes:,}; changes of these two:")
    for change in reader.changes(1000):
        if change["field"] in ("dies", "wakes"):
            interval = f"[{change['low']:.4f}, {change['high']:.4f}]"
            print(f"  event {change['rows']:>9,}: {change['action']:<8} {change['field']:<6} gain {interval}")
    print(f"'drifts' got new values from event {spec.drifts:,} on; alarms of fields:")
    for alarm in reader.alarms(1000):
        if alarm["field"]:
            print(f"  event {alarm['rows']:>9,}: {alarm['field']:<8} {alarm['message']}")
    print(f"selected at the end: {len(kept)} fields, of {len(useful)} useful ones {len(kept & useful)}")
    print(f"{sum(answers.values()):,} requests answered by {len(answers)} versions of the model, {failed} failed")


if __name__ == "__main__":
    main()
