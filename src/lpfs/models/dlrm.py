"""DLRM, the network of the LPFS paper for the Criteo Terabyte log, and DLRMCross, with all crosses, one gate each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import FieldError, InputError
from lpfs.gates.sites import Site
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
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
        super().__init__(schema, silent, {**config, "token": _unused_name(schema, token)})
        if interaction not in ("concat", "dot"):
            raise InputError(f"interaction must be concat or dot, found {interaction!r}")
        self.dot = interaction == "dot"
        slots = self.slots()
        self.inputs = _token_inputs(self, slots)
        self.has_token = bool(fields_by_kind(schema)[2])
        pairs = torch.triu_indices(len(slots), len(slots), 1) if self.dot else None
        indices = None if pairs is None else pairs[0] * len(slots) + pairs[1]
        self.register_buffer("pairs", indices, persistent=False)
        self.top = dense_layers(sum(size for _, size in self._columns()), hidden, self.outputs_count)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        return _fields_of_tokens(self)

    def outputs(self, batch: Batch) -> Tensor:
        tokens = self.inputs(batch)  # (B, N, D)
        columns = tokens.flatten(1)
        if self.pairs is not None:
            columns = torch.bmm(tokens, tokens.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
            if self.has_token:
                columns = torch.cat([tokens[:, -1], columns], 1)
        out: Tensor = self.top(columns)
        return out

    def entrance(self) -> str | None:
        return None if self.dot else "top.0"

    def dense_path(self) -> str | None:
        return None if self.dot else "top"

    def layout(self) -> Layout:
        return {**super().layout(), "top.0.weight": {1: self._columns()}}

    def _columns(self) -> Segments:
        slots, dim = self.slots(), self.inputs.dim
        if not self.dot:
            return [(name, dim) for name in slots]
        pairs = [(pair, 1) for pair in combinations(slots, 2)]
        return [(slots[-1], dim), *pairs] if self.has_token else pairs


class DLRMCross(Model):
    r"""DLRM with all element-wise products: N embeddings and N(N-1)/2 crosses, each with its own gate.

    .. math:: y = \mathrm{top}([g_1 e_1, \dots, g_N e_N, g_{12}\, e_1 \odot e_2, \dots])

    The cross of fields ``a`` and ``b`` is the part ``a*b`` (see :func:`part_name`). If a field is dropped and
    one of its crosses is kept, its embedding stays. Gates are absorbed by the columns of the first Linear layer.

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        bottom: widths of the hidden layers from the numeric fields to their token.
        hidden: widths of the hidden layers on top.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        token: name of the embedding of the numeric fields; a ' is appended while a field with ids has that name.
        parts: names of the embeddings and crosses in the model; None for all.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        hidden: Sequence[int] = (256, 128),
        pooling: Pooling = "mean",
        token: str = "dense",
        parts: Sequence[str] | None = None,
        silent: Sequence[str] = (),
    ) -> None:
        config = {"dim": dim, "bottom": bottom, "hidden": hidden, "pooling": pooling, "parts": parts}
        super().__init__(schema, silent, {**config, "token": _unused_name(schema, token)})
        slots = tuple(_fields_of_tokens(self))
        self.inputs = _token_inputs(self, slots)
        tokens, names = self._tokens_of_parts(), set(self.names)
        places = [number for number, name in enumerate(tokens) if name in names]
        indices = [tuple(slots.index(token) for token in tokens[name]) for name in self.names]
        self.crosses = Crosses(indices, dim, places=places, slots=len(tokens))
        self.top = dense_layers(len(tokens) * dim, hidden, self.outputs_count)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        fields, parts = _fields_of_tokens(self), self._tokens_of_parts()
        return {name: tuple(field for token in tokens for field in fields[token]) for name, tokens in parts.items()}

    def _tokens_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts in order, each as one token or two that are multiplied."""
        tokens = tuple(_fields_of_tokens(self))
        parts = {part_name(part): part for part in [*((token,) for token in tokens), *combinations(tokens, 2)]}
        if self.config["parts"] is None:
            return parts
        names = set(self.config["parts"])
        unknown = sorted(names - set(parts))
        if unknown:
            raise FieldError(f"no such part: {unknown[0]!r}; the fields are {', '.join(map(repr, tokens[:20]))}")
        return {name: part for name, part in parts.items() if name in names}

    def sites(self) -> dict[str, Site | list[Site]]:
        dim, places = self.crosses.dim, self.crosses.plan.places
        return {
            name: Site("crosses", index=part, reader="top.0", columns=slice(place * dim, (place + 1) * dim))
            for part, (name, place) in enumerate(zip(self.names, places, strict=True))
        }

    def outputs(self, batch: Batch) -> Tensor:
        columns, dim = self.crosses(self.inputs(batch)), self.crosses.dim
        if isinstance(batch, _PerturbedBatch):
            slot = self.crosses.plan.places[batch.part]
            part, columns = slice(slot * dim, (slot + 1) * dim), columns.clone()
            columns[:, part] = torch.roll(columns[:, part], 1, 0) + 1
        out: Tensor = self.top(columns)
        return out

    def layout(self) -> Layout:
        return {**super().layout(), "top.0.weight": {1: [(name, self.crosses.dim) for name in self.slots()]}}

    def cut(self, kept: Sequence[str]) -> DLRMCross:
        fields = self.fields_of_parts()
        schema = self.schema.subset([field for name in kept for field in fields[name]])
        return DLRMCross(schema, **{**self.config, "parts": list(kept)})

    def inputs_of_fields(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for every part, a function that gives a batch other values in this part only.

        The raw values of a field also reach its crosses, which may be kept when the field is dropped. Therefore
        the part itself is replaced, at the input of the top.
        """
        return {name: partial(_mark_perturbed, part=part) for part, name in enumerate(self.names)}


@dataclass(frozen=True)
class _PerturbedBatch(Batch):
    """A batch for which the model replaces the values of one part."""

    part: int = 0


def _mark_perturbed(batch: Batch, part: int) -> Batch:
    return _PerturbedBatch(batch.ids, batch.dense, batch.labels, batch.missing, batch.bags, batch.padded, part)


def part_name(fields: Sequence[str]) -> str:
    r"""Return the name of an embedding or a cross; * and \ in the name of a field are escaped by \.

    >>> part_name(["a"]), part_name(["a", "b"]), part_name(["a*b"])
    ('a', 'a*b', 'a\\*b')
    """
    return "*".join(name.replace("\\", "\\\\").replace("*", "\\*") for name in fields)


def _unused_name(schema: Schema, name: str) -> str:
    """Return the name with as many ' appended as needed to differ from all fields with ids."""
    taken = {field.name for field in schema if field.kind != "numeric"}
    while name in taken:
        name += "'"
    return name


def _fields_of_tokens(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the fields with ids, one part each, and the token of all numeric fields."""
    ids, bags, dense = fields_by_kind(model.schema)
    parts: dict[str, tuple[str, ...]] = {field.name: (field.name,) for field in (*ids, *bags)}
    return {**parts, model.config["token"]: tuple(field.name for field in dense)} if dense else parts


def _token_inputs(model: Model, slots: Sequence[str]) -> Inputs:
    """Return the embeddings of the fields with ids, and last the token of the numeric fields."""
    reads, config = model.reads, model.config
    numbers = partial(DenseToken, hidden=tuple(config["bottom"]), name=config["token"])
    return Inputs(reads, reads.names, config["dim"], pooling=config["pooling"], slots=slots, numbers=numbers)
