"""DLRM: the network of the LPFS paper for the Criteo Terabyte log."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs, Pooling, fields_by_kind
from lpfs.models.layers import DenseToken, Layout, Segments, dense_layers
from lpfs.schema import Schema


class DLRM(Model):
    r"""An MLP from the numeric fields to one more embedding, then dense layers on the concatenation.

    .. math:: e_0 = \mathrm{bottom}(v), \qquad y = \mathrm{top}([g_1 e_1, \dots, g_N e_N, g_0 e_0])

    As in the LPFS paper, the token of the numeric fields counts as one more field, ``dense``, with one gate. With
    ``interaction="dot"`` the input of the top is e₀ and the dot products of all pairs, as in the original DLRM
    (Naumov et al. 2019).

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        bottom: widths of the hidden layers from the numeric fields to their token.
        hidden: widths of the hidden layers on top.
        interaction: ``concat``, or ``dot``.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        token: name of the embedding of the numeric fields; a ' is appended while a field with ids has that name.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    pairs: Tensor | None

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        hidden: Sequence[int] = (256, 128),
        interaction: Literal["concat", "dot"] = "concat",
        pooling: Pooling = "mean",
        token: str = "dense",
        silent: Sequence[str] = (),
    ) -> None:
        config = {"dim": dim, "bottom": bottom, "hidden": hidden, "interaction": interaction, "pooling": pooling}
        super().__init__(schema, silent, {**config, "token": unused_name(schema, token)})
        if interaction not in ("concat", "dot"):
            raise InputError(f"interaction must be concat or dot, found {interaction!r}")
        self.dot = interaction == "dot"
        slots = self.slots()
        self.inputs = dense_token_inputs(self.reads, dim, bottom, pooling, self.config["token"], slots)
        self.has_token = bool(fields_by_kind(schema)[2])
        pairs = torch.triu_indices(len(slots), len(slots), 1)
        self.register_buffer("pairs", pairs[0] * len(slots) + pairs[1] if self.dot else None, persistent=False)
        width = sum(size for _, size in self._columns(dim))
        self.top = dense_layers(width, hidden, self.outputs_count)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the fields with ids, one part each, and the token of all numeric fields."""
        return fields_of_tokens(self.schema, self.config["token"])

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        tokens = self.inputs(batch)  # (B, N, D)
        columns = tokens.flatten(1)
        if self.pairs is not None:
            columns = torch.bmm(tokens, tokens.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
            if self.has_token:
                columns = torch.cat([tokens[:, -1], columns], 1)
        out: Tensor = self.top(columns)
        return out

    def entrance(self) -> str | None:
        """Return the path of the first dense layer."""
        return None if self.dot else "top.0"

    def layout(self) -> Layout:
        """Return which rows and columns belong to which part or pair of parts."""
        return {**super().layout(), "top.0.weight": {1: self._columns(self.inputs.dim)}}

    def _columns(self, dim: int) -> Segments:
        slots = self.slots()
        if not self.dot:
            return [(name, dim) for name in slots]
        pairs = [((a, b), 1) for number, a in enumerate(slots) for b in slots[number + 1 :]]
        return [(slots[-1], dim), *pairs] if self.has_token else pairs


def unused_name(schema: Schema, name: str) -> str:
    """Return the name with as many ' appended as needed to differ from all fields with ids."""
    taken = {field.name for field in schema if field.kind != "numeric"}
    while name in taken:
        name += "'"
    return name


def fields_of_tokens(schema: Schema, token: str) -> dict[str, tuple[str, ...]]:
    """Return the fields with ids, one part each, and the token of all numeric fields."""
    ids, bags, dense = fields_by_kind(schema)
    parts: dict[str, tuple[str, ...]] = {field.name: (field.name,) for field in (*ids, *bags)}
    return {**parts, token: tuple(field.name for field in dense)} if dense else parts


def dense_token_inputs(
    reads: Schema, dim: int, bottom: Sequence[int], pooling: Pooling, name: str, slots: Sequence[str]
) -> Inputs:
    """Return the inputs of a DLRM: embeddings, and last the token of the numeric fields."""
    numbers = partial(DenseToken, hidden=tuple(bottom), name=name)
    return Inputs(reads, reads.names, dim, pooling=pooling, slots=slots, numbers=numbers)
