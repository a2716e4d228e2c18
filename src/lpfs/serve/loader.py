"""Load bundles in a process of its own, so that reading, hashing and checking them does not delay requests.

The process has the lowest priority of the system (``SCHED_IDLE``), and pauses often, because a busy core slows down
the cores that share caches or execution units with it. It reads the weights into anonymous shared memory
(``memfd_create``), compares every digest and every stored row, and hands over the graph and the memory; the server
maps the memory and exchanges one reference. Memory of a model that is no longer used is filled again: to make and
release its pages takes most of the time of a swap. Only on Linux, and with ONNX Runtime.
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
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch

from lpfs.data.store.format import AnyArray
from lpfs.errors import LpfsError
from lpfs.export.session import RuntimeModel, SessionGraph
from lpfs.online.bundle import Bundle, open_bundle
from lpfs.serve.engine import ServedModel, error_text, load_bundle

ALIGNMENT = 64  # bytes
COMMAND = (  # finds the modules where the server does; with -m the working directory would come first
    "import sys; file, policy, *sys.path[:] = sys.argv[1:]; from lpfs.serve.loader import main; main()"
)
GRAPH = ""  # name of the graph among the weights
NO_ARRAYS: dict[str, Any] = {"error": None, "arrays": None}  # a reply: the server loads the bundle itself
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # after which the server loads a bundle itself
STOP_SECONDS = 2.0
WORK_SECONDS, PAUSE_SECONDS = 0.001, 0.004  # in turns, while a bundle is loaded, …
PACED_SECONDS = 10.0  # … but no longer than this: a large one must be there before PATIENCE_SECONDS
ATTEMPTS = 2  # processes that a bundle may crash until it is refused
Memory = tuple[mmap.mmap, ref[AnyArray]]  # the second is alive as long as an array in this memory


class SharedMemory:
    """Anonymous memory that another process can map; tensors are allocated in it one after another."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self.file = os.fdopen(os.memfd_create("lpfs-weights"), "r+b", buffering=0)
        self.file.truncate(size)  # pages take memory when they are written
        self._map = mmap.mmap(self.file.fileno(), size)
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

    policy: str = "idle"  # "idle": lowest priority, with pauses; "other": scheduled as the server, without pauses
    closing: threading.Event = field(default_factory=threading.Event)  # set when the server stops
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _connection: Connection | None = field(default=None, init=False)
    _memories: dict[int, Memory] = field(default_factory=dict, init=False)  # by the number that the process gave
    _is_ready: bool = field(default=False, init=False)  # the process has started and waits for bundles

    @staticmethod
    def is_supported() -> bool:
        """Return whether a process can hand over what it loads."""
        return hasattr(os, "memfd_create") and all(map(find_spec, ("onnx", "onnxruntime")))

    def start(self) -> Connection:
        """Start the process if it does not run; raise OSError if it cannot hand over what it loads."""
        if not self.is_supported():
            raise OSError("bundles are loaded in another process only on Linux and with ONNX Runtime")
        if self._process is None or self._process.poll() is not None or self._connection is None:
            self.stop()
            self._connection, theirs = Pipe()
            file = str(theirs.fileno())
            try:
                command = [sys.executable, "-c", COMMAND, file, self.policy, *sys.path]
                self._process = subprocess.Popen(command, pass_fds=[int(file)], stdin=subprocess.DEVNULL)
            finally:
                theirs.close()
            self._is_ready = False
        return self._connection

    def stop(self) -> int | None:
        """End the process, and close the connection; no thread may wait for it. Return its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._memories = {}  # models that use them keep them
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        if connection is not None:
            connection.close()
        return None if process is None else process.returncode

    def __call__(self, path: Path, before: ServedModel) -> ServedModel:
        """Return a bundle, ready to answer; raise LpfsError if it must be refused, also because it ends the process.

        The bundle is loaded here if it has another encoder than ``before``, if the model has no graph, and if the
        process cannot be started or gets no time from other programs.
        """
        reply = self._load(path)
        if reply["error"] is not None:
            raise LpfsError(reply["error"])
        if (arrays := reply["arrays"]) is None:
            return load_bundle(open_bundle(path), before)
        bundle = Bundle(path, reply["manifest"])
        if bundle.encoder_files != before.bundle.encoder_files:
            return load_bundle(bundle, before)
        is_same = bundle.fields == before.bundle.fields
        encoder = before.encoder if is_same else before.vocabularies.subset(bundle.fields)
        graph = SessionGraph(arrays.pop(GRAPH).tobytes(), arrays, encoder.schema)
        logits = RuntimeModel(graph)
        logits(encoder.encode([dict.fromkeys(bundle.fields)]).batch)  # the first run takes longer
        return ServedModel(bundle, encoder, before.vocabularies, logits)

    def _load(self, path: Path) -> dict[str, Any]:
        """Return the reply of the process, or a reply without arrays if there is no such process."""
        for _ in range(ATTEMPTS):
            try:
                return self._request(path)
            except (OSError, EOFError, RuntimeError, ValueError) as error:
                code = self.stop()  # what is left of a reply must not be taken for the next one
                if self.closing.is_set():
                    raise LpfsError("the server stops") from None
                if not isinstance(error, EOFError | ConnectionError):
                    return NO_ARRAYS
        end = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        raise LpfsError(f"the process that loads bundles ended {ATTEMPTS} times while it loaded this one: {end}")

    def _request(self, path: Path) -> dict[str, Any]:
        """Return the reply of the process, with arrays in the memory that it names."""
        connection, deadline = self.start(), time.monotonic() + PATIENCE_SECONDS
        if not self._is_ready:
            try:
                self._receive(connection, deadline)
            except (EOFError, ConnectionError):
                raise RuntimeError("the process could not be started") from None
            self._is_ready = True
        used = [number for number, (_, data) in self._memories.items() if data() is not None]
        connection.send_bytes(json.dumps({"path": os.fspath(path.absolute()), "used": used}).encode())
        reply: dict[str, Any] = json.loads(self._receive(connection, deadline))
        if reply["arrays"] is None:
            return reply
        number = reply["memory"]
        if is_new := number not in self._memories:
            with os.fdopen(recv_handle(connection), "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        else:
            memory = self._memories[number][0]
        data = np.frombuffer(memory, np.uint8, reply["bytes"])
        if is_new:
            data[:: mmap.PAGESIZE].max()  # maps the pages, which requests would do one by one
        self._memories = {old: self._memories[old] for old in used} | {number: (memory, ref(data))}
        arrays = {
            name: data[start : start + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for name, (dtype, shape, start) in reply["arrays"].items()
        }
        return {**reply, "arrays": arrays}

    def _receive(self, connection: Connection, deadline: float) -> bytes:
        """Wait for a message."""
        while not connection.poll(POLL_SECONDS):
            if self.closing.is_set() or time.monotonic() > deadline:
                raise TimeoutError
        return connection.recv_bytes()


@dataclass(eq=False)
class Loader:
    """What the process remembers: the vocabularies, and the memory that the server may still use."""

    connection: Connection
    has_pauses: bool
    before: ServedModel | None = None
    memories: dict[int, SharedMemory] = field(default_factory=dict)
    numbers: int = 0  # of memories so far
    cpu_seconds: float = 0.0  # at the last pause
    paced_until: float = 0.0  # time of the clock

    def pause(self, *_: object) -> None:
        """Sleep, unless other programs have not let this process work since the last pause: a handler of SIGALRM."""
        now = time.process_time()
        if now - self.cpu_seconds > WORK_SECONDS / 2 and time.monotonic() < self.paced_until:
            self.cpu_seconds = now
            time.sleep(PAUSE_SECONDS)

    def run(self) -> None:
        """Load the bundles whose paths arrive, until the server ends."""
        with suppress(EOFError, OSError):  # the server has ended
            self.connection.send_bytes(b"ready")
            while True:
                request = json.loads(self.connection.recv_bytes())
                self.paced_until = time.monotonic() + PACED_SECONDS
                if self.has_pauses:
                    signal.setitimer(signal.ITIMER_REAL, WORK_SECONDS, WORK_SECONDS + PAUSE_SECONDS)
                self._load_and_send(Path(request["path"]), request["used"])
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _load_and_send(self, path: Path, used: Collection[int]) -> None:
        """Load a bundle and send it, or why it must be refused."""
        try:
            bundle = open_bundle(path)
            number, memory = self._take_memory(bundle, used)
            served = load_bundle(bundle, self.before, allocate=memory.allocate, build_lookup=False)
            arrays = describe_arrays(served, memory)
        except OSError:  # there is no such memory here: the server tries without
            self._reply()
            return
        except Exception as error:  # whatever is wrong with a bundle, the server gets one line
            self._reply(error=error_text(error))
            return
        self.before = served
        self._reply(manifest=bundle.manifest, arrays=arrays, memory=number, bytes=memory.used)
        if arrays is not None:
            if number not in self.memories:
                send_handle(self.connection, memory.file.fileno(), 0)
            self.memories = {old: self.memories[old] for old in used} | {number: memory}  # as the server does

    def _take_memory(self, bundle: Bundle, used: Collection[int]) -> tuple[int, SharedMemory]:
        """Return memory of the right size that the server does not use, or new memory, and its number."""
        size = 1 << sum(2 * entry["bytes"] for entry in bundle.manifest["files"].values()).bit_length()
        for number, memory in self.memories.items():
            if number not in used and memory.size == size:
                memory.used = 0
                return number, memory
        self.numbers += 1
        return self.numbers, SharedMemory(size)

    def _reply(self, **values: Any) -> None:
        """Send JSON values."""
        self.connection.send_bytes(json.dumps({**NO_ARRAYS, **values}).encode())


def describe_arrays(served: ServedModel, memory: SharedMemory) -> dict[str, Any] | None:
    """Return type, shape and position of graph and weights in the shared memory; None if the model has no graph."""
    if not isinstance(served.logits, RuntimeModel):
        return None
    source = served.logits.source
    arrays = {**source.weights, GRAPH: np.frombuffer(bytearray(source.graph), np.uint8)}
    return {name: (str(array.dtype), array.shape, memory.offset_of(array)) for name, array in arrays.items()}


def main() -> None:
    """Run ``COMMAND``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    loader = Loader(Connection(int(sys.argv[1])), has_pauses=sys.argv[2] == "idle")
    signal.signal(signal.SIGALRM, loader.pause)
    signal.siginterrupt(signal.SIGALRM, False)  # libraries in C need not expect it
    if loader.has_pauses:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # not permitted here
            os.nice(19)
    torch.set_num_threads(1)
    loader.run()
