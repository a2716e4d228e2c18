"""Load on ``lpfs serve`` at 127.0.0.1: swaps of models under open-loop load, throughput against plain ONNX Runtime.

    python benchmarks/serve_load.py swaps --requests 1000000 --swaps 1000 --out benchmarks/results/serve_swaps.json
    python benchmarks/serve_load.py throughput --out benchmarks/results/serve_throughput.json

``swaps`` measures the capacity in a closed loop, then sends requests at half of it on a fixed schedule (a late answer
delays no other request, and latency counts from the scheduled time). Blocks without and with swaps alternate in one
run; in the latter a swap begins every ``1 / --swaps-per-second`` seconds, or when the one before it has been seen, and
the result has the rate that was reached. Every answer is compared with the prediction of the version that it names.
``throughput`` runs ``lpfs serve`` and a bare application (JSON, ``lpfs export`` file with preprocessing in ONNX
Runtime, no checks) behind the same uvicorn, in turns, and the engines alone. CPU seconds of the server are those of its
process, so that a busy machine matters less.
The script sends to servers that it started itself, and stops after ``--max-seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

TOLERANCE = 1e-5  # of a probability
CONNECTIONS = 32
CAPACITY_SECONDS = 6.0
HEADER_END, LENGTH = b"\r\n\r\n", re.compile(rb"content-length: (\d+)", re.IGNORECASE)


# ---------------------------------------------------------------- models


def build(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Publish ``args.versions`` models of the fields; return the rows of requests and what each version predicts.

    Every fourth version reads one field less.
    """
    import polars as pl
    import torch

    from lpfs import prepare
    from lpfs.data.raw_rows import RawRowEncoder
    from lpfs.models import MLP
    from lpfs.online.bundle import publish
    from lpfs.serve.engine import load_bundle

    rng = np.random.default_rng(0)
    values = args.ids // args.fields
    texts = np.array([f"v{number:07d}" for number in range(values)])
    columns = {f"field_{number:02d}": texts[rng.permutation(values)] for number in range(args.fields)}
    table = pl.DataFrame({"day": np.zeros(values, int), "click": rng.integers(0, 2, values), **columns})
    kinds = dict.fromkeys(columns, "categorical")
    dataset = prepare(table, work / "data", label="click", time="day", fields=kinds, min_count=1, train=1, quiet=True)
    popular = np.minimum(rng.zipf(1.2, (args.pool, args.fields)) - 1, values - 1)  # the popular values of each field
    names = list(columns)
    rows = [{name: str(texts[value]) for name, value in zip(names, line, strict=True)} for line in popular]
    encoder, expected = RawRowEncoder(dataset), {}
    for version in range(args.versions):
        torch.manual_seed(version)
        fields = names[:-1] if version % 4 == 3 else names
        model = MLP(dataset.schema.subset(fields), dim=args.dim)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        bundle = publish(
            work / "bundles",
            model,
            encoder,
            sample_rows=rows[:64],
            certificate={},
            metadata={"version": version},
            keep=args.versions,
        )
        served = load_bundle(bundle)
        batch = served.encoder.encode(rows).batch
        expected[bundle.version] = torch.sigmoid(served.logits(batch)).numpy()
    (work / "bundles" / "CURRENT").write_text("000001\n")
    return {"rows": rows, "expected": expected}


# ---------------------------------------------------------------- servers


