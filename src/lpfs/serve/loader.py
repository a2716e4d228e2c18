"""Load bundles in a process of its own, so that reading, hashing and checking them does not delay requests.

The process has the lowest priority of the system (``SCHED_IDLE``): it runs when no request does. It reads the weights
into anonymous shared memory (``memfd_create``), compares every digest and every stored row, and hands over the graph
and the memory; the server maps the memory and exchanges one reference. Only on Linux, and with ONNX Runtime.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
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
COMMAND = (  # finds the modules where the server does; with -m the working directory would come first
    "import sys; file, policy, *sys.path[:] = sys.argv[1:]; from lpfs.serve.loader import main; main()"
)
POLL_SECONDS = 0.2
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
    closing: threading.Event = field(default_factory=threading.Event)  # set when the server stops
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _connection: Connection | None = field(default=None, init=False)

    @staticmethod
    def is_supported() -> bool:
        """Return whether a process can hand over what it loads."""
        return hasattr(os, "memfd_create") and all(map(find_spec, ("onnx", "onnxruntime")))

    def start(self) -> Connection:
        """Start the process if it does not run."""
        if self._process is None or self._process.poll() is not None or self._connection is None:
            self.stop()
            self._connection, theirs = Pipe()
            file = str(theirs.fileno())
            try:
                command = [sys.executable, "-c", COMMAND, file, self.policy, *sys.path]
                self._process = subprocess.Popen(command, pass_fds=[int(file)], stdin=subprocess.DEVNULL)
            finally:
                theirs.close()
        return self._connection

    def stop(self) -> None:
        """End the process, and close the connection; no thread may wait for it."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        if connection is not None:
            connection.close()

    def __call__(self, path: Path, before: ServedModel) -> ServedModel:
        """Return a bundle, ready to answer; raise LpfsError if it must be refused.

        The bundle is loaded here if it has another encoder than ``before``, if the model has no graph, and if the
        process was killed or gets no time from other programs.
        """
        try:
            reply, graph, file = self._request(path)
        except (OSError, EOFError, RuntimeError, ValueError):
            self.stop()  # what is left of the reply must not be taken for the next one
            if self.closing.is_set():
                raise LpfsError("the server stops") from None
            reply, graph, file = {"error": None, "weights": None}, b"", -1
        if reply["error"] is not None:
            raise LpfsError(reply["error"])
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

    def _request(self, path: Path) -> tuple[dict[str, Any], bytes, int]:
        """Return the reply of the process, the graph, and the file of the shared memory."""
        connection, deadline = self.start(), time.monotonic() + PATIENCE_SECONDS
        connection.send_bytes(os.fsencode(path.absolute()))
        while not connection.poll(POLL_SECONDS):
            if self.closing.is_set() or time.monotonic() > deadline:
                raise TimeoutError
        reply: dict[str, Any] = json.loads(connection.recv_bytes())
        if reply["weights"] is None:
            return reply, b"", -1
        return reply, connection.recv_bytes(), recv_handle(connection)


def run_loader(connection: Connection) -> None:
    """Load the bundles whose paths arrive, until the server ends."""
    before: ServedModel | None = None
    with suppress(EOFError, OSError):  # the server has ended
        while True:
            before = load_and_send(connection, Path(os.fsdecode(connection.recv_bytes())), before)


def load_and_send(connection: Connection, path: Path, before: ServedModel | None) -> ServedModel | None:
    """Load a bundle and send it, or why it must be refused; return it, or ``before``."""
    try:
        bundle = open_bundle(path)
    except Exception as error:
        send_reply(connection, error=error_text(error))
        return before
    try:
        memory = SharedMemory(2 * sum(entry["bytes"] for entry in bundle.manifest["files"].values()))
    except (OSError, ValueError, OverflowError):  # the server tries without
        send_reply(connection)
        return before
    try:
        try:
            served = load_bundle(bundle, before, allocate=memory.allocate, build_lookup=False)
            weights = describe_weights(served, memory)
        except Exception as error:  # whatever is wrong with a bundle, the server gets one line
            send_reply(connection, error=error_text(error))
            return before
        send_reply(connection, manifest=bundle.manifest, weights=weights, bytes=memory.used)
        if served.graph is not None:
            connection.send_bytes(served.graph.graph)
            send_handle(connection, memory.file, 0)
    finally:
        os.close(memory.file)
    return served


def describe_weights(served: ServedModel, memory: SharedMemory) -> dict[str, Any] | None:
    """Return type, shape and position of the large weights in the shared memory; None if the model has no graph."""
    if served.graph is None:
        return None
    weights = served.graph.weights.items()
    return {name: (str(array.dtype), array.shape, memory.offset_of(array)) for name, array in weights}


def send_reply(connection: Connection, **values: Any) -> None:
    """Send JSON values."""
    connection.send_bytes(json.dumps({"error": None, "weights": None, **values}).encode())


def main() -> None:
    """Run ``COMMAND``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    if sys.argv[2] == "idle":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # not permitted here
            os.nice(19)
    torch.set_num_threads(1)
    run_loader(Connection(int(sys.argv[1])))
