"""Stream: batches of a Dataset in time order or shuffled, for one rank, prefetched and resumable."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lpfs._validation import check_int
from lpfs.data.batch import Batch, Index, RowBlock, map_rows
from lpfs.data.reader import (
    BatchPlan,
    Order,
    PartialGatherer,
    RowGatherer,
    SequentialGatherer,
    ShuffledGatherer,
    ShuffleWindows,
    Span,
    WindowedGatherer,
)
from lpfs.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lpfs.data.dataset import Dataset

MEMORY_LIMIT = 2 << 30  # bytes of rows that a shuffle may keep in memory
CHUNK_BYTES = 8 << 20  # bytes gathered at a time and sliced into batches
MIN_CHUNK_ROWS = 1 << 13  # rows gathered at a time if rows are large
BLOCK_ROWS = 1 << 15  # consecutive rows that stay together when blocks are shuffled
MIN_WINDOW_BLOCKS = 8  # blocks in a window; blocks are made smaller if fewer would fit
POLL_SECONDS = 0.05  # interval at which the prefetch thread checks whether it should stop

Item = TypeVar("Item")


class Stream:
    """Batches of a Dataset; each iteration is one pass.

    Args:
        dataset: source of the rows.
        batch_size: rows per batch of one rank; with ``together``, of all ranks.
        shuffle: use a new random order for each pass, drawn from ``seed``; ``order`` is the kind of shuffle.
        seed: seed of the shuffles.
        rank: index of this rank.
        world: number of ranks that share the rows. Every row goes to exactly one rank, and every rank gets the
            same number of batches.
        together: the ranks share each batch instead of having one batch each.
        fields: read only these fields; the files of the others are not opened.
        drop_last: omit the last batch if it is smaller.
        device: device of the batches; for CUDA they are gathered in pinned memory.
        prefetch: number of chunks (8 MiB, 8192 rows or one batch) to gather ahead on a thread; 0: no thread.
        memory: bytes that a shuffle may keep in memory. If all fields of all rows fit, the shuffle is
            ``uniform``: every order of the rows is equally likely. Otherwise it is ``windowed``: blocks of
            consecutive rows are shuffled, then the rows within a window of several blocks. ``fields`` has no
            influence on the order.
        max_rows: number of rows that will be read, if it is less than a pass: a ``uniform`` shuffle then keeps only
            these in memory. The order is the same, and more rows can be read.

    ``state_dict`` returns the position after the last batch that was yielded. A stream that loads it continues
    with the next row, with any batch size and number of ranks; with the same ones its batches are bitwise
    identical. A pass that is left early starts from the beginning when the stream is iterated again.
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
        max_rows: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("world", world), ("memory", memory), ("max_rows", max_rows)):
            if value is not None:
                check_int(name, value, 1)
        for name, value in (("seed", seed), ("prefetch", prefetch)):
            check_int(name, value, 0)
        if not 0 <= rank < world:
            raise InputError(f"rank must be from 0 to {world - 1} (world is {world}), found {rank!r}")
        if together and min(batch_size, dataset.rows) < 2 * world:
            raise InputError(
                f"batch_size {batch_size} with {dataset.rows} rows is too small for {world} ranks to share: "
                "each rank needs at least 2 rows per batch; use a larger batch_size or fewer ranks"
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world, self.drop_last = rank, world, drop_last
        self.schema = dataset.schema if fields is None else dataset.schema.subset(fields)
        self.device = _check_device(device)
        self.prefetch, self.memory, self.max_rows = prefetch, memory, max_rows
        self._reader = dataset.reader(self.schema)
        self._row_bytes = (self._reader if fields is None else dataset.reader(dataset.schema)).row_bytes
        fits = self._row_bytes * dataset.rows <= memory
        self.order: Order = "time" if not shuffle else "uniform" if fits else "windowed"
        self._plan = BatchPlan(dataset.rows, batch_size, world, drop_last, together)
        self._resident: RowBlock | None = None
        self._partial: PartialGatherer | None = None  # of the first pass, if only a part of it is in memory
        self._epoch, self._position, self._resume = 0, 0, 0

    @property
    def step_rows(self) -> int:
        """Number of rows of all ranks in a step."""
        return self._plan.size

    def share(self, rank: int, world: int) -> Stream:
        """Return a stream of one rank's part of every batch of this stream, from the current position."""
        order: dict[str, Any] = {"shuffle": self.order != "time", "seed": self.seed, "drop_last": self.drop_last}
        part = Stream(
            self.dataset, self.batch_size, rank=rank, world=world, together=True, **order, **self._reading_options()
        )
        part._resident = self._resident
        part.load_state_dict(self.state_dict())
        return part

    def slice(self, first: int, stop: int) -> Iterator[Batch]:
        """Yield batches ``first`` to ``stop`` (exclusive) in time order; the position does not change."""
        low, high = (min(batch * self.batch_size, self.dataset.rows) for batch in (first, stop))
        if low < high:
            yield from Stream(self.dataset.part(low, high), self.batch_size, **self._reading_options())

    def _reading_options(self) -> dict[str, Any]:
        names = self.schema.names
        options = {"device": self.device, "prefetch": self.prefetch, "memory": self.memory, "max_rows": self.max_rows}
        return {"fields": names, **options}

    def __len__(self) -> int:
        """Return the number of batches per pass, the same on every rank."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        start, self._resume = self._resume, 0
        self._position = start
        pin = self.device is not None and self.device.type == "cuda"
        for chunk in prefetch(self._chunks(self._epoch, start, pin=pin), self.prefetch):
            if self.device is not None:
                chunk = replace(chunk, batch=chunk.batch.to(self.device, non_blocking=True))
            for first, stop, position in chunk.cuts:
                self._position = position
                yield chunk.cut(first, stop)
        self._epoch, self._position = self._epoch + 1, 0

    def _chunks(self, epoch: int, start: int, *, pin: bool) -> Iterator[_Chunk]:
        """Gather the batches of this rank from a position, several at a time."""
        gatherer = self._gatherer(epoch)
        max_rows = self._chunk_rows
        spans: list[Span] = []
        ends: list[int] = []
        for (first, stop), span in zip(self._plan.bounds(start), self._plan.spans(self.rank, start), strict=True):
            if spans and stop - start > max_rows:
                yield _gather_chunk(gatherer, spans, ends, pin=pin)
                spans, ends, start = [], [], first
            spans.append(span)
            ends.append(stop)
        if spans:
            yield _gather_chunk(gatherer, spans, ends, pin=pin)

    @property
    def _chunk_rows(self) -> int:
        return max(MIN_CHUNK_ROWS, CHUNK_BYTES // self._reader.row_bytes)

    def _gatherer(self, epoch: int) -> RowGatherer:
        first, last = self.dataset.span
        if self.order == "time":
            return SequentialGatherer(self._reader, first)
        if self.order == "uniform":
            ahead = (self.prefetch + 2) * max(self._chunk_rows, self.step_rows)  # gathered before they are needed
            count = self.dataset.rows if self.max_rows is None else self.max_rows + ahead
            if self._resident is None and epoch == 0 and count < self.dataset.rows:
                self._partial = self._partial or PartialGatherer(self._reader, (first, last), self.seed, count)
                return self._partial
            if self._resident is None:
                self._resident = self._reader.read([(first, last)])
            return ShuffledGatherer(self._resident, self.seed, epoch)
        window = max(MIN_WINDOW_BLOCKS, self.memory // self._row_bytes)
        block = min(BLOCK_ROWS, window // MIN_WINDOW_BLOCKS)
        windows = ShuffleWindows(last - first, block, window // block, self.seed, epoch)
        return WindowedGatherer(self._reader, first, windows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values for ``load_state_dict``."""
        return {**self._identity(), "epoch": self._epoch, "position": self._resume or self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: the next iteration starts there."""
        keys = {*self._identity(), "epoch", "position"}
        if set(state) != keys:
            raise InputError(f"the state of a stream has the keys {sorted(keys)}, found {sorted(state)}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise InputError(f"the saved stream has {name} {state[name]!r}, this one has {value!r}")
        epoch, position = state["epoch"], state["position"]
        if not (isinstance(epoch, int) and isinstance(position, int) and 0 <= position <= self._plan.rows):
            raise InputError(f"invalid position in the state: epoch {epoch!r}, row {position!r} of {self._plan.rows}")
        if next(self._plan.bounds(position), None) is None:  # saved after the last batch of a pass
            epoch, position = epoch + 1, 0
        self._epoch, self._position, self._resume = epoch, position, position

    def _identity(self) -> dict[str, Any]:
        """Return the values that must be equal for a saved position to be valid."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "span": list(self.dataset.span),
            "order": self.order,
            "seed": None if self.order == "time" else self.seed,
            "memory": self.memory if self.order == "windowed" else None,
        }


@dataclass(frozen=True)
class _Chunk:
    """Several batches that were gathered together; each batch is a view."""

    batch: Batch
    offsets: Mapping[str, Index]  # (n + 1,) offsets of the bags, on the CPU
    cuts: Sequence[tuple[int, int, int]]  # of each batch: first row, end row, position in the order after it

    def cut(self, first: int, stop: int) -> Batch:
        def cut_bag(name: str, bag: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            low, high = int(self.offsets[name][first]), int(self.offsets[name][stop])
            return bag[0][low:high], bag[1][first:stop] - low

        return map_rows(self.batch, lambda tensor: tensor[first:stop], cut_bag)


def _gather_chunk(gatherer: RowGatherer, spans: Sequence[Span], ends: Sequence[int], *, pin: bool) -> _Chunk:
    """Gather the rows of several batches."""
    rows = gatherer.rows(spans)
    batch = rows.batch()
    bounds = accumulate((stop - first for first, stop in spans), initial=0)
    cuts = [(first, stop, end) for (first, stop), end in zip(pairwise(bounds), ends, strict=True)]
    offsets = {name: bag[1] for name, bag in rows.bags.items()}
    return _Chunk(batch.pin_memory() if pin else batch, offsets, cuts)


def _check_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device; raise InputError if it is invalid or not available."""
    if device is None:
        return None
    import torch

    try:
        result = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"invalid device {device!r}: {error}") from None
    if result.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} is not available: torch finds no CUDA; use 'cpu'")
    return result


class _End(NamedTuple):
    """The end of the items in the queue: an error, or none."""

    error: BaseException | None = None


def prefetch(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Yield the items, computed up to ``depth`` ahead on a thread; with ``depth`` 0 no thread is used.

    An error raised by ``items`` is raised here, after the items before it. If the consumer stops early or the
    generator is garbage collected, the thread ends first.

    >>> list(prefetch(range(3), 2))
    [0, 1, 2]
    """
    if depth < 1:
        yield from items
        return
    queue_: queue.Queue[Item | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Item | _End) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                queue_.put(item, timeout=POLL_SECONDS)
                return

    def produce() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(_End())
        except BaseException as error:  # every error is raised in the consumer
            put(_End(error))

    thread = threading.Thread(target=produce, name="lpfs-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue_.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        if thread is not threading.current_thread():  # the garbage collector may close this generator in any thread
            thread.join()
