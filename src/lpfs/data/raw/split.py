"""Days of a log that says itself which rows are for training: those in their days, then valid, then test."""

from __future__ import annotations

import numpy as np
import polars as pl

from lpfs.data.raw.cast import as_type
from lpfs.data.days import Clock, Part, Rows
from lpfs.data.sources.base import Chunk
from lpfs.data.raw.spelling import SPLITS
from lpfs.errors import DataError

ROLES = ("train", "valid", "test")
QUOTED = 6  # values that a message lists


class SplitClock(Clock):
    """The training rows by a clock of their own, then one day ``valid`` and one day ``test`` if there are such.

    Args:
        column: names the role of each row.
        train: the clock of the training rows; it sees no others.
        counts: how many rows each role has.

    """

    def __init__(self, column: str, train: Clock, counts: dict[str, int]) -> None:
        self.column, self._train = column, train
        held_out = [role for role in ROLES[1:] if counts[role]]
        twice = sorted(set(held_out) & set(train.days))
        if twice:
            raise DataError(
                f"column {train.column!r} names a day {twice[0]!r}, as does the split column {column!r}; "
                "give only one of them"
            )
        self.days = [*train.days, *held_out]
        self.roles = {"train": list(train.days)} | {role: [role] if role in held_out else [] for role in ROLES[1:]}

    def begin(self, row: int = 0) -> None:
        """Get ready to go through the rows once more; ``row`` counts training rows."""
        self._train.begin(row)

    def assign(self, chunk: Chunk) -> list[Part]:
        """Let the clock of the training rows assign those, and put the others into their days."""
        roles = read_roles(chunk, self.column or "")
        parts: list[Part] = []
        rows = np.flatnonzero(roles == 0)
        if len(rows):
            own = self._train.assign(only(chunk, rows))
            parts = [(day, rows if some is None else rows[some]) for day, some in own]
        for role in (1, 2):
            rows = np.flatnonzero(roles == role)
            if len(rows):
                parts.append((self.days.index(ROLES[role]), rows))
        return parts


def only(chunk: Chunk, rows: Rows) -> Chunk:
    """Return some rows of a chunk."""
    return Chunk(chunk.frame[rows], chunk.file, lambda row: chunk.place(int(rows[row])), chunk.consumed)


def read_roles(chunk: Chunk, column: str) -> Rows:
    """Return 0 for a row that is for training, 1 for validation, 2 for the test; or say what is written there."""
    values = chunk.frame[column]
    if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
        raise DataError(f"column {column!r}: {values.dtype} cannot name a split")
    if values.null_count():
        row = int(values.is_null().arg_max() or 0)
        raise DataError(f"{chunk.place(row)}: the split column {column!r} is missing; write train, valid or test")
    names = as_type(values, pl.String).str.strip_chars().str.to_lowercase()
    roles = names.replace_strict(SPLITS, default=None, return_dtype=pl.Int64)
    if roles.null_count():
        row = int(roles.is_null().arg_max() or 0)
        found = as_type(values, pl.String).unique(maintain_order=True)
        listed = ", ".join(f"{name!r:.60}" for name in found.head(QUOTED)) + (" …" if len(found) > QUOTED else "")
        raise DataError(
            f"{chunk.place(row)}: the split column {column!r} holds {listed}; it must name the parts: "
            f"{', '.join(SPLITS)}"
        )
    result: Rows = roles.to_numpy()
    return result
