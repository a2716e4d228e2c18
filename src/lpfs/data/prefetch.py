"""Work ahead on a thread: the next items are made while the last one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
PATIENCE = 0.05  # seconds between two looks at whether anyone still listens


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
    thread = threading.Thread(target=_make, args=(items, line, stop), name="lpfs-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := line.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        thread.join()


def _make(items: Iterable[Item], line: queue.Queue[Item | _End], stop: threading.Event) -> None:
    def put(item: Item | _End) -> bool:
        while not stop.is_set():
            try:
                line.put(item, timeout=PATIENCE)
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
