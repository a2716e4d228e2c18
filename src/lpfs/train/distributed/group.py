"""Ranks: several processes that train as one. Who we are among them, and how they talk.

    torchrun --nproc-per-node 4 -m lpfs select clicks.parquet --label click --keep 20 --out run

Every rank runs the same program on the same data and holds the whole model. They differ in three places only: each
takes its part of every batch (``fit``), of every evaluation (``evaluate``), and rank 0 alone writes and prints.
Whatever is decided is decided by numbers that are equal on all ranks to the bit.

There are two ways to meet. A collective (:meth:`Ranks.add_up`, :meth:`Ranks.gather`) has to be reached by all
within ``limit`` seconds. Where rank 0 works alone for as long as it takes (:meth:`Ranks.agree`,
:func:`in_turn`), the others wait for as long as it gives signs of life.

joined: the processes that torchrun started find each other, and part again.

with joined() as ranks:
    lpfs.fit(model, days.stream(512), folder="runs/first")
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lpfs.errors import InputError, LpfsError, RankError, StateError
from lpfs.train.distributed import is_distributed_launch, restart_count
from lpfs.train.distributed.heartbeat import Heartbeat
from lpfs.train.tensor_io import error_from_pair, error_to_pair, state_from_text, state_to_text

if TYPE_CHECKING:
    from lpfs.train.distributed.heartbeat import Heartbeat


LOOK = 0.05  # seconds between two looks at whether another rank is done with something

T = TypeVar("T")


@dataclass
class CommStats:
    """What ranks said to each other for one purpose: calls, bytes that this rank handed over, seconds in it."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class RankGroup:
    """The processes that train together, as one of them sees it; without a ``watch``, one that is by itself."""

    def __init__(self, rank: int = 0, world: int = 1, watch: Heartbeat | None = None) -> None:
        self.rank, self.world, self.watch = rank, world, watch
        self.traffic: dict[str, CommStats] = {}
        self._turn = 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    # ------------------------------------------------------------------ collectives: all come, within the limit

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Replace a tensor by its sum over the ranks, in place, the same bits on every one."""
        if self.is_distributed:
            with self._meeting(what, tensor.numel() * tensor.element_size()):
                torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, sizes: list[int], what: str) -> list[Tensor]:
        """Return the tensors (sizes[r],) of all ranks, in order; each hands over its own."""
        if not self.is_distributed:
            return [tensor]
        most = max(sizes)
        if not most:
            return [tensor.new_empty(0) for _ in sizes]
        mine = tensor
        if len(tensor) < most:  # a collective takes equal lengths
            mine = tensor.new_zeros(most)
            mine[: len(tensor)] = tensor
        out = tensor.new_empty(self.world, most)
        with self._meeting(what, most * tensor.element_size()):
            torch.distributed.all_gather(list(out.unbind(0)), mine)
        return [part[:size] for part, size in zip(out, sizes, strict=True)]

    def concat(self, tensor: Tensor, what: str) -> Tensor:
        """Return the rows (n, …) of all ranks one after another; their numbers may differ, even be 0."""
        if not self.is_distributed:
            return tensor
        about = torch.zeros(self.world, 2, dtype=torch.int64)
        about[self.rank] = torch.tensor([len(tensor), tensor[:1].numel() if len(tensor) else 0])
        self.all_reduce(about, what)
        width = int(about[:, 1].max())
        if not width:
            return tensor
        parts = self.all_gather(tensor.flatten(), (about[:, 0] * width).tolist(), what)
        return torch.cat([each.view(-1, width) for each in parts])

    def gather_values(self, value: T, what: str) -> list[T]:
        """Return a small value of every rank, in order."""
        if not self.is_distributed:
            return [value]
        data = torch.frombuffer(bytearray(state_to_text(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.all_reduce(sizes, what)
        return [state_from_text(each.numpy().tobytes()) for each in self.all_gather(data, sizes.tolist(), what)]

    def broadcast(self, tensors: list[Tensor], what: str) -> None:
        """Overwrite tensors by those of rank 0."""
        if self.is_distributed:
            for each in tensors:
                with self._meeting(what, each.numel() * each.element_size()):
                    torch.distributed.broadcast(each, 0)

    @contextmanager
    def _meeting(self, what: str, size: int) -> Iterator[None]:
        """Within this block all ranks meet; one that does not come is named."""
        assert self.watch is not None
        begin = time.perf_counter()
        self.watch.enter_collective(what)
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            raise self.watch.explain_interrupt(error) from error
        self.watch.leave_collective()
        told = self.traffic.setdefault(what, CommStats())
        told.calls += 1
        told.bytes += size
        told.seconds += time.perf_counter() - begin

    # ------------------------------------------------------------- rank 0 works, the others wait for as long

    def run_on_leader(self, make: Callable[[], T], what: str) -> T:
        """Let rank 0 do something by itself; return on every rank what it gave, a small value, or its error."""
        if not self.is_distributed:
            return make()
        key = self._next()
        if self.is_leader:
            with self._announced(key, what) as said:
                with single_process():
                    value = make()
                said.append(value)
            return value
        found: T = self._await(key, what)
        return found

    def _next(self) -> str:
        self._turn += 1
        return f"turn/{self._turn}"

    @contextmanager
    def _announced(self, key: str, what: str) -> Iterator[list[Any]]:
        """Tell the others how this block ends."""
        assert self.watch is not None
        said: list[Any] = []
        try:
            yield said
        except BaseException as error:
            self.watch.store.set(key, state_to_text({"error": error_to_pair(error)}))
            raise
        self.watch.store.set(key, state_to_text({"value": said[0] if said else None}))

    def _await(self, key: str, what: str) -> Any:
        """Wait for what rank 0 says."""
        watch = self.watch
        assert watch is not None
        watch.waits(what)
        try:
            while not watch.store.check([key]):
                time.sleep(LOOK)
                try:
                    watch.check_alive(0, what)
                except RuntimeError:
                    if not watch.store.check([key]):  # it may have said its last word just now
                        raise
            told = state_from_text(watch.store.get(key))
        except (RuntimeError, KeyboardInterrupt) as broken:
            raise watch.explain_interrupt(broken) from broken
        watch.leave_collective()
        if "error" in told:
            raise error_from_pair(*told["error"])
        return told["value"]


# --------------------------------------------------------------------------------------------- which ranks


_current: list[RankGroup] = [RankGroup()]


def current_group() -> RankGroup:
    """Return the ranks that this process works with; by itself, if it did not join any."""
    return _current[-1]


@contextmanager
def single_process() -> Iterator[None]:
    """Within this block this process works by itself, whatever the others do."""
    with use_group(RankGroup()):
        yield


@contextmanager
def use_group(ranks: RankGroup) -> Iterator[RankGroup]:
    """Within this block this process works with these ranks."""
    _current.append(ranks)
    try:
        yield ranks
    finally:
        _current.remove(ranks)


@contextmanager
def leader_first(what: str) -> Iterator[bool]:
    """Let rank 0 go through this block by itself, then the others; say whether rank 0 was here before.

    Where rank 0 fails, the others fail with its error.
    """
    ranks = current_group()
    if not ranks.is_distributed:
        yield False
        return
    key = ranks._next()
    if ranks.is_leader:
        with ranks._announced(key, what), single_process():
            yield False
        return
    ranks._await(key, what)
    with single_process():
        yield True


START_TIMEOUT = 300.0  # seconds that ranks wait for each other to start
STEP_TIMEOUT = 45.0  # seconds that ranks wait for each other in a collective; LPFS_RANK_LIMIT says otherwise


class ReportedElsewhereError(RankError):
    """What ended this rank has been told by another one."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this block a request to end, as torchrun sends where a rank is gone, is a KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def joined(limit: float | None = None) -> Iterator[RankGroup]:
    """Within this block this process and those beside it train as one; see :class:`Ranks`.

    For a process that torchrun started; gloo carries what is on CPUs, NCCL what is on GPUs, one GPU a process.

    Args:
        limit: seconds that ranks wait for each other in a step before the one that is missing is given up.

    """
    if current_group().is_distributed:
        raise StateError("these processes have joined already")
    if not is_distributed_launch():
        raise StateError("there is nobody to join: start with torchrun --nproc-per-node N -m lpfs …")
    limit = float(os.environ.get("LPFS_RANK_LIMIT", STEP_TIMEOUT)) if limit is None else limit
    backend = "gloo"
    if torch.cuda.is_available():
        place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= count:
            raise InputError(
                f"there are {count} GPUs here, too few for process {place + 1}: start {count} at most, or hide "
                "them to train on the CPU (CUDA_VISIBLE_DEVICES=)"
            )
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    except RuntimeError as error:
        raise RankError(f"the ranks did not all start within {START_TIMEOUT:.0f} s: {error}") from error
    store = PrefixStore(f"lpfs/{restart_count()}", store)  # nothing that a killed try left there is taken for ours
    watch, fine = Heartbeat(store, rank, world, limit), False
    try:
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
        )
        watch.begin()
        with use_group(RankGroup(rank, world, watch)) as ranks, sigterm_as_interrupt():
            try:
                yield ranks
                ranks.run_on_leader(lambda: None, "the end")
                watch.announce_end()
                fine = True
            except BaseException as error:
                found = watch.explain_interrupt(error) if isinstance(error, KeyboardInterrupt) else error
                first = watch.report_error(found)
                watch.wait_for_peers()
                if isinstance(found, LpfsError) and not first:
                    raise ReportedElsewhereError(str(found)) from error
                if found is not error:
                    raise found from error
                raise
    finally:
        watch.close()
        if torch.distributed.is_initialized() and (fine or backend == "gloo"):  # NCCL would wait for who is lost
            torch.distributed.destroy_process_group()
