"""RankGroup: several processes that train together, and ``joined``, which connects them.

    torchrun --nproc-per-node 4 -m lpfs select clicks.parquet --label click --keep 20 --out run

Every rank runs the same program on the same data with the whole model. Ranks differ in three points only: each
takes its part of every batch (``fit``) and of every evaluation (``evaluate``), and only rank 0 writes files and
prints. Every decision depends on values that are bitwise identical on all ranks.

There are two kinds of synchronization. A collective (:meth:`RankGroup.all_reduce`, :meth:`RankGroup.all_gather`)
must be reached by all ranks within ``limit`` seconds. While rank 0 works alone (:meth:`RankGroup.run_on_leader`,
:func:`leader_first`), the others wait as long as it sends heartbeats.

    with joined() as ranks:
        lpfs.fit(model, days.stream(512), folder="runs/first")
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import pad

from lpfs.errors import InputError, LpfsError, RankError, StateError
from lpfs.train.distributed import is_distributed_launch, restart_count
from lpfs.train.distributed.heartbeat import Heartbeat
from lpfs.train.tensor_io import error_from_pair, state_from_text, state_to_text

START_TIMEOUT = 300.0  # seconds in which all ranks must start
STEP_TIMEOUT = 45.0  # seconds in which all ranks must reach a collective; overridden by LPFS_RANK_LIMIT
POLL_SECONDS = 0.05  # between two checks whether rank 0 has finished

T = TypeVar("T")


@dataclass
class CommStats:
    """Communication for one purpose: number of calls, bytes sent by this rank, seconds."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class RankGroup:
    """The group of processes that train together; by default a single process."""

    def __init__(self, rank: int = 0, world: int = 1, heartbeat: Heartbeat | None = None) -> None:
        self.rank, self.world, self.heartbeat = rank, world, heartbeat
        self.traffic: dict[str, CommStats] = {}
        self._leader_tasks = 0  # number of tasks of rank 0 that the others have waited for

    @property
    def is_distributed(self) -> bool:
        """Return whether there is more than one rank."""
        return self.world > 1

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor, purpose: str) -> Tensor:
        """Replace a tensor by its sum over the ranks, in place, bitwise identical on every rank."""
        if self.is_distributed:
            with self._collective(purpose, tensor.nbytes):
                torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, sizes: list[int], purpose: str) -> list[Tensor]:
        """Return the tensors (sizes[r],) of all ranks, in order."""
        if not self.is_distributed:
            return [tensor]
        size = max(sizes)
        if not size:
            return [tensor.new_empty(0) for _ in sizes]
        padded = tensor if len(tensor) == size else pad(tensor, (0, size - len(tensor)))  # to equal lengths
        out = tensor.new_empty(self.world, size)
        with self._collective(purpose, size * tensor.element_size()):
            torch.distributed.all_gather(list(out.unbind(0)), padded)
        return [part[:size] for part, size in zip(out, sizes, strict=True)]

    def concat(self, tensor: Tensor, purpose: str) -> Tensor:
        """Return the concatenated rows (n, …) of all ranks; the numbers of rows may differ or be 0."""
        if not self.is_distributed:
            return tensor
        shapes = torch.zeros(self.world, 2, dtype=torch.int64)  # rows and width of each rank
        shapes[self.rank] = torch.tensor([len(tensor), tensor[:1].numel() if len(tensor) else 0])
        self.all_reduce(shapes, purpose)
        width = int(shapes[:, 1].max())
        if not width:
            return tensor
        parts = self.all_gather(tensor.flatten(), (shapes[:, 0] * width).tolist(), purpose)
        return torch.cat([part.view(-1, width) for part in parts])

    def gather_values(self, value: T, purpose: str) -> list[T]:
        """Return the small values of all ranks, in order."""
        if not self.is_distributed:
            return [value]
        data = torch.frombuffer(bytearray(state_to_text(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        parts = self.all_gather(data, self.all_reduce(sizes, purpose).tolist(), purpose)
        return [state_from_text(part.numpy().tobytes()) for part in parts]

    def broadcast(self, tensors: list[Tensor], purpose: str) -> None:
        """Overwrite tensors, in place, by those of rank 0."""
        if self.is_distributed:
            for tensor in tensors:
                with self._collective(purpose, tensor.nbytes):
                    torch.distributed.broadcast(tensor, 0)

    @contextmanager
    def _collective(self, purpose: str, size: int) -> Iterator[None]:
        """Time a collective and name the rank that does not reach it."""
        assert self.heartbeat is not None
        start = time.perf_counter()
        self.heartbeat.enter_collective(purpose)
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            raise self.heartbeat.explain_interrupt(error) from error
        self.heartbeat.set_activity("working")
        stats = self.traffic.setdefault(purpose, CommStats())
        stats.calls += 1
        stats.bytes += size
        stats.seconds += time.perf_counter() - start

    def run_on_leader(self, function: Callable[[], T], purpose: str) -> T:
        """Call a function on rank 0; return its value, which must be small, or raise its error on every rank."""
        if not self.is_distributed:
            return function()
        if not self.is_leader:
            return cast(T, self._wait_for_leader(purpose))
        with self._publish_result() as result, single_process():
            result.append(function())
        return cast(T, result[0])

    def _next_key(self) -> str:
        self._leader_tasks += 1
        return f"leader/{self._leader_tasks}"

    @contextmanager
    def _publish_result(self) -> Iterator[list[Any]]:
        """Publish the result of the block, which it appends to the list, or its error, to the other ranks."""
        assert self.heartbeat is not None
        key, result = self._next_key(), list[Any]()
        try:
            yield result
        except BaseException as error:
            self.heartbeat.store.set(key, state_to_text({"error": [type(error).__name__, str(error)]}))
            raise
        self.heartbeat.store.set(key, state_to_text({"value": result[0] if result else None}))

    def _wait_for_leader(self, purpose: str) -> Any:
        """Wait until rank 0 publishes a result; return it or raise its error."""
        heartbeat, key = self.heartbeat, self._next_key()
        assert heartbeat is not None
        heartbeat.set_activity(purpose)
        try:
            while not heartbeat.store.check([key]):
                time.sleep(POLL_SECONDS)
                try:
                    heartbeat.check_alive(0, purpose)
                except RuntimeError:
                    if not heartbeat.store.check([key]):  # it may have published the result just before it ended
                        raise
            result = state_from_text(heartbeat.store.get(key))
        except (RuntimeError, KeyboardInterrupt) as error:
            raise heartbeat.explain_interrupt(error) from error
        heartbeat.set_activity("working")
        if "error" in result:
            raise error_from_pair(*result["error"])
        return result["value"]


_current: list[RankGroup] = [RankGroup()]


def current_group() -> RankGroup:
    """Return the group that this process belongs to; a single process unless it has joined others."""
    return _current[-1]


@contextmanager
def use_group(ranks: RankGroup) -> Iterator[RankGroup]:
    """Make this the current group while the block runs."""
    _current.append(ranks)
    try:
        yield ranks
    finally:
        _current.remove(ranks)


def single_process() -> AbstractContextManager[RankGroup]:
    """Make the current group a single process while the block runs."""
    return use_group(RankGroup())


@contextmanager
def leader_first(purpose: str) -> Iterator[bool]:
    """Run the block on rank 0 first, then on the others; yield whether rank 0 has already run it.

    If rank 0 fails, the others raise its error.
    """
    ranks = current_group()
    if not ranks.is_distributed:
        yield False
    elif ranks.is_leader:
        with ranks._publish_result(), single_process():
            yield False
    else:
        ranks._wait_for_leader(purpose)
        with single_process():
            yield True


class ReportedElsewhereError(RankError):
    """The error that ended this rank has already been reported by another rank."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, which torchrun sends when a rank ends, while the block runs."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def joined(limit: float | None = None) -> Iterator[RankGroup]:
    """Connect the processes that torchrun started while the block runs; see :class:`RankGroup`.

    CPU tensors use gloo, GPU tensors NCCL, with one GPU per process.

    Args:
        limit: seconds after which a rank that does not reach a collective is reported as missing.
    """
    if current_group().is_distributed:
        raise StateError("the processes have already joined; do not nest joined()")
    if not is_distributed_launch():
        raise StateError("there are no other processes; start with torchrun --nproc-per-node N -m lpfs …")
    limit = float(os.environ.get("LPFS_RANK_LIMIT", STEP_TIMEOUT)) if limit is None else limit
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise InputError(
                f"this machine has {count} GPUs, too few for process {local_rank + 1}; start at most {count} "
                "processes, or hide the GPUs to train on the CPU (CUDA_VISIBLE_DEVICES=)"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    except RuntimeError as error:
        raise RankError(f"the ranks did not all start within {START_TIMEOUT:.0f} s: {error}") from error
    store = PrefixStore(f"lpfs/{restart_count()}", store)  # keys of a previous attempt are not reused
    heartbeat, succeeded = Heartbeat(store, rank, world, limit), False
    try:
        settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": world}
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=limit), **settings)
        heartbeat.start()
        with use_group(RankGroup(rank, world, heartbeat)) as ranks, sigterm_as_interrupt():
            try:
                yield ranks
                ranks.run_on_leader(lambda: None, "finishing")
                heartbeat.announce_end()
                succeeded = True
            except BaseException as error:
                cause = heartbeat.explain_interrupt(error) if isinstance(error, KeyboardInterrupt) else error
                is_first = heartbeat.report_error(cause)
                heartbeat.wait_for_peers()
                if isinstance(cause, LpfsError) and not is_first:
                    raise ReportedElsewhereError(str(cause)) from error
                if cause is not error:
                    raise cause from error
                raise
    finally:
        heartbeat.close()
        if torch.distributed.is_initialized() and (succeeded or backend == "gloo"):  # NCCL would wait for lost ranks
            torch.distributed.destroy_process_group()
