"""Dataset: a prepared log on disk, or a range of its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lpfs.data.reader import RowReader
from lpfs.data.store.format import (
    VOCABULARIES,
    AnyArray,
    DayInfo,
    Manifest,
    check_file,
    decode_vocabulary,
    vocabulary_column,
)
from lpfs.data.store.location import damaged_file_error, locate_dataset
from lpfs.data.stream import MEMORY_LIMIT, Stream
from lpfs.errors import InputError
from lpfs.schema import Schema

if TYPE_CHECKING:
    import torch


class Dataset:
    """A prepared log: rows in time order, grouped by day. ``days``, ``split`` and ``part`` return views of it.

    Opening checks the small files and the sizes of the others. Each MiB of a file is checked when it is first read;
    ``verify`` checks every byte. The path may be a URL (``s3://…``): files are then fetched on first use into ``path``,
    a cache directory, and checked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = locate_dataset(path)
        self.path = self.location.folder
        self._manifest = Manifest(self.location)
        self.schema = self._manifest.schema
        self.fingerprint: str = self._manifest.values["fingerprint"]
        self.settings: dict[str, Any] = self._manifest.values["settings"]
        self._starts = [0, *accumulate(day.rows for day in self._manifest.days)]  # first row of each day + end
        self._label_counts: dict[tuple[int, int], tuple[int, int]] = {}  # by span; shared with the views
        self.span: tuple[int, int] = (0, self._starts[-1])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.span[1] - self.span[0]

    @property
    def whole(self) -> bool:
        """Whether these are all rows of the prepared log."""
        return self.rows == self._starts[-1]

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        days = self.days()
        names = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return f"Dataset({str(self.path)!r}, {self.rows:,} rows, {len(self.schema)} fields, days {names})"

    @property
    def table(self) -> tuple[DayInfo, ...]:
        """The days; a day that is only partly in this Dataset is listed with all its rows and positives."""
        return tuple(
            day
            for day, (first, stop) in zip(self._manifest.days, pairwise(self._starts), strict=True)
            if first < self.span[1] and stop > self.span[0]
        )

    def label_counts(self) -> tuple[int, int]:
        """Return the number of positive (non-zero) and of negative labels; complete days are not read again."""
        if self.span not in self._label_counts:
            labels = Schema((), self.schema.label)  # no fields, no tasks: the reader opens the label files only
            reader = RowReader(self.location, labels, labels, self._manifest.days)
            positives = 0
            for day in self.table:
                first, stop = self._starts[day.index], self._starts[day.index + 1]
                part = max(first, self.span[0]), min(stop, self.span[1])
                complete = part == (first, stop)
                positives += day.positives if complete else int(np.count_nonzero(reader.read([part]).labels))
            self._label_counts[self.span] = positives, self.rows - positives
        return self._label_counts[self.span]

    @overload
    def days(self) -> tuple[str, ...]: ...
    @overload
    def days(self, first: int, stop: int | None = None) -> Dataset: ...
    def days(self, first: int | None = None, stop: int | None = None) -> tuple[str, ...] | Dataset:
        """Return the names of the days; or the Dataset of days ``first`` to ``stop`` (exclusive), as a slice."""
        table = self.table
        if first is None:
            return tuple(day.name for day in table)
        chosen = table[first:stop]
        if not chosen:
            raise InputError(f"no days from {first} to {stop}: there are {len(table)}")
        low, high = self._starts[chosen[0].index], self._starts[chosen[-1].index + 1]
        return self._view(max(low, self.span[0]), min(high, self.span[1]))

    def part(self, first: int, stop: int) -> Dataset:
        """Return rows ``first`` to ``stop`` (exclusive)."""
        if not 0 <= first < stop <= self.rows:
            raise InputError(f"no rows from {first} to {stop}: there are {self.rows}")
        return self._view(self.span[0] + first, self.span[0] + stop)

    def _view(self, low: int, high: int) -> Dataset:
        view = object.__new__(Dataset)
        view.__dict__.update(self.__dict__, span=(low, high))
        return view

    def split(self, *fractions: float, days: Sequence[int] | None = None) -> tuple[Dataset, ...]:
        """Split into consecutive parts, in time order: by fractions of the rows, or at the start of certain days.

        ``split(0.7, 0.1, 0.2)`` returns three parts; ``split(days=(18, 23))`` the days before 18, days 18 to 22,
        and the days from 23.
        """
        if (days is None) == (not fractions):
            raise InputError("split needs either fractions of the rows, or days=(first day of the second part, …)")
        if days is not None:
            edges = [0, *days, len(self.table)]
            if sorted(set(edges)) != edges:
                raise InputError(f"days must increase from 1 to {len(self.table) - 1}, found {tuple(days)}")
            return tuple(self.days(first, stop) for first, stop in pairwise(edges))
        if min(fractions) <= 0 or abs(sum(fractions) - 1.0) > 1e-9:
            raise InputError(f"fractions must be above 0 and add up to 1, found {fractions}")
        edges = [0, *(round(total * self.rows) for total in accumulate(fractions))]
        return tuple(self.part(first, stop) for first, stop in pairwise(edges))

    def stream(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        fields: Sequence[str] | None = None,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        memory: int = MEMORY_LIMIT,
        max_rows: int | None = None,
    ) -> Stream:
        """Return batches of these rows; see ``Stream``."""
        return Stream(
            self,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world=world,
            fields=fields,
            drop_last=drop_last,
            device=device,
            prefetch=prefetch,
            max_rows=max_rows,
            memory=memory,
        )

    def vocabulary(self, name: str) -> AnyArray | list[str] | None:
        """Return the raw values of a field in id order, without the special ids; None if they are not stored."""
        index = self.schema.index(name)
        parts = {part: self._manifest.vocabularies.get(vocabulary_column(index, part)) for part in ("", "ends")}
        arrays = {part: column.read(self.location, 0, column.items) for part, column in parts.items() if column}
        try:
            return decode_vocabulary(arrays[""], arrays.get("ends")) if arrays else None
        except (LookupError, ValueError) as error:
            raise damaged_file_error(self.path / VOCABULARIES, f"values of field {name!r}: {error!r}") from error

    def vocabulary_about(self, name: str) -> dict[str, Any]:
        """Return the metadata of the vocabulary of a field; empty if it has none."""
        index = self.schema.index(name)
        return dict(self._manifest.vocabulary_metadata.get(vocabulary_column(index), {}))

    def attached(self, name: str) -> Any:
        """Return the JSON values of an attached file, such as ``truth.json``."""
        names = [file for file in self._manifest.files if file.endswith(".json")]
        if name not in names:
            raise InputError(f"{self.path} has no {name!r}; it has {', '.join(sorted(names))}")
        return self._manifest.load(name)

    def verify(self) -> None:
        """Check every file against its checksum; raise DataError for the first that differs."""
        for name, entry in Manifest(self.location).files.items():
            check_file(self.location, name, entry, checksum=True)

    def reader(self, fields: Schema) -> RowReader:
        """Return a reader of all rows of the prepared log for some fields."""
        return RowReader(self.location, self.schema, fields, self._manifest.days)
