"""Inputs: the fields of a batch to their embeddings, with the gates inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.embeddings.table import Table
from lpfs.errors import InputError
from lpfs.gates.parts import PartWeight
from lpfs.models.layers import Layout, NumericEmbeddings, prefixed
from lpfs.schema import Field, Schema

Pooling = Literal["mean", "sum"]


class NumericModule(Protocol):
    """What turns the numbers of a batch into embeddings: :class:`Numbers`, or one token for all of them."""

    parts: int
    names: tuple[str, ...]

    def __call__(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, parts, D)."""
        ...

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the weights of a part."""
        ...

    def layout(self) -> Layout:
        """Say which weights belong to which field."""
        ...


class Inputs(nn.Module):
    """Embeddings of fields: first those with one id a row, then bags, then numbers.

    It takes gates itself, one a part: inside the lookup for ids, on the weights for numbers. With ``wide``,
    every row has that many more columns, the linear weights of the field: one gate covers them all.

    Args:
        batch: the fields that a batch holds.
        names: those that are read here, in any order.
        dim: width of an embedding.
        wide: how many linear weights there are beside it.
        pooling: a bag is the ``mean`` or the ``sum`` of its rows.
        slots: the parts as the rest of the model counts them; one that is not read here gives zeros. Without it,
            what is read is all there is.
        numbers: what turns numbers into parts; by default every field has its own weights.

    """

    table: Table | None
    numbers: NumericModule | None
    id_columns: Tensor | None
    dense_columns: Tensor | None
    filled: Tensor | None

    def __init__(
        self,
        batch: Schema,
        names: Sequence[str],
        dim: int,
        *,
        wide: int = 0,
        pooling: Pooling = "mean",
        slots: Sequence[str] | None = None,
        numbers: Callable[[Sequence[Field], int], NumericModule] = NumericEmbeddings,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "sum"):
            raise InputError(f"pooling must be mean or sum, found {pooling!r}")
        if dim < 1:
            raise InputError(f"dim must be at least 1, found {dim}")
        self.gate: Callable[[], Tensor | None] | None = None
        ids, bags, dense = fields_by_kind(batch.subset(names))
        self.bags = tuple(each.name for each in bags)
        self.ids, self.dim, self.width = len(ids), dim, dim + wide
        self.table = None
        if ids or bags:
            sizes = [each.cardinality for each in (*ids, *bags)]
            self.table = Table(sizes, self.width, bags=len(bags), mean=pooling == "mean")
        self.numbers = numbers(dense, self.width) if dense else None
        of_numbers = () if self.numbers is None else self.numbers.names
        self.names = (*(each.name for each in (*ids, *bags)), *of_numbers)
        self.parts = len(self.names)
        self.slots = self.names if slots is None else tuple(slots)
        slot = {name: number for number, name in enumerate(self.slots)}
        places = [slot[name] for name in self.names]
        all_ids, _, all_dense = fields_by_kind(batch)
        columns = {each.name: number for number, each in enumerate(all_ids)}
        self._index("id_columns", [columns[each.name] for each in ids], len(all_ids))
        self._index("dense_columns", _columns(all_dense, dense), sum(each.dim for each in all_dense))
        self._index("filled", places, len(self.slots))

    def _index(self, name: str, places: list[int], size: int) -> None:
        """Remember which of ``size`` places are meant; None if it is all of them in order."""
        index = None if places == list(range(size)) else torch.tensor(places, dtype=torch.long)
        self.register_buffer(name, index, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return (B, N, D + wide): the parts in the order of ``slots``."""
        gate = None if self.gate is None else self.gate()
        if gate is not None:
            gate = gate.to((next(self.parameters()) if self.table is None else self.table.weight).dtype)
        of_ids, of_bags, of_numbers = self._shares(gate)
        pieces: list[Tensor] = []
        if self.table is not None:
            if self.ids:
                ids = batch.ids if self.id_columns is None else batch.ids.index_select(1, self.id_columns)
                pieces.append(self.table(ids, of_ids))
            if self.bags:
                pieces.append(self.table.bags([batch.bags[name] for name in self.bags], of_bags))
        if self.numbers is not None:
            dense, missing = batch.dense, batch.missing
            if self.dense_columns is not None:
                dense = dense.index_select(1, self.dense_columns)
                missing = None if missing is None else missing.index_select(1, self.dense_columns)
            pieces.append(self.numbers(dense, missing, of_numbers))
        if not pieces:
            return batch.dense.new_zeros(batch.dense.shape[0], len(self.slots), self.width)
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if self.filled is None:
            return out
        return out.new_zeros(out.shape[0], len(self.slots), self.width).index_copy(1, self.filled, out)

    def _shares(self, gate: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Cut the gates (parts,) into those of ids, bags and numbers."""
        if gate is None or self.ids == self.parts:
            return gate, None, None
        bags = len(self.bags)
        return gate[: self.ids], gate[self.ids : self.ids + bags], gate[self.ids + bags :]

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the rows of a field in the table, or its weights among the numbers."""
        at = part - self.ids - len(self.bags)
        if self.numbers is not None and at >= 0:
            return [
                PartWeight(f"numbers.{each.parameter}", each.dim, each.start, each.stop, each.exact)
                for each in self.numbers.part_weights(at)
            ]
        assert self.table is not None
        start = sum(self.table.sizes[:part])
        exact = part < self.ids  # the rows of a bag are added up before the gate
        return [PartWeight("table.weight", 0, start, start + self.table.sizes[part], exact)]

    def layout(self) -> Layout:
        """Say whose rows are whose."""
        result: dict[str, dict[int, list[tuple[str, int]]]] = {}
        if self.table is not None:
            result["table.weight"] = {0: list(zip(self.names, self.table.sizes, strict=False))}
        return result if self.numbers is None else {**result, **prefixed("numbers", self.numbers.layout())}


def fields_by_kind(fields: Schema) -> tuple[list[Field], list[Field], list[Field]]:
    """Return the fields with one id a row, the bags, and the numeric ones."""
    kinds: dict[str, list[Field]] = {"categorical": [], "multi": [], "numeric": []}
    for each in fields:
        if each.kind == "cross":
            raise InputError(f"field {each.name!r} is a cross: models make crosses of fields themselves")
        if each.kind != "numeric" and each.cardinality < 1:
            raise InputError(
                f"field {each.name!r} is {each.kind} and has no ids; its cardinality must be at least 1"
            )
        kinds[each.kind].append(each)
    return kinds["categorical"], kinds["multi"], kinds["numeric"]


def _columns(all_fields: Sequence[Field], wanted: Sequence[Field]) -> list[int]:
    """Return the columns of numbers that belong to the wanted fields."""
    columns: list[int] = []
    names = {each.name for each in wanted}
    at = 0
    for each in all_fields:
        columns += range(at, at + each.dim) if each.name in names else ()
        at += each.dim
    return columns
