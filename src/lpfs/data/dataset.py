"""Dataset: a prepared log on disk, or some of its days."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import torch

from lpfs.data.reader import RowReader
from lpfs.data.store.format import AnyArray, DayInfo, Manifest, check_file, load_vocabulary, vocabulary_file
from lpfs.data.store.location import locate_dataset
from lpfs.data.stream import MEMORY_LIMIT, Stream
from lpfs.errors import InputError
from lpfs.schema import Schema


class Dataset:
    """A prepared log: rows in time order, in days; ``days`` and ``split`` give parts of it, without copying.

    Opening checks the small files and the sizes of the others; ``verify`` checks every byte. The path may be a URL
    (``s3://…``): files are then fetched when they are first read, into ``path``, and checked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = locate_dataset(path)
        self.path = self.place.folder
        self._manifest = Manifest(self.place)
        self.schema = self._manifest.schema
        self.fingerprint: str = self._manifest.values["fingerprint"]
        self.settings: dict[str, Any] = self._manifest.values["settings"]
        self.span: tuple[int, int] = (0, sum(day.rows for day in self._manifest.days))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.span[1] - self.span[0]

    @property
    def whole(self) -> bool:
        """Whether these are all rows, not a part of them."""
        return self.rows == sum(day.rows for day in self._manifest.days)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        days = self.days()
        between = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return f"Dataset({str(self.path)!r}, {self.rows:,} rows, {len(self.schema)} fields, days {between})"

    @property
    def table(self) -> tuple[DayInfo, ...]:
        """The days, with rows, positives and the share of negatives kept in each."""
        starts = self.reader(self.schema).starts
        return tuple(
            day
            for day, first in zip(self._manifest.days, starts, strict=False)
            if first < self.span[1] and first + day.rows > self.span[0]
        )

    @overload
    def days(self) -> tuple[str, ...]: ...
    @overload
    def days(self, first: int, stop: int | None = None) -> Dataset: ...
    def days(self, first: int | None = None, stop: int | None = None) -> tuple[str, ...] | Dataset:
        """Return the names of the days; or the Dataset of days ``first`` to before ``stop``, as a slice."""
        table = self.table
        if first is None:
            return tuple(day.name for day in table)
        chosen = table[first:stop]
        if not chosen:
            raise InputError(f"no days from {first} to {stop}: there are {len(table)}")
        starts = self.reader(self.schema).starts
        low, high = starts[chosen[0].index], starts[chosen[-1].index + 1]
        return self._part(max(low, self.span[0]), min(high, self.span[1]))

    def part(self, first: int, stop: int) -> Dataset:
        """Return rows ``first`` to before ``stop``."""
        if not 0 <= first < stop <= self.rows:
            raise InputError(f"no rows from {first} to {stop}: there are {self.rows}")
        return self._part(self.span[0] + first, self.span[0] + stop)

    def _part(self, low: int, high: int) -> Dataset:
        part = object.__new__(Dataset)
        part.__dict__.update(self.__dict__, span=(low, high))
        return part

    def split(self, *fractions: float, days: Sequence[int] | None = None) -> tuple[Dataset, ...]:
        """Cut into consecutive parts, in time order: by fractions of the rows, or before certain days.

        ``split(0.7, 0.1, 0.2)`` gives three parts; ``split(days=(18, 23))`` the days before 18, 18 to 22, and
        from 23 on.
        """
        if (days is None) == (not fractions):
            raise InputError("split by fractions of the rows, or by days=(first day of the second part, …)")
        if days is not None:
            edges = [0, *days, len(self.table)]
            if sorted(set(edges)) != edges:
                raise InputError(f"days must rise from 1 to {len(self.table) - 1}, found {tuple(days)}")
            return tuple(self.days(first, stop) for first, stop in pairwise(edges))
        if min(fractions) <= 0 or abs(sum(fractions) - 1.0) > 1e-9:
            raise InputError(f"fractions must be above 0 and add up to 1, found {fractions}")
        edges, total = [0], 0.0
        for fraction in fractions:
            total += fraction
            edges.append(round(total * self.rows))
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
            memory=memory,
        )

    def vocabulary(self, name: str) -> AnyArray | list[str] | None:
        """Return the raw values of a field in id order, after the special ids; None if unknown."""
        file = vocabulary_file(self.schema.names.index(self.schema[name].name))
        known = file in self._manifest.values["vocabularies"]
        return load_vocabulary(Path(self.place.file(file))) if known else None

    def vocabulary_about(self, name: str) -> dict[str, Any]:
        """Return what was noted about the vocabulary of a field; empty if there is none."""
        file = vocabulary_file(self.schema.names.index(self.schema[name].name))
        entry: dict[str, Any] = self._manifest.values["vocabularies"].get(file, {"about": {}})
        return dict(entry["about"])

    def attached(self, name: str) -> Any:
        """Return the JSON values kept in a file beside ``dataset.json``, such as ``truth.json``."""
        files = self._manifest.values["files"]
        if name not in files:
            raise InputError(f"{self.path} has no {name!r}; it has {', '.join(sorted(files))}")
        return self._manifest.load(name)

    def verify(self) -> None:
        """Check every file against its checksum; raise DataError at the first that differs."""
        for name, entry in Manifest(self.place).files():
            check_file(self.place, name, entry, whole=True)

    def reader(self, fields: Schema) -> RowReader:
        """Return a reader of the whole Dataset for some fields."""
        return RowReader(self.place, self.schema, fields, self._manifest.days)
