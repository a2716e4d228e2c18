"""Inputs: the layer from the fields of a batch to gated embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.embeddings.table import Table
from lpfs.errors import InputError
from lpfs.gates.sites import PartWeight
from lpfs.models.layers import Layout, NumericEmbeddings, prefixed
from lpfs.schema import Field, Schema

Pooling = Literal["mean", "sum"]


class NumericModule(Protocol):
    """A module from numeric fields to embeddings: NumericEmbeddings, or DenseToken with one token for all."""

    parts: int
    names: tuple[str, ...]

    def __call__(self, dense: Tensor, missing: Tensor | None, gate: Tensor | None) -> Tensor:
        """Return (B, parts, D)."""
        ...

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the weights of a part."""
        ...

    def layout(self) -> Layout:
        """Return which weights belong to which field."""
        ...


class Inputs(nn.Module):
    """Embeddings of fields: first fields with one id per row, then bags, then numeric fields.

    The module applies the gates itself, one per part: in the lookup for ids, on the weights for numeric fields.
    With ``wide``, every embedding has that many additional columns, the linear weights of the field, under the
    same gate.

    Args:
        batch: the fields that a batch contains.
        names: the fields to embed, in any order.
        dim: width of an embedding.
        wide: number of linear weights in addition to the embedding.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        slots: the parts in the order of the result; a slot whose field is not embedded is zero. Default:
            ``names``.
        numbers: creates the module for numeric fields; by default every field has its own weights.
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
        self.bags = tuple(field.name for field in bags)
        self.ids, self.dim, self.width = len(ids), dim, dim + wide
        self.table = None
        if ids or bags:
            sizes = [field.cardinality for field in (*ids, *bags)]
            self.table = Table(sizes, self.width, bags=len(bags), mean=pooling == "mean")
        self.numbers = numbers(dense, self.width) if dense else None
        numeric_names = () if self.numbers is None else self.numbers.names
        self.names = (*(field.name for field in (*ids, *bags)), *numeric_names)
        self.parts = len(self.names)
        self.slots = self.names if slots is None else tuple(slots)
        all_ids, _, all_dense = fields_by_kind(batch)
        id_column = {field.name: column for column, field in enumerate(all_ids)}
        slot = {name: index for index, name in enumerate(self.slots)}
        self._register_index("id_columns", [id_column[field.name] for field in ids], len(all_ids))
        self._register_index("dense_columns", _columns(all_dense, dense), sum(field.dim for field in all_dense))
        self._register_index("filled", [slot[name] for name in self.names], len(self.slots))

    def _register_index(self, name: str, indices: list[int], size: int) -> None:
        """Register a buffer of indices; None if it is all ``size`` indices in order."""
        index = None if indices == list(range(size)) else torch.tensor(indices, dtype=torch.long)
        self.register_buffer(name, index, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return (B, N, D + wide): the parts in the order of ``slots``."""
        gate = None if self.gate is None else self.gate()
        if gate is not None:
            gate = gate.to((next(self.parameters()) if self.table is None else self.table.weight).dtype)
        id_gates, bag_gates, number_gates = self._split_gates(gate)
        pieces: list[Tensor] = []
        if self.table is not None:
            if self.ids:
                ids = batch.ids if self.id_columns is None else batch.ids.index_select(1, self.id_columns)
                pieces.append(self.table(ids, id_gates))
            if self.bags:
                pieces.append(self.table.bags([batch.bags[name] for name in self.bags], bag_gates))
        if self.numbers is not None:
            dense, missing = batch.dense, batch.missing
            if self.dense_columns is not None:
                dense = dense.index_select(1, self.dense_columns)
                missing = None if missing is None else missing.index_select(1, self.dense_columns)
            pieces.append(self.numbers(dense, missing, number_gates))
        if not pieces:
            return batch.dense.new_zeros(batch.dense.shape[0], len(self.slots), self.width)
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if self.filled is None:
            return out
        return out.new_zeros(out.shape[0], len(self.slots), self.width).index_copy(1, self.filled, out)

    def _split_gates(self, gate: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Split the gates (parts,) into those of ids, bags and numeric fields."""
        if gate is None or self.ids == self.parts:
            return gate, None, None
        bags = len(self.bags)
        return gate[: self.ids], gate[self.ids : self.ids + bags], gate[self.ids + bags :]

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the rows of a field in the table, or its weights in the module of numeric fields."""
        numeric_part = part - self.ids - len(self.bags)
        if self.numbers is not None and numeric_part >= 0:
            weights = self.numbers.part_weights(numeric_part)
            return [replace(weight, parameter=f"numbers.{weight.parameter}") for weight in weights]
        assert self.table is not None
        start = sum(self.table.sizes[:part])
        exact = part < self.ids  # the rows of a bag are summed before the gate is applied
        return [PartWeight("table.weight", 0, start, start + self.table.sizes[part], exact)]

    def layout(self) -> Layout:
        """Return which rows belong to which field."""
        result: dict[str, dict[int, list[tuple[str, int]]]] = {}
        if self.table is not None:
            result["table.weight"] = {0: list(zip(self.names, self.table.sizes, strict=False))}
        return result if self.numbers is None else {**result, **prefixed("numbers", self.numbers.layout())}


def fields_by_kind(fields: Schema) -> tuple[list[Field], list[Field], list[Field]]:
    """Return the fields with one id per row, the bags, and the numeric fields."""
    kinds: dict[str, list[Field]] = {"categorical": [], "multi": [], "numeric": []}
    for field in fields:
        if field.kind == "cross":
            raise InputError(
                f"field {field.name!r} is a cross; leave it out, models create crosses of fields themselves"
            )
        if field.kind != "numeric" and field.cardinality < 1:
            raise InputError(
                f"field {field.name!r} is {field.kind} with cardinality {field.cardinality}; it must be at least 1"
            )
        kinds[field.kind].append(field)
    return kinds["categorical"], kinds["multi"], kinds["numeric"]


def _columns(all_fields: Sequence[Field], selected: Sequence[Field]) -> list[int]:
    """Return the columns of numbers that belong to the selected fields."""
    columns: list[int] = []
    names = {field.name for field in selected}
    start = 0
    for field in all_fields:
        columns += range(start, start + field.dim) if field.name in names else ()
        start += field.dim
    return columns