@contextmanager
def start(command: Sequence[str], nice: int) -> Iterator[tuple[int, int]]:
    """Run a server; yield its process and port, which it prints as http://127.0.0.1:PORT/."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    process = subprocess.Popen(
        ["nice", "-n", str(nice), sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    drain = Thread(target=process.stderr.read, daemon=True)  # a full pipe would block the thread that swaps and logs
    try:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                drain.start()
                yield process.pid, int(found[1])
                break
        else:
            raise RuntimeError(f"{command} did not start")
    finally:
        process.terminate()
        process.wait(30)
        if drain.is_alive():
            drain.join()
        process.stderr.close()


def serve_plain(file: str) -> None:
    """Serve an ONNX file that takes raw values, with nothing else: what one would write by hand."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    onnxruntime: Any = __import__("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    async def predict(request: Request) -> Response:
        rows = json.loads(await request.body())["rows"]
        feeds = {name: np.array([row[name] for row in rows], object) for name in names}
        [probability] = session.run(["probability"], feeds)
        return Response(json.dumps({"probability": probability.tolist()}), media_type="application/json")

    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])])
    config = uvicorn.Config(app, port=0, access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def children_cpu_seconds(pid: int) -> float:
    """Return the CPU time of the processes that a process has started: of the loader of a server."""
    return sum(cpu_seconds(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


# ---------------------------------------------------------------- load


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.buffer = b""
        self.done: Callable[[int, bytes], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, data: bytes, done: Callable[[int, bytes], None]) -> None:
        """Send a request; ``done`` gets status and body, status 0 if the connection is lost."""
        self.done, self.buffer = done, b""
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(HEADER_END)
        if found and (length := LENGTH.search(head)) and len(body) >= int(length[1]):
            self._finish(int(head[9:12]), body)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(0, b"")

    def _finish(self, status: int, body: bytes) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(status, body)


class Client:
    """Requests of a pool, over several connections to one server."""

    def __init__(self, port: int, bodies: Sequence[bytes], check: Callable[[int, int, bytes], str]) -> None:
        self.port, self.check, self.next = port, check, 0
        self.requests = [
            b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
            for body in bodies
        ]
        self.idle: deque[Connection] = deque()  # used in turn: the server closes idle connections after 5 seconds
        self.waiting: deque[tuple[float, int]] = deque()
        self.latencies: list[float] = []
        self.outcomes: Counter[str] = Counter()

    async def connect(self) -> None:
        """Open new connections."""
        loop = asyncio.get_running_loop()
        while self.idle:
            self.idle.pop().transport.close()
        for _ in range(CONNECTIONS):
            self.idle.append((await loop.create_connection(Connection, "127.0.0.1", self.port))[1])

    def submit(self, scheduled: float) -> None:
        """Send the next request of the pool, now or when a connection is free."""
        self.waiting.append((scheduled, self.next % len(self.requests)))
        self.next += 1
        if self.idle:
            self._send(self.idle.popleft())

    def _send(self, connection: Connection) -> None:
        scheduled, index = self.waiting.popleft()

        def done(status: int, body: bytes) -> None:
            self.latencies.append(time.perf_counter() - scheduled)
            self.outcomes[self.check(index, status, body)] += 1
            if self.waiting:
                self._send(connection)
            else:
                self.idle.append(connection)

        connection.send(self.requests[index], done)

    async def drain(self) -> None:
        """Wait until everything is answered, at most 30 seconds."""
        end = time.perf_counter() + 30
        while len(self.idle) < CONNECTIONS and time.perf_counter() < end:
            await asyncio.sleep(0.002)

    async def closed(self, seconds: float, parallel: int = 8) -> float:
        """Keep some requests in flight; return the rate."""
        begin, first = time.perf_counter(), len(self.latencies)
        while time.perf_counter() < begin + seconds:
            while CONNECTIONS - len(self.idle) + len(self.waiting) < parallel:
                self.submit(time.perf_counter())
            await asyncio.sleep(0)
        await self.drain()
        return (len(self.latencies) - first) / (time.perf_counter() - begin)

    async def open(self, rate: float, seconds: float) -> list[float]:
        """Send at a fixed rate; return the latencies from the scheduled times."""
        begin, first, sent = time.perf_counter(), len(self.latencies), 0
        while sent < rate * seconds:
            due = int((time.perf_counter() - begin) * rate) + 1
            while sent < min(due, rate * seconds):
                self.submit(begin + sent / rate)
                sent += 1
            await asyncio.sleep(max(0.0, min(0.001, begin + sent / rate - time.perf_counter())))
        await self.drain()
        return self.latencies[first:]


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    """Return quantiles in milliseconds."""
    if not latencies:
        return {}
    return {
        f"p{percent:g}": round(1000 * float(np.percentile(latencies, percent)), 3) for percent in (50, 90, 99, 99.9)
    }


# ---------------------------------------------------------------- swaps


async def run_swaps(args: argparse.Namespace, work: Path, world: dict[str, Any], pid: int, port: int) -> dict[str, Any]:
    """Alternate blocks without and with swaps until all requests and swaps are done."""
    seen: list[str] = []  # versions in the order of the answers

    def check(index: int, status: int, body: bytes) -> str:
        if status != 200:
            return f"failed {status}"
        values = json.loads(body)
        if not seen or seen[-1] != values["version"]:
            seen.append(values["version"])
        right = abs(values["probability"][0] - world["expected"][values["version"]][index]) <= TOLERANCE
        return "right" if right else "mixed"

    client = Client(port, [json.dumps({"rows": [row]}).encode() for row in world["rows"]], check)
    await client.connect()
    await client.closed(2.0)
    capacity = await client.closed(CAPACITY_SECONDS)
    client.outcomes.clear()
    rate, end = args.load * capacity, time.perf_counter() + args.max_seconds
    current, versions = work / "bundles" / "CURRENT", sorted(world["expected"])
    blocks: list[dict[str, Any]] = []
    latencies: dict[str, list[float]] = {"steady": [], "swapping": []}
    swaps = 0

    async def swap(begin: float) -> int:
        """Swap at the requested rate for one block; return how often."""
        nonlocal swaps
        first = swaps
        while (now := time.perf_counter()) < min(begin + args.block, end):
            target = versions[(swaps + 1) % len(versions)]
            await asyncio.to_thread(point_to, current, target)
            while seen[-1] != target:
                await asyncio.sleep(0.005)
                if time.perf_counter() > end:
                    return swaps - first
            swaps += 1
            await asyncio.sleep(max(0.0, now + 1 / args.swaps_per_second - time.perf_counter()))
        return swaps - first

    def cpu_times() -> tuple[float, float, float]:
        return time.perf_counter(), cpu_seconds(pid), children_cpu_seconds(pid)

    while (len(client.latencies) < args.requests or swaps < args.swaps) and time.perf_counter() < end:
        for phase in ("steady", "swapping"):
            before = cpu_times()
            swapper = asyncio.create_task(swap(before[0])) if phase == "swapping" else None
            measured = await client.open(rate, args.block)
            while swapper is not None and not swapper.done():  # the last swap of a block belongs to it
                measured += await client.open(rate, 0.2)
            done = await swapper if swapper else 0
            latencies[phase] += measured
            spent = (round(after - first, 2) for first, after in zip(before, cpu_times(), strict=True))
            times = dict(zip(("seconds", "cpu_seconds", "loader_seconds"), spent, strict=True))
            blocks.append({"phase": phase, "swaps": done, **times, **quantiles(measured)})
    count, steady, swapping = sum(client.outcomes.values()), blocks[::2], blocks[1::2]
    result: dict[str, Any] = {
        "capacity_per_second": round(capacity, 1),
        "rate_per_second": round(rate, 1),
        "requests": count,
        "swaps": swaps,
        "swaps_per_second": round(swaps / total(swapping, "seconds"), 2),
        "failed": count - client.outcomes["right"] - client.outcomes["mixed"],
        "mixed": client.outcomes["mixed"],
        "steady": quantiles(latencies["steady"]),
        "swapping": quantiles(latencies["swapping"]),
        "complete": count >= args.requests and swaps >= args.swaps,
    }
    result["p99_ratio"] = round(result["swapping"]["p99"] / result["steady"]["p99"], 3)
    pairs = [after["p99"] / before["p99"] for before, after in zip(steady, swapping, strict=True)]
    quartiles = [round(float(value), 3) for value in np.percentile(pairs, (25, 50, 75))]
    result["p99_ratio_of_pairs"] = {"median": quartiles[1], "quartiles": quartiles[::2], "pairs": len(pairs)}
    idle = total(steady, "cpu_seconds") / total(steady, "seconds")  # without swaps, of one second
    server = total(swapping, "cpu_seconds") - idle * total(swapping, "seconds")
    cpu = {"server": server, "loader": total(blocks, "loader_seconds")}
    result["cpu_ms_per_swap"] = {name: round(1000 * seconds / max(1, swaps), 1) for name, seconds in cpu.items()}
    return {**result, "blocks": blocks}


def point_to(current: Path, version: str) -> None:
    """Replace CURRENT, in a thread: the file system may block for longer than requests may wait."""
    temporary = current.with_name(".next")
    temporary.write_text(f"{version}\n")
    temporary.replace(current)


def total(blocks: list[dict[str, Any]], name: str) -> float:
    """Return the sum of one number of several blocks."""
    return float(sum(block[name] for block in blocks))


# ---------------------------------------------------------------- throughput


async def run_throughput(
    args: argparse.Namespace, world: dict[str, Any], servers: dict[str, tuple[int, int]]
) -> list[dict[str, Any]]:
    """Measure the servers in turns, for each number of rows per request."""
    results = []
    expected = world["expected"]["000001"]
    for size in args.rows:
        groups = [range(first, first + size) for first in range(0, len(world["rows"]) - size + 1, size)]
        bodies = [json.dumps({"rows": [world["rows"][index] for index in group]}).encode() for group in groups]

        def check(index: int, status: int, body: bytes, groups: Sequence[range] = groups) -> str:
            if status != 200:
                return "failed"
            close = np.abs(np.array(json.loads(body)["probability"]) - expected[groups[index]]) <= TOLERANCE
            return "right" if bool(close.all()) else "wrong"

        clients = {name: Client(port, bodies, check) for name, (_, port) in servers.items()}
        for client in clients.values():
            await client.connect()
            await client.closed(1.0)
        rounds = []
        for number in range(args.rounds):
            order = list(clients) if number % 2 else list(clients)[::-1]
            measured: dict[str, Any] = {}
            for name in order:
                client, pid = clients[name], servers[name][0]
                await client.connect()
                first, cpu = len(client.latencies), cpu_seconds(pid)
                rate = await client.closed(args.seconds)
                count = len(client.latencies) - first
                measured[name] = {
                    "per_second": round(rate, 1),
                    "cpu_us_per_request": round(1e6 * (cpu_seconds(pid) - cpu) / count, 1),
                    **quantiles(client.latencies[first:]),
                }
            rounds.append(measured)
        outcome = {name: dict(client.outcomes) for name, client in clients.items()}
        ratios = {
            key: [measured["serve"][key] / measured["plain"][key] for measured in rounds]
            for key in ("per_second", "cpu_us_per_request")
        }
        results.append(
            {
                "rows_per_request": size,
                "throughput_of_plain": round(float(np.median(ratios["per_second"])), 3),
                "throughput_of_plain_by_cpu": round(1 / float(np.median(ratios["cpu_us_per_request"])), 3),
                "answers": outcome,
                "rounds": rounds,
            }
        )
        print(json.dumps({key: value for key, value in results[-1].items() if key != "rounds"}), flush=True)
    return results


def measure_engines(bundle: Path, file: Path, rows: list[dict[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return CPU microseconds of each way to predict rows, and of encoding them."""
    import torch

    from lpfs.export import export
    from lpfs.export.parity import raw_inputs
    from lpfs.export.preprocessing import build_columns
    from lpfs.online.bundle import open_bundle
    from lpfs.serialization import load
    from lpfs.serve.engine import load_bundle

    onnxruntime: Any = __import__("onnxruntime")
    torch.set_num_threads(1)
    served, model = load_bundle(open_bundle(bundle)), load(bundle / "model").eval()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    batch = served.encoder.encode(rows[:256]).batch
    with tempfile.TemporaryDirectory() as folder:
        ids_file = export(model, Path(folder) / "ids.onnx", rows=batch).path
        by_ids = onnxruntime.InferenceSession(str(ids_file), options, providers=["CPUExecutionProvider"])
        by_text = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        columns = build_columns(model.reads, None)
        names = [item.name for item in by_text.get_inputs()]
        results = []
        for size in sizes:
            part = rows[:size]
            batch = served.encoder.encode(part).batch
            ids = raw_inputs(columns, batch)
            texts = {name: np.array([row[name] for row in part], object) for name in names}
            contenders: dict[str, Callable[[], Any]] = {
                "serve: encode": lambda part=part: served.encoder.encode(part),  # type: ignore[misc]
                "serve: onnxruntime, ids as a matrix": lambda batch=batch: served.logits(batch),  # type: ignore[misc]
                "torch": lambda batch=batch: plain_torch(model, batch),  # type: ignore[misc]
                "onnxruntime, lpfs export of ids": lambda ids=ids: by_ids.run(["logit"], ids),  # type: ignore[misc]
                "plain: onnxruntime, lpfs export of raw values": lambda texts=texts: by_text.run(["logit"], texts),  # type: ignore[misc]
            }
            best = dict.fromkeys(contenders, float("inf"))
            for _ in range(7):
                for name, run in contenders.items():
                    begin, count = time.process_time(), max(20, 2000 // size)
                    for _ in range(count):
                        run()
                    best[name] = min(best[name], (time.process_time() - begin) / count)
            results.append({"rows": size, "cpu_us": {name: round(1e6 * value, 1) for name, value in best.items()}})
    return results


def plain_torch(model: Any, batch: Any) -> Any:
    """Run the torch model."""
    import torch

    with torch.inference_mode():
        return model(batch)


# ---------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("swaps", "throughput", "plain"))
    parser.add_argument("file", nargs="?", help="plain: the ONNX file to serve")
    parser.add_argument("--fields", type=int, default=40)
    parser.add_argument("--ids", type=int, default=1_000_000, help="ids of all fields together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--versions", type=int, default=8, help="different models; every fourth reads a field less")
    parser.add_argument("--pool", type=int, default=2048, help="different rows")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--swaps-per-second", type=float, default=4.0, help="in the blocks with swaps, at most")
    parser.add_argument("--load", type=float, default=0.5, help="share of the capacity")
    parser.add_argument("--block", type=float, default=5.0, help="seconds of a block")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="throughput: rows per request")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="throughput: of one measurement")
    parser.add_argument("--max-seconds", type=float, default=3600.0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "plain":
        serve_plain(args.file)
        return
    os.nice(args.nice)
    with tempfile.TemporaryDirectory(prefix="lpfs-serve-") as folder:
        work = Path(folder)
        world = build(work, args)
        serve = ["-m", "lpfs", "serve", str(work / "bundles"), "--port", "0", "--poll", "0.05"]
        result: dict[str, Any] = {
            "command": " ".join(["python", "benchmarks/serve_load.py", *sys.argv[1:]]),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "load_average": os.getloadavg()[0],
            "settings": {key: value for key, value in vars(args).items() if key not in ("out", "file")},
        }
        if args.what == "swaps":
            with start(serve, 0) as (pid, port):
                result |= asyncio.run(run_swaps(args, work, world, pid, port))
        else:
            from lpfs.export import export_run

            bundle = work / "bundles" / "000001"
            file = export_run(bundle, work / "model.onnx", dataset=bundle / "encoder").path
            result["engines"] = measure_engines(bundle, file, world["rows"], (1, 8, 64, 512))
            print(json.dumps(result["engines"]), flush=True)
            with start(serve, 0) as first, start([__file__, "plain", str(file)], 0) as second:
                result["servers"] = asyncio.run(run_throughput(args, world, {"serve": first, "plain": second}))
        print(json.dumps({key: value for key, value in result.items() if key not in ("blocks", "servers")}, indent=1))
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
