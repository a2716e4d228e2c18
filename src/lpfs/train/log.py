"""What a run writes down: ``metrics.jsonl``, and any logger of yours; none can stop training."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from lpfs.train.boards import VALUES

Logger: TypeAlias = Callable[[dict[str, Any]], None]
TIMES = ("rows_per_second",)  # the only values that two equal runs do not share


class JsonLines:
    """``metrics.jsonl``: one JSON object a line.

    ``position`` puts the lines on the disk and returns how long they are; a run that goes on cuts off what was
    written after its checkpoint, so that every line is there once.
    """

    def __init__(self, path: Path, position: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = path.open("ab")
        if position is not None and self.file.tell() > position:
            self.file.truncate(position)

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a line, and hand it to the system at once; many numbers at once are left to other loggers."""
        line = {key: value for key, value in record.items() if key != VALUES}
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def position(self) -> int:
        """Put the lines on the disk and return their length in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Log:
    """Hands every record to all loggers; one that fails is left out from then on, with a warning."""

    def __init__(self, loggers: Sequence[Logger], lines: JsonLines | None = None) -> None:
        self.lines = lines
        self.loggers: list[Logger] = [*([] if lines is None else [lines]), *loggers]

    def write(self, record: dict[str, Any]) -> None:
        """Hand out a record."""
        for each in list(self.loggers):
            self._try(each, lambda each=each: each(record))  # type: ignore[misc]

    def position(self) -> int | None:
        """Return how long ``metrics.jsonl`` is; None without one."""
        found: list[int] = []
        if self.lines is not None and self.lines in self.loggers:
            lines = self.lines
            self._try(lines, lambda: found.append(lines.position()))
        return found[0] if found else None

    def close(self) -> None:
        """Close those that can be closed."""
        for each in list(self.loggers):
            close = getattr(each, "close", None)
            if close is not None:
                self._try(each, close)

    def _try(self, logger: Logger, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a logger does wrong, training goes on
            self.loggers.remove(logger)
            name = type(logger).__name__
            warnings.warn(f"logger {name} failed and is left out from now on: {error!r}", stacklevel=3)
