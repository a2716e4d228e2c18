"""Load bundles in a process of its own, so that reading, hashing and checking them does not delay requests.

The process has the lowest priority of the system (``SCHED_IDLE``): it runs when no request does. It reads the weights
into anonymous shared memory (``memfd_create``), compares every digest and every stored row, and hands over the graph
and the memory; the server maps the memory and exchanges one reference. Only where Linux is the system.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lpfs.data.store.format import AnyArray
from lpfs.errors import LpfsError
from lpfs.export.session import SessionGraph, make_session
from lpfs.online.bundle import Bundle, open_bundle
from lpfs.serve.engine import ServedModel, error_text, load_bundle

ALIGNMENT = 64  # bytes
PATIENCE_SECONDS = 10.0  # after which the server loads a bundle itself
STOP_SECONDS = 2.0


class SharedMemory:
    """Anonymous memory that another process can map; tensors are allocated in it one after another."""

    def __init__(self, size: int) -> None:
        self.file, self.size, self.used = os.memfd_create("lpfs-weights"), size, 0
        try:
            os.ftruncate(self.file, size)  # pages take memory when they are written
            self._map = mmap.mmap(self.file, size)
        except BaseException:
            os.close(self.file)
            raise
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor."""
        start, count = -(-self.used // ALIGNMENT) * ALIGNMENT, math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        self.used = start + count * dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def offset_of(self, array: AnyArray) -> int:
        """Return where an array begins; one that is elsewhere is copied into this memory."""
        if not 0 <= array.ctypes.data - self._address < self.size:
            source = torch.from_numpy(array)
            array = self.allocate(source.shape, source.dtype).copy_(source).numpy()
        return int(array.ctypes.data - self._address)


@dataclass(eq=False)
class LoaderProcess:
    """The process that loads bundles, seen from the server. It is started again after it has ended for any reason."""

    policy: str = "idle"  # how it is scheduled: "idle", or "other" as the server
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _connection: Connection | None = field(default=None, init=False)

    def start(self) -> Connection:
        """Start the process if it does not run."""
        if self._process is None or self._process.poll() is not None or self._connection is None:
            self.stop()
            self._connection, theirs = Pipe()
            command = [sys.executable, "-m", "lpfs.serve.loader", str(theirs.fileno()), self.policy]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
        return self._connection

    def kill(self) -> None:
        """Kill the process; a thread that waits for it goes on at once, and loads the bundle itself."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process, and close the connection; no thread may wait for it."""
        self.kill()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def __call__(self, path: Path, before: ServedModel) -> ServedModel:
        """Return a bundle, ready to answer; raise LpfsError if it must be refused.

        A bundle with another encoder than ``before`` is loaded here, and so is a model that has no graph.
        """
        try:
            connection = self.start()
            connection.send_bytes(os.fsencode(path.absolute()))
            if not connection.poll(PATIENCE_SECONDS):
                raise TimeoutError
            reply = json.loads(connection.recv_bytes())
            if reply["error"] is not None:
                raise LpfsError(reply["error"])
            if reply["weights"] is not None:
                graph, file = connection.recv_bytes(), recv_handle(connection)
        except (OSError, EOFError):  # the process was killed, or other programs leave it no time
            self.stop()
            reply = {"weights": None}
        if reply["weights"] is None:
            return load_bundle(open_bundle(path), before)
        try:
            memory = mmap.mmap(file, reply["bytes"], prot=mmap.PROT_READ)
        finally:
            os.close(file)
        bundle = Bundle(path, reply["manifest"])
        if bundle.encoder_files != before.bundle.encoder_files:
            return load_bundle(bundle, before)
        weights = {
            name: np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
            for name, (dtype, shape, offset) in reply["weights"].items()
        }
        encoder = before.vocabularies.subset(bundle.fields)
        session_graph = SessionGraph(graph, weights, encoder.schema)
        served = ServedModel(bundle, encoder, before.vocabularies, make_session(session_graph), session_graph)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()  # maps the pages, which requests would do one by one
        served.logits(encoder.encode([dict.fromkeys(bundle.fields)]).batch)
        return served


def run_loader(connection: Connection) -> None:
    """Load the bundles whose paths arrive, until the server ends."""
    before: ServedModel | None = None
    with suppress(EOFError, ConnectionError):  # the server has ended
        while True:
            path = Path(os.fsdecode(connection.recv_bytes()))
            try:
                bundle = open_bundle(path)
                memory = SharedMemory(2 * sum(entry["bytes"] for entry in bundle.manifest["files"].values()))
                try:
                    before = load_bundle(bundle, before, allocate=memory.allocate, build_lookup=False)
                    send_bundle(connection, before, memory)
                finally:
                    os.close(memory.file)
            except Exception as error:  # whatever is wrong with a bundle, the server gets one line
                send_reply(connection, error=error_text(error))


def send_bundle(connection: Connection, served: ServedModel, memory: SharedMemory) -> None:
    """Send a loaded bundle."""
    if served.graph is None:
        send_reply(connection)
        return
    weights = {
        name: (str(array.dtype), array.shape, memory.offset_of(array)) for name, array in served.graph.weights.items()
    }
    send_reply(connection, manifest=served.bundle.manifest, weights=weights, bytes=memory.used)
    connection.send_bytes(served.graph.graph)
    send_handle(connection, memory.file, 0)


def send_reply(connection: Connection, **values: Any) -> None:
    """Send JSON values."""
    connection.send_bytes(json.dumps({"error": None, "weights": None, **values}).encode())


def main() -> None:
    """Run as ``python -m lpfs.serve.loader FD POLICY``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    if sys.argv[2] == "idle":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    run_loader(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
