"""Model: what every model here is and can do.

Other raw values in some fields of a batch: what the leak check feeds in place of dropped fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.errors import FieldError, InputError
from lpfs.gates.sites import Site
from lpfs.models.inputs import Inputs, fields_by_kind
from lpfs.models.layers import Layout, indices_to_copy, prefixed
from lpfs.schema import Schema


def replace_values(schema: Schema, names: Sequence[str]) -> Callable[[Batch], Batch]:
    """Return a function from a batch to one with other values in these fields, of which ids stay in range.

    Every id becomes the next one, every number the next larger whole step, and what was missing is there and the
    other way round. The function returns the batch itself where there are no other values: a field of one id, a
    bag that is empty everywhere.
    """
    wanted = set(names)

    def change(batch: Batch) -> Batch:
        at = column = 0
        for each in schema:
            hit = each.name in wanted
            if each.kind == "numeric":
                if hit and len(batch):
                    batch = _other_numbers(batch, at, at + each.dim)
                at += each.dim
            elif each.kind == "multi":
                if hit:
                    batch = _other_bag(batch, each.name, each.cardinality)
            else:
                if hit and each.cardinality > 1 and len(batch):
                    ids = batch.ids.clone()
                    ids[:, column] = _shift_ids(ids[:, column], each.cardinality)
                    batch = replace(batch, ids=ids)
                column += 1
        return batch

    return change


def _shift_ids(ids: Tensor, cardinality: int) -> Tensor:
    return (ids + 1) % cardinality


def _other_bag(batch: Batch, name: str, cardinality: int) -> Batch:
    values, offsets = batch.bags[name]
    if cardinality < 2 or not values.numel():
        return batch
    return replace(batch, bags={**batch.bags, name: (_shift_ids(values, cardinality), offsets)})


def _other_numbers(batch: Batch, start: int, stop: int) -> Batch:
    dense, missing = batch.dense.clone(), batch.missing
    dense[:, start:stop] += 1
    if missing is not None:
        missing = missing.clone()
        missing[:, start:stop] = ~missing[:, start:stop]
        dense[:, start:stop] = dense[:, start:stop].masked_fill(missing[:, start:stop], 0.0)
    return replace(batch, dense=dense, missing=missing)


Self = TypeVar("Self", bound="Model")


class Model(nn.Module):
    """Fields to logits: (B,) for a schema without tasks, else (B, 1 + tasks).

    What can be gated are parts: the fields, and for some models a token of several fields or crosses of two.
    A subclass calls ``super().__init__`` with all its own arguments, makes ``inputs``, and says in
    :meth:`outputs` what happens to a batch and in :meth:`layout` which weights belong to which part.

    Args:
        schema: the fields, label and tasks.
        silent: parts that read as zeros: they have no weights, and where no other part needs their fields the
            batch does not hold these. That is what ``prune`` makes, so that the rest keeps its shape.
        config: the arguments of the subclass, plain JSON values.

    """

    inputs: Inputs

    def __init__(self, schema: Schema, silent: Sequence[str], config: Mapping[str, Any]) -> None:
        super().__init__()
        if not len(schema):
            raise InputError("a model needs at least one field; the schema has none")
        self.schema = schema
        self.config = {key: _to_json(value) for key, value in config.items()}
        self.outputs_count = 1 + len(schema.tasks)
        fields, quiet = self.fields_of_parts(), set(silent)
        unknown = sorted(quiet - set(fields))
        if unknown:
            raise FieldError(f"silent names {unknown[0]!r}, but the parts are {_list_some(fields)}")
        self.silent = tuple(name for name in fields if name in quiet)
        self.names = tuple(name for name in fields if name not in quiet)
        read = {each for name in self.names for each in fields[name]}
        self.reads = schema.subset([each for each in schema.names if each in read])
        ids, bags, dense = fields_by_kind(self.reads)
        self._ids, self._numbers = len(ids), sum(each.dim for each in dense)
        self._bags = tuple(each.name for each in bags)

    # ------------------------------------------------------------------------ what a subclass says

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return every part that can be gated, silent ones too, and the fields that it reads."""
        ids, bags, dense = fields_by_kind(self.schema)
        return {each.name: (each.name,) for each in (*ids, *bags, *dense)}

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Say which slices of which parameters belong to which part; the rest does not depend on parts."""
        return prefixed("inputs", self.inputs.layout())

    def entrance(self) -> str | None:
        """Return the Linear that reads the embeddings side by side, if that is the only thing done with them."""
        return None

    def sites(self) -> dict[str, Site | list[Site]]:
        """Return where every part that can be gated enters."""
        return {name: Site("inputs", index=part) for part, name in enumerate(self.inputs.names)}

    # --------------------------------------------------------------------------- what every one does

    def forward(self, batch: Batch) -> Tensor:
        """Return logits: (B,), or (B, 1 + tasks) where the schema has tasks."""
        self.check(batch)
        out = self.outputs(batch)
        return out if self.schema.tasks else out[:, 0]

    def check(self, batch: Batch) -> None:
        """Refuse a batch that does not fit the fields of the model."""
        if batch.ids.shape[1:] != (self._ids,):
            raise self._mismatch_error("columns of ids", batch.ids, self._ids)
        if batch.dense.shape[1:] != (self._numbers,):
            raise self._mismatch_error("columns of numbers", batch.dense, self._numbers)
        if batch.missing is not None and batch.missing.shape != batch.dense.shape:
            raise self._mismatch_error("columns in missing", batch.missing, self._numbers)
        for name in self._bags:
            if name not in batch.bags:
                raise InputError(
                    f"the batch has no bag {name!r}, it has {_list_some(batch.bags)}; was it made with another schema?"
                )
            if len(batch.bags[name][1]) != len(batch):
                found = len(batch.bags[name][1])
                raise InputError(f"bag {name!r} has offsets for {found} rows, the batch has {len(batch)}")

    def _mismatch_error(self, what: str, found: Tensor, expected: int) -> InputError:
        return InputError(
            f"the model reads {expected} {what}, found {tuple(found.shape)}; made with another schema? "
            f"Its fields are {_list_some(self.reads.names)}. A smaller model takes old.narrow(batch, smaller)"
        )

    def inputs_of_fields(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for every part, a function from a batch to one with other raw values in it."""
        fields = self.fields_of_parts()
        return {name: replace_values(self.reads, fields[name]) for name in self.names}

    def smaller(self: Self, kept: Sequence[str], cut: bool) -> tuple[Self, dict[str, dict[int, Tensor]]]:
        """Return a new model of the kept parts, and which indices of each old parameter it takes over.

        Its weights are not copied yet. Without ``cut`` the dropped parts read as zeros and all that comes after
        the inputs keeps its shape; with it, it is what a schema of the kept fields gives.
        """
        wanted = set(kept)
        unknown = sorted(wanted - set(self.names))
        if unknown:
            raise FieldError(f"there is no part {unknown[0]!r} to keep; the model has {_list_some(self.names)}")
        device = next(self.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            if cut:
                new = self.cut([name for name in self.names if name in wanted])
            else:
                silent = [name for name in self.fields_of_parts() if name not in wanted]
                new = type(self)(self.schema, **self.config, silent=silent)
        old = dict(self.named_parameters())
        for name, each in new.named_parameters():
            each.data = each.data.to(old[name].dtype)
        return new, indices_to_copy(self.layout(), new.layout())

    def cut(self: Self, kept: Sequence[str]) -> Self:
        """Return a fresh model of the fields that the kept parts need."""
        fields = self.fields_of_parts()
        needed = [each for name in kept for each in fields[name]]
        return type(self)(self.schema.subset(needed), **self.config)

    def narrow(self, batch: Batch, smaller: Model) -> Batch:
        """Return the batch as a smaller model reads it."""
        return batch.select(self.reads, smaller.reads.names)

    def slots(self) -> tuple[str, ...]:
        """Return all parts in order, silent ones too."""
        return tuple(self.fields_of_parts())


def _to_json(value: Any) -> Any:
    return [_to_json(each) for each in value] if isinstance(value, tuple | list) else value


def _list_some(names: Iterable[str]) -> str:
    listed = list(map(repr, names))
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "") or "none"
