"""Stream: batches of a Dataset, in time order or shuffled, this rank's part of them.

Work ahead on a thread: the next items are made while the last one is used.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lpfs.data.batch import Batch, Index, RowBlock
from lpfs.data.reader import (
    BatchPlan,
    Order,
    RowGatherer,
    SequentialGatherer,
    ShuffledGatherer,
    ShuffleWindows,
    WindowedGatherer,
)
from lpfs.errors import InputError

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset


Item = TypeVar("Item")
POLL_SECONDS = 0.05  # seconds between two looks at whether anyone still listens


class _End:
    """Marks the end of the items: an error, or none."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def prefetch(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Yield the items, made up to ``depth`` ahead on a thread; with ``depth`` 0 there is no thread.

    An error of the maker is raised where the items are used, after the items made before it. When the user
    breaks off (or is collected), the thread ends before the generator does.

    >>> list(prefetch(range(3), 2))
    [0, 1, 2]
    """
    if depth < 1:
        yield from items
        return
    line: queue.Queue[Item | _End] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_producer, args=(items, line, stop), name="lpfs-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := line.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        thread.join()


def _producer(items: Iterable[Item], line: queue.Queue[Item | _End], stop: threading.Event) -> None:
    def put(item: Item | _End) -> bool:
        while not stop.is_set():
            try:
                line.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    end = _End()
    try:
        for item in items:
            if not put(item):
                break
    except BaseException as error:  # whatever it is, it belongs to the user of the items
        end = _End(error)
    put(end)


MEMORY_LIMIT = 2 << 30  # bytes that shuffling may hold
CHUNK = 8 << 20  # bytes gathered at a time and cut into batches
MIN_CHUNK_ROWS = 1 << 13  # rows gathered at a time where rows are long
BLOCK = 1 << 15  # rows that stay together when blocks are shuffled
MIN_BATCHES = 8  # blocks in a window, if need be smaller ones


@dataclass(frozen=True)
class _Chunk:
    """Several batches gathered at once; cutting them is free."""

    batch: Batch
    ends: Mapping[str, Index]  # offsets of the bags, on the CPU
    cuts: Sequence[tuple[int, int, int]]  # first and end row here, position in the order after it

    def cut(self, first: int, stop: int) -> Batch:
        whole = self.batch
        bags = {}
        for name, (values, offsets) in whole.bags.items():
            begin, end = int(self.ends[name][first]), int(self.ends[name][stop])
            bags[name] = values[begin:end], offsets[first:stop] - begin
        return Batch(
            whole.ids[first:stop],
            whole.dense[first:stop],
            whole.labels[first:stop],
            None if whole.missing is None else whole.missing[first:stop],
            bags,
        )


class Stream:
    """Batches of a Dataset; iterate for one pass, again for the next.

    Args:
        dataset: where the rows come from.
        batch_size: rows in a batch of one rank; with ``together``, in that of all ranks.
        shuffle: draw an order anew for each pass, from ``seed``; ``order`` says which kind.
        seed: of the shuffles.
        rank: which part is ours.
        world: how many ranks share the rows. Every row goes to exactly one of them, every rank gets the same
            number of batches.
        together: the ranks share every batch, instead of each having one of its own.
        fields: stream only these; the files of the others are not touched.
        drop_last: leave out the last, smaller batch.
        device: put batches there; for CUDA they are gathered in pinned memory.
        prefetch: how many chunks (8 MiB, 8192 rows or one batch) to gather ahead on a thread; 0: no thread.
        memory: bytes that shuffling may hold. Up to there the shuffle is ``uniform``: every order of all rows
            is equally likely. Beyond, it is ``windowed``: blocks of neighbouring rows are shuffled, then the
            rows within a window of blocks. It is compared with the size of all fields, so that a stream of
            fewer fields has the same order.

    ``state_dict`` tells the position after the last batch handed out; a stream that loads it goes on with the
    very next row, with any batch size and number of ranks; with the same ones its batches are the same bit by
    bit.
    A pass that is left early starts over.

    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        together: bool = False,
        fields: Sequence[str] | None = None,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        memory: int = MEMORY_LIMIT,
    ) -> None:
        whole_numbers = {"batch_size": (batch_size, 1), "world": (world, 1), "seed": (seed, 0)}
        for name, (value, least) in {
            **whole_numbers,
            "prefetch": (prefetch, 0),
            "memory": (memory, 1),
        }.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number >= {least}, found {value!r}")
        if not 0 <= rank < world:
            raise InputError(f"rank must be from 0 to {world - 1} (world is {world}), found {rank!r}")
        if together and min(batch_size, dataset.rows) < 2 * world:
            raise InputError(
                f"batches of {batch_size} of {dataset.rows} rows are too few for {world} ranks to share; 2 rows a "
                "rank are the least"
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world, self.drop_last = rank, world, drop_last
        self.schema = dataset.schema if fields is None else dataset.schema.subset(fields)
        self.device = _check_device(device)
        self.prefetch, self.memory = prefetch, memory
        self._reader = dataset.reader(self.schema)
        self._row_bytes = dataset.reader(dataset.schema).row_bytes
        fits = self._row_bytes * dataset.rows <= memory
        self.order: Order = "time" if not shuffle else "uniform" if fits else "windowed"
        self._steps = BatchPlan(dataset.rows, batch_size, world, drop_last, together)
        self._resident: RowBlock | None = None
        self._epoch, self._position, self._resume = 0, 0, 0

    @property
    def step_rows(self) -> int:
        """Rows of all ranks in a step."""
        return self._steps.size

    def share(self, rank: int, world: int) -> Stream:
        """Return the stream of a rank's part of every batch of this one, from where this one stands."""
        part = Stream(
            self.dataset,
            self.batch_size,
            shuffle=self.order != "time",
            seed=self.seed,
            rank=rank,
            world=world,
            together=True,
            fields=self.schema.names,
            drop_last=self.drop_last,
            device=self.device,
            prefetch=self.prefetch,
            memory=self.memory,
        )
        part._resident = self._resident
        part.load_state_dict(self.state_dict())
        return part

    def slice(self, first: int, stop: int) -> Iterator[Batch]:
        """Yield batches ``first`` to before ``stop`` of a pass in time order; the stream stays where it is."""
        begin, end = (min(each * self.batch_size, self.dataset.rows) for each in (first, stop))
        if begin < end:
            yield from Stream(
                self.dataset.part(begin, end),
                self.batch_size,
                fields=self.schema.names,
                device=self.device,
                prefetch=self.prefetch,
                memory=self.memory,
            )

    def __len__(self) -> int:
        """Return the number of batches of a pass, the same on every rank."""
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        start, self._resume = self._resume, 0
        self._position = start
        with_gpu = self.device is not None and self.device.type == "cuda"
        chunks = prefetch(self._chunks(self._epoch, start, pin=with_gpu), self.prefetch)
        for chunk in chunks:
            if self.device is not None:
                moved = chunk.batch.to(self.device, non_blocking=True)
                chunk = _Chunk(moved, chunk.ends, chunk.cuts)
            for first, stop, position in chunk.cuts:
                self._position = position
                yield chunk.cut(first, stop)
        self._epoch, self._position = self._epoch + 1, 0

    def _chunks(self, epoch: int, start: int, *, pin: bool) -> Iterator[_Chunk]:
        """Gather the batches of this rank from a position on, several at a time."""
        gather = self._gather(epoch)
        most = max(MIN_CHUNK_ROWS, CHUNK // self._reader.row_bytes)
        spans: list[tuple[int, int]] = []
        ends: list[int] = []
        begin = start
        for (first, stop), span in zip(
            self._steps.bounds(start), self._steps.spans(self.rank, start), strict=True
        ):
            if spans and stop - begin > most:
                yield _gather_chunk(gather, spans, ends, pin=pin)
                spans, ends, begin = [], [], first
            spans.append(span)
            ends.append(stop)
        if spans:
            yield _gather_chunk(gather, spans, ends, pin=pin)

    def _gather(self, epoch: int) -> RowGatherer:
        first, last = self.dataset.span
        if self.order == "time":
            return SequentialGatherer(self._reader, first)
        if self.order == "uniform":
            if self._resident is None:
                self._resident = self._reader.read([(first, last)])
            return ShuffledGatherer(self._resident, self.seed, epoch)
        window = max(MIN_BATCHES, self.memory // self._row_bytes)
        block = min(BLOCK, window // MIN_BATCHES)
        return WindowedGatherer(
            self._reader, first, ShuffleWindows(last - first, block, window // block, self.seed, epoch)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values from which ``load_state_dict`` goes on."""
        position = self._resume or self._position
        return {**self._identity(), "epoch": self._epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position: the next iteration begins there."""
        mine = {**self._identity(), "epoch": 0, "position": 0}
        if set(state) != set(mine):
            raise InputError(f"a stream's state has the keys {sorted(mine)}, found {sorted(state)}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise InputError(f"the saved stream has {name} {state[name]!r}, this one has {value!r}")
        epoch, position = state["epoch"], state["position"]
        if not (isinstance(epoch, int) and isinstance(position, int) and 0 <= position <= self._steps.rows):
            raise InputError(f"no such position: epoch {epoch!r}, row {position!r}")
        if next(self._steps.bounds(position), None) is None:  # saved after the last batch of a pass
            epoch, position = epoch + 1, 0
        self._epoch, self._position, self._resume = epoch, position, position

    def _identity(self) -> dict[str, Any]:
        """Return what a saved position means nothing without."""
        memory = self.memory if self.order == "windowed" else None
        seed = None if self.order == "time" else self.seed
        return {
            "fingerprint": self.dataset.fingerprint,
            "span": list(self.dataset.span),
            "order": self.order,
            "seed": seed,
            "memory": memory,
        }


def _gather_chunk(
    gather: RowGatherer, spans: Sequence[tuple[int, int]], ends: Sequence[int], *, pin: bool
) -> _Chunk:
    """Gather spans into one chunk and note where its batches are."""
    rows = gather.rows(spans)
    batch = rows.batch()
    cuts, done = [], 0
    for (first, stop), end in zip(spans, ends, strict=True):
        cuts.append((done, done + stop - first, end))
        done += stop - first
    offsets = {name: bag[1] for name, bag in rows.bags.items()}
    return _Chunk(batch.pin_memory() if pin else batch, offsets, cuts)


def _check_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device, if there is such a one."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"no device {device!r}: {error}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} was asked for, but this torch finds no CUDA; use 'cpu'")
    return found
