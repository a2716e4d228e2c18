"""Inputs: the layer from the fields of a batch to gated embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.embeddings.table import Table
from lpfs.errors import InputError
from lpfs.gates.sites import PartWeight
from lpfs.models.layers import DenseToken, Layout, NumericEmbeddings, prefixed
from lpfs.schema import Field, Schema

Pooling = Literal["mean", "sum"]
NumericModule = NumericEmbeddings | DenseToken


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

    reads_padded_bags = True  # see can_capture

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
        sizes = [field.cardinality for field in (*ids, *bags)]
        self.table = Table(sizes, self.width, bags=len(bags), mean=pooling == "mean") if sizes else None
        self.numbers = numbers(dense, self.width) if dense else None
        numeric_names = () if self.numbers is None else self.numbers.names
        self.names = (*(field.name for field in (*ids, *bags)), *numeric_names)
        self.parts = len(self.names)
        self.slots = self.names if slots is None else tuple(slots)
        all_ids, _, all_dense = fields_by_kind(batch)
        slot = {name: index for index, name in enumerate(self.slots)}
        column_fields = [field for field in all_dense for _ in range(field.dim)]
        self._register_index("id_columns", _positions(all_ids, ids), len(all_ids))
        self._register_index("dense_columns", _positions(column_fields, dense), len(column_fields))
        self._register_index("filled", [slot[name] for name in self.names], len(self.slots))

    def _register_index(self, name: str, indices: list[int], size: int) -> None:
        """Register a buffer of indices; None if it is all ``size`` indices in order."""
        index = None if indices == list(range(size)) else torch.tensor(indices, dtype=torch.long)
        self.register_buffer(name, index, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return (B, N, D + wide): the parts in the order of ``slots``."""
        id_gates, bag_gates, number_gates = self._split_gates(None if self.gate is None else self.gate())
        pieces: list[Tensor] = []
        if self.table is not None:
            if self.ids:
                ids = batch.ids if self.id_columns is None else batch.ids.index_select(1, self.id_columns)
                pieces.append(self.table(ids, id_gates))
            if self.bags:
                bags = [batch.bags[name] for name in self.bags]
                pieces.append(self.table.bags(bags, bag_gates, padded=batch.padded))
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
        """Split the gates (parts,) into those of ids, bags and numeric fields, in the dtype of the weights."""
        if gate is None:
            return None, None, None
        gate = gate.to((next(self.parameters()) if self.table is None else self.table.weight).dtype)
        if self.ids == self.parts:
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
        numbers = {} if self.numbers is None else prefixed("numbers", self.numbers.layout())
        if self.table is None:
            return numbers
        return {"table.weight": {0: list(zip(self.names, self.table.sizes, strict=False))}, **numbers}


def fields_by_kind(fields: Schema) -> tuple[list[Field], list[Field], list[Field]]:
    """Return the fields with one id per row, the bags, and the numeric fields."""
    kinds: dict[str, list[Field]] = {"categorical": [], "multi": [], "numeric": []}
    for field in fields:
        if field.kind == "cross":
            raise InputError(f"field {field.name!r} is a cross; leave it out, models create crosses themselves")
        if field.kind != "numeric" and field.cardinality < 1:
            raise InputError(
                f"field {field.name!r} is {field.kind} with cardinality {field.cardinality}; it must be at least 1"
            )
        kinds[field.kind].append(field)
    return kinds["categorical"], kinds["multi"], kinds["numeric"]


def _positions(columns: Sequence[Field], selected: Sequence[Field]) -> list[int]:
    """Return the positions of the columns that belong to the selected fields."""
    names = {field.name for field in selected}
    return [position for position, field in enumerate(columns) if field.name in names]
