"""Teller: what a run says while it works, and the table it ends with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from lpfs.train.distributed.group import current_group


class Console:
    """Headings, lines and tables on standard error; nothing when quiet, no colour where NO_COLOR is set.

    Where several processes train together, rank 0 speaks for all.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, stages: int = 0) -> None:
        self.quiet = quiet or not current_group().is_leader
        self.stream, self.stages, self.at = stream or sys.stderr, stages, 0

    def heading(self, text: str) -> None:
        """Begin a stage."""
        self.at += 1
        number = f"{self.at}/{self.stages} " if self.stages else ""
        self.message(self._bold(f"{number}{text}"))

    def message(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            print(text, file=self.stream, flush=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, numbers to the right."""
        if self.quiet:
            return
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        self.message(self._bold(title))
        for number, row in enumerate((header, *rows)):
            cells = [
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            line = "  " + "  ".join(cells).rstrip()
            self.message(self._bold(line) if number == 0 else line)

    def _bold(self, text: str) -> str:
        fancy = self.stream.isatty() and "NO_COLOR" not in os.environ
        return f"\033[1m{text}\033[0m" if fancy else text
