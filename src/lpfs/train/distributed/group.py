"""Ranks: several processes that train as one. Who we are among them, and how they talk.

    torchrun --nproc-per-node 4 -m lpfs select clicks.parquet --label click --keep 20 --out run

Every rank runs the same program on the same data and holds the whole model. They differ in three places only: each
takes its part of every batch (``fit``), of every evaluation (``evaluate``), and rank 0 alone writes and prints.
Whatever is decided is decided by numbers that are equal on all ranks to the bit.

There are two ways to meet. A collective (:meth:`Ranks.add_up`, :meth:`Ranks.gather`) has to be reached by all
within ``limit`` seconds. Where rank 0 works alone for as long as it takes (:meth:`Ranks.agree`,
:func:`in_turn`), the others wait for as long as it gives signs of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lpfs.train.words import decode, describe, encode, rebuild

if TYPE_CHECKING:
    from lpfs.train.distributed.heartbeat import Watch

LOOK = 0.05  # seconds between two looks at whether another rank is done with something

T = TypeVar("T")


@dataclass
class Traffic:
    """What ranks said to each other for one purpose: calls, bytes that this rank handed over, seconds in it."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks:
    """The processes that train together, as one of them sees it; without a ``watch``, one that is by itself."""

    def __init__(self, rank: int = 0, world: int = 1, watch: Watch | None = None) -> None:
        self.rank, self.world, self.watch = rank, world, watch
        self.traffic: dict[str, Traffic] = {}
        self._turn = 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    # ------------------------------------------------------------------ collectives: all come, within the limit

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """Replace a tensor by its sum over the ranks, in place, the same bits on every one."""
        if self.several:
            with self._meeting(what, tensor.numel() * tensor.element_size()):
                torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor, sizes: list[int], what: str) -> list[Tensor]:
        """Return the tensors (sizes[r],) of all ranks, in order; each hands over its own."""
        if not self.several:
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

    def join(self, tensor: Tensor, what: str) -> Tensor:
        """Return the rows (n, …) of all ranks one after another; their numbers may differ, even be 0."""
        if not self.several:
            return tensor
        about = torch.zeros(self.world, 2, dtype=torch.int64)
        about[self.rank] = torch.tensor([len(tensor), tensor[:1].numel() if len(tensor) else 0])
        self.add_up(about, what)
        width = int(about[:, 1].max())
        if not width:
            return tensor
        parts = self.gather(tensor.flatten(), (about[:, 0] * width).tolist(), what)
        return torch.cat([each.view(-1, width) for each in parts])

    def collect(self, value: T, what: str) -> list[T]:
        """Return a small value of every rank, in order."""
        if not self.several:
            return [value]
        data = torch.frombuffer(bytearray(encode(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.add_up(sizes, what)
        return [decode(each.numpy().tobytes()) for each in self.gather(data, sizes.tolist(), what)]

    def copy(self, tensors: list[Tensor], what: str) -> None:
        """Overwrite tensors by those of rank 0."""
        if self.several:
            for each in tensors:
                with self._meeting(what, each.numel() * each.element_size()):
                    torch.distributed.broadcast(each, 0)

    @contextmanager
    def _meeting(self, what: str, size: int) -> Iterator[None]:
        """Within this block all ranks meet; one that does not come is named."""
        assert self.watch is not None
        begin = time.perf_counter()
        self.watch.enter(what)
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            raise self.watch.lost(error) from error
        self.watch.leave()
        told = self.traffic.setdefault(what, Traffic())
        told.calls += 1
        told.bytes += size
        told.seconds += time.perf_counter() - begin

    # ------------------------------------------------------------- rank 0 works, the others wait for as long

    def agree(self, make: Callable[[], T], what: str) -> T:
        """Let rank 0 do something by itself; return on every rank what it gave, a small value, or its error."""
        if not self.several:
            return make()
        key = self._next()
        if self.leads:
            with self._announced(key, what) as said:
                with alone():
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
            self.watch.store.set(key, encode({"error": describe(error)}))
            raise
        self.watch.store.set(key, encode({"value": said[0] if said else None}))

    def _await(self, key: str, what: str) -> Any:
        """Wait for what rank 0 says."""
        watch = self.watch
        assert watch is not None
        watch.waits(what)
        try:
            while not watch.store.check([key]):
                time.sleep(LOOK)
                try:
                    watch.refuse_silence(0, what)
                except RuntimeError:
                    if not watch.store.check([key]):  # it may have said its last word just now
                        raise
            told = decode(watch.store.get(key))
        except (RuntimeError, KeyboardInterrupt) as broken:
            raise watch.lost(broken) from broken
        watch.leave()
        if "error" in told:
            raise rebuild(*told["error"])
        return told["value"]


# --------------------------------------------------------------------------------------------- which ranks


_current: list[Ranks] = [Ranks()]


def current() -> Ranks:
    """Return the ranks that this process works with; by itself, if it did not join any."""
    return _current[-1]


@contextmanager
def alone() -> Iterator[None]:
    """Within this block this process works by itself, whatever the others do."""
    with working_as(Ranks()):
        yield


@contextmanager
def working_as(ranks: Ranks) -> Iterator[Ranks]:
    """Within this block this process works with these ranks."""
    _current.append(ranks)
    try:
        yield ranks
    finally:
        _current.remove(ranks)


@contextmanager
def in_turn(what: str) -> Iterator[bool]:
    """Let rank 0 go through this block by itself, then the others; say whether rank 0 was here before.

    Where rank 0 fails, the others fail with its error.
    """
    ranks = current()
    if not ranks.several:
        yield False
        return
    key = ranks._next()
    if ranks.leads:
        with ranks._announced(key, what), alone():
            yield False
        return
    ranks._await(key, what)
    with alone():
        yield True
