"""DLRMCross: the network of the paper with all crosses, one gate each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import FieldError
from lpfs.gates.sites import Site
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.dlrm import dense_token_inputs, fields_of_tokens, unused_name
from lpfs.models.inputs import Pooling
from lpfs.models.layers import Layout, dense_layers
from lpfs.schema import Schema


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
        super().__init__(schema, silent, {**config, "token": unused_name(schema, token)})
        slots = tuple(fields_of_tokens(schema, self.config["token"]))
        self.inputs = dense_token_inputs(self.reads, dim, bottom, pooling, self.config["token"], slots)
        tokens = self._tokens_of_parts()
        silent_parts = set(self.silent)
        places = [number for number, name in enumerate(tokens) if name not in silent_parts]
        indices = [tuple(slots.index(token) for token in tokens[name]) for name in self.names]
        self.crosses = Crosses(indices, dim, places=places, slots=len(tokens))
        self.top = dense_layers(len(tokens) * dim, hidden, self.outputs_count)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the embeddings and crosses with the fields that each uses."""
        fields = fields_of_tokens(self.schema, self.config["token"])
        return {
            name: tuple(field for token in tokens for field in fields[token])
            for name, tokens in self._tokens_of_parts().items()
        }

    def _tokens_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts in order, each as one token or two that are multiplied."""
        tokens = tuple(fields_of_tokens(self.schema, self.config["token"]))
        parts = {part_name(part): part for part in [*((token,) for token in tokens), *combinations(tokens, 2)]}
        if self.config["parts"] is None:
            return parts
        names = set(self.config["parts"])
        unknown = sorted(names - set(parts))
        if unknown:
            raise FieldError(f"no such part: {unknown[0]!r}; the fields are {', '.join(map(repr, tokens[:20]))}")
        return {name: part for name, part in parts.items() if name in names}

    def sites(self) -> dict[str, Site | list[Site]]:
        """Return the gate site of every embedding and cross, with its columns in the first dense layer."""
        dim, places = self.crosses.dim, self.crosses.plan.places
        return {
            name: Site("crosses", index=part, reader="top.0", columns=slice(place * dim, (place + 1) * dim))
            for part, (name, place) in enumerate(zip(self.names, places, strict=True))
        }

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        columns = self.crosses(self.inputs(batch))
        if isinstance(batch, _PerturbedBatch):
            columns = _perturb(columns, self.crosses.plan.places[batch.part], self.crosses.dim)
        out: Tensor = self.top(columns)
        return out

    def layout(self) -> Layout:
        """Return which rows belong to which field and which columns to which part."""
        columns = [(name, self.crosses.dim) for name in self.fields_of_parts()]
        return {**super().layout(), "top.0.weight": {1: columns}}

    def cut(self, kept: Sequence[str]) -> DLRMCross:
        """Return a new, untrained model of the kept parts, with the embeddings that they use."""
        fields = self.fields_of_parts()
        needed = {field for name in kept for field in fields[name]}
        schema = self.schema.subset([name for name in self.schema.names if name in needed])
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
    return _PerturbedBatch(batch.ids, batch.dense, batch.labels, batch.missing, batch.bags, part)


def _perturb(columns: Tensor, slot: int, dim: int) -> Tensor:
    """Return the input of the top with other values in one slot."""
    part = slice(slot * dim, (slot + 1) * dim)
    columns = columns.clone()
    columns[:, part] = torch.roll(columns[:, part], 1, 0) + 1
    return columns


def part_name(fields: Sequence[str]) -> str:
    r"""Return the name of an embedding or a cross; * and \ in the name of a field are escaped by \.

    >>> part_name(["a"]), part_name(["a", "b"]), part_name(["a*b"])
    ('a', 'a*b', 'a\\*b')
    """
    return "*".join(name.replace("\\", "\\\\").replace("*", "\\*") for name in fields)
