"""Servers for sources of events: librdkafka's mock cluster and a redis-server, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

MOCK = """
import sys, time
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
print(",".join(str(broker).split("/")[0] for broker in producer.list_topics(timeout=10).brokers.values()), flush=True)
sys.stdin.read()
"""


class MockCluster:
    """A Kafka cluster of one broker in memory; it keeps about 5 MB per partition."""

    def __enter__(self) -> MockCluster:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the mock cluster did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.__dict__.pop("producer", None)  # its threads end while the cluster still answers
        self._process.kill()
        self._process.communicate()

    @cached_property
    def producer(self) -> Any:
        """A client that writes events; of the process that uses it first."""
        from confluent_kafka import Producer

        return Producer({"bootstrap.servers": self.address, "enable.idempotence": True, "linger.ms": 5})

    def send(self, topic: str, rows: Iterable[Mapping[str, Any] | bytes], partition: int = 0) -> None:
        """Write rows, in order."""
        producer = self.producer
        for row in rows:
            producer.produce(topic, row if isinstance(row, bytes) else json.dumps(row), partition=partition)
            producer.poll(0)
        assert producer.flush(30) == 0


def redis_program() -> str | None:
    """Return the path of redis-server; None if it is not installed."""
    return shutil.which("redis-server")


def free_port() -> int:
    """Return a free port below those of clients: one of these would connect to itself while the server is down."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class RedisServer:
    """A redis-server that writes every command to disk before it answers; ``kill`` ends it by SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server; it loads what it had written."""
        program = redis_program()
        assert program is not None
        options = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), "--dir", str(self.folder), *options], stdout=subprocess.DEVNULL
        )
        (self.folder / "pid").write_text(str(self._process.pid))
        with closing(self.client()) as client:
            for _ in range(1200):  # it loads what was written: seconds for a million events
                with suppress(Exception):
                    client.ping()
                    return
                time.sleep(0.05)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        """End the server by SIGKILL, also if another process started it."""
        os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
        with suppress(ChildProcessError, AttributeError):
            self._process.wait()

    def client(self) -> Any:
        """Return a client that does not repeat requests by itself."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))

    def send(self, stream: str, rows: Sequence[Mapping[str, Any] | bytes], first: int = 1) -> None:
        """Write rows with ids first-0, first+1-0, …; requests without an answer are repeated, and not written twice."""
        import redis

        end = time.monotonic() + 60
        with closing(self.client()) as client:
            while True:
                pipeline = client.pipeline()  # a transaction: either all rows are written or none
                for number, row in enumerate(rows, first):
                    data = row if isinstance(row, bytes) else json.dumps(row)
                    pipeline.xadd(stream, {"json": data}, id=f"{number}-0")
                try:
                    answers = pipeline.execute(raise_on_error=False)
                except (
                    redis.exceptions.ConnectionError,
                    redis.exceptions.TimeoutError,
                    redis.exceptions.ExecAbortError,
                ):
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
                    continue
                errors = [answer for answer in answers if isinstance(answer, Exception)]
                if any(isinstance(error, redis.exceptions.ConnectionError) for error in errors):
                    continue
                for error in errors:
                    if "equal or smaller" not in str(error):  # it was written before the answer was lost
                        raise error
                return
