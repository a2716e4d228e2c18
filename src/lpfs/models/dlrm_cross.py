"""DLRMCross: the paper's network with all crosses, each under its own gate."""

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

    The cross of fields ``a`` and ``b`` is the part ``a*b`` (see :func:`part_name`). A field can go and its crosses
    stay: its embedding lives on for them. Gates are absorbed by the columns of the first Linear.

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        bottom: widths of the hidden layers between the numbers and their token.
        hidden: widths of the hidden layers on top.
        pooling: a bag is the ``mean`` or the ``sum`` of its rows.
        token: what the embedding of the numbers is called; it gets a ' where a field with ids has that name.
        parts: names of the embeddings and crosses that there are; None for all.
        silent: parts that read as zeros (see :class:`Model`).

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
        every = self._tokens_of_parts()
        quiet = set(self.silent)
        places = [number for number, name in enumerate(every) if name not in quiet]
        tokens = [tuple(slots.index(token) for token in every[name]) for name in self.names]
        self.crosses = Crosses(tokens, dim, places=places, slots=len(every))
        self.top = dense_layers(len(every) * dim, hidden, self.outputs_count)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the embeddings and crosses, and the fields that each reads."""
        fields = fields_of_tokens(self.schema, self.config["token"])
        return {
            name: tuple(each for token in tokens for each in fields[token])
            for name, tokens in self._tokens_of_parts().items()
        }

    def _tokens_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts in order: one token, or two that are multiplied."""
        tokens = tuple(fields_of_tokens(self.schema, self.config["token"]))
        every = {part_name(each): each for each in [*((one,) for one in tokens), *combinations(tokens, 2)]}
        wanted = self.config["parts"]
        if wanted is None:
            return every
        listed = set(wanted)
        unknown = sorted(listed - set(every))
        if unknown:
            raise FieldError(f"there is no part {unknown[0]!r} of fields {', '.join(map(repr, tokens[:20]))}")
        return {name: each for name, each in every.items() if name in listed}

    def sites(self) -> dict[str, Site | list[Site]]:
        """Return where every embedding and cross enters, and the columns that read it."""
        dim = self.crosses.dim
        places = self.crosses.plan.places
        return {
            name: Site("crosses", index=part, reader="top.0", columns=slice(place * dim, (place + 1) * dim))
            for part, (name, place) in enumerate(zip(self.names, places, strict=True))
        }

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        read = self.crosses(self.inputs(batch))
        if isinstance(batch, _PerturbedBatch):
            read = _with_other_values(read, self.crosses.plan.places[batch.part], self.crosses.dim)
        out: Tensor = self.top(read)
        return out

    def layout(self) -> Layout:
        """Say which rows belong to which field and which columns to which part."""
        columns = [(name, self.crosses.dim) for name in self.fields_of_parts()]
        return {**super().layout(), "top.0.weight": {1: columns}}

    def cut(self, kept: Sequence[str]) -> DLRMCross:
        """Return a fresh model of the kept parts, with the embeddings that they need."""
        fields = self.fields_of_parts()
        needed = {each for name in kept for each in fields[name]}
        schema = self.schema.subset([each for each in self.schema.names if each in needed])
        return DLRMCross(schema, **{**self.config, "parts": list(kept)})

    def inputs_of_fields(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for every part, a function to a batch whose rows have other values in that part alone.

        The raw values of a field also reach its crosses, which may stay when the field goes; so it is the part
        itself, as the top reads it, that is replaced.
        """
        return {name: partial(_replaced, part=part) for part, name in enumerate(self.names)}


@dataclass(frozen=True)
class _PerturbedBatch(Batch):
    """A batch whose rows are to have other values in one part."""

    part: int = 0


def _replaced(batch: Batch, part: int) -> Batch:
    return _PerturbedBatch(batch.ids, batch.dense, batch.labels, batch.missing, batch.bags, part)


def _with_other_values(read: Tensor, place: int, dim: int) -> Tensor:
    """Return what the top reads with other values in one place."""
    columns = slice(place * dim, (place + 1) * dim)
    read = read.clone()
    read[:, columns] = torch.roll(read[:, columns], 1, 0) + 1
    return read


def part_name(fields: Sequence[str]) -> str:
    r"""Return the name of an embedding or a cross; a * or \ within a field's own name gets a \ before it.

    >>> part_name(["a"]), part_name(["a", "b"]), part_name(["a*b"])
    ('a', 'a*b', 'a\\*b')
    """
    return "*".join(each.replace("\\", "\\\\").replace("*", "\\*") for each in fields)
