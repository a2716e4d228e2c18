"""Model: the base class of all models, and replaced input values for the leak check of ``prune``."""

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
    """Return a function that replaces the values of these fields in a batch; ids stay in range.

    Every id becomes the next one, 1 is added to every number, and missing values are swapped with present ones.
    The function returns the batch itself if there are no other values: a field with one id, a bag without any id.
    """
    replaced = set(names)

    def replace_in(batch: Batch) -> Batch:
        dense_column = id_column = 0
        for field in schema:
            changes = field.name in replaced and len(batch) > 0
            if field.kind == "numeric":
                if changes:
                    batch = _replace_numbers(batch, slice(dense_column, dense_column + field.dim))
                dense_column += field.dim
            elif field.kind == "multi":
                if changes and field.cardinality > 1 and batch.bags[field.name][0].numel():
                    ids, offsets = batch.bags[field.name]
                    batch = replace(batch, bags={**batch.bags, field.name: ((ids + 1) % field.cardinality, offsets)})
            else:
                if changes and field.cardinality > 1:
                    ids = batch.ids.clone()
                    ids[:, id_column] = (ids[:, id_column] + 1) % field.cardinality
                    batch = replace(batch, ids=ids)
                id_column += 1
        return batch

    return replace_in


def _replace_numbers(batch: Batch, columns: slice) -> Batch:
    dense, missing = batch.dense.clone(), batch.missing
    dense[:, columns] += 1
    if missing is not None:
        missing = missing.clone()
        missing[:, columns] = ~missing[:, columns]
        dense[:, columns] = dense[:, columns].masked_fill(missing[:, columns], 0.0)
    return replace(batch, dense=dense, missing=missing)


Self = TypeVar("Self", bound="Model")


class Model(nn.Module):
    """A model from fields to logits: (B,) for a schema without tasks, else (B, 1 + tasks).

    The units that can be gated are called parts: the fields, and in some models a token of several fields or
    crosses of two. A subclass calls ``super().__init__`` with all its arguments, creates ``inputs``, computes the
    logits in :meth:`outputs` and returns in :meth:`layout` which weights belong to which part.

    Args:
        schema: the fields, label and tasks.
        silent: parts that are replaced by zeros and have no weights; the batch does not contain their fields
            unless another part needs them. ``prune`` creates them so that the later layers keep their shape.
        config: the arguments of the subclass, as plain JSON values.
    """

    inputs: Inputs

    def __init__(self, schema: Schema, silent: Sequence[str], config: Mapping[str, Any]) -> None:
        super().__init__()
        if not len(schema):
            raise InputError("the schema has no fields; a model needs at least one")
        self.schema = schema
        self.config = {key: _to_json(value) for key, value in config.items()}
        self.outputs_count = 1 + len(schema.tasks)
        fields = self.fields_of_parts()
        unknown = sorted(set(silent) - set(fields))
        if unknown:
            raise FieldError(f"silent contains an unknown part {unknown[0]!r}; the parts are {_list_some(fields)}")
        self.silent = tuple(name for name in fields if name in silent)
        self.names = tuple(name for name in fields if name not in silent)
        self.reads = schema.subset([field for name in self.names for field in fields[name]])
        ids, bags, dense = fields_by_kind(self.reads)
        self._ids, self._numbers = len(ids), sum(field.dim for field in dense)
        self._bags = tuple(field.name for field in bags)

    def fields_of_parts(self) -> dict[str, tuple[str, ...]]:
        """Return all parts, including silent ones, with the fields that each uses."""
        ids, bags, dense = fields_by_kind(self.schema)
        return {field.name: (field.name,) for field in (*ids, *bags, *dense)}

    def untrained(self: Self) -> Self:
        """Return a new model of the same parts and sizes, on the default device."""
        return type(self)(self.schema, **self.config, silent=list(self.silent))

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Return which slices of which parameters belong to which part; the others do not depend on parts."""
        return prefixed("inputs", self.inputs.layout())

    def entrance(self) -> str | None:
        """Return the path of the Linear that takes the concatenated embeddings, if nothing else uses them."""
        return None

    def dense_path(self) -> str | None:
        """Return the path of the Sequential from the concatenated embeddings to the logits, if that is all."""
        return None

    def sites(self) -> dict[str, Site | list[Site]]:
        """Return the gate site of every part."""
        return {name: Site("inputs", index=part) for part, name in enumerate(self.inputs.names)}

    def forward(self, batch: Batch) -> Tensor:
        """Return logits: (B,), or (B, 1 + tasks) if the schema has tasks."""
        self.check(batch)
        out = self.outputs(batch)
        return out if self.schema.tasks else out[:, 0]

    def check(self, batch: Batch) -> None:
        """Raise InputError if a batch does not fit the fields of the model."""
        if batch.ids.shape[1:] != (self._ids,):
            raise self._mismatch_error("columns of ids", batch.ids, self._ids)
        if batch.dense.shape[1:] != (self._numbers,):
            raise self._mismatch_error("columns of numbers", batch.dense, self._numbers)
        if batch.missing is not None and batch.missing.shape != batch.dense.shape:
            raise self._mismatch_error("columns in missing", batch.missing, self._numbers)
        for name in self._bags:
            if name not in batch.bags:
                names = _list_some(batch.bags)
                raise InputError(f"the batch has no bag {name!r}, only {names}; use a batch of its schema")
            rows = len(batch.bags[name][1])
            if rows != len(batch) + batch.padded:
                raise InputError(f"bag {name!r} has offsets for {rows} rows, the batch has {len(batch)} rows")

    def _mismatch_error(self, subject: str, tensor: Tensor, expected: int) -> InputError:
        return InputError(
            f"the model expects {expected} {subject}, found shape {tuple(tensor.shape)}; use a batch with the "
            f"fields {_list_some(self.reads.names)}, for a pruned model old.narrow(batch, smaller)"
        )

    def inputs_of_fields(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for every part, a function that replaces its raw values in a batch."""
        fields = self.fields_of_parts()
        return {name: replace_values(self.reads, fields[name]) for name in self.names}

    def smaller(self: Self, kept: Sequence[str], cut: bool) -> tuple[Self, dict[str, dict[int, Tensor]]]:
        """Return a new model of the kept parts, and the indices of each old parameter that it takes.

        The weights are not copied yet. Without ``cut`` the dropped parts become silent and the layers after the
        inputs keep their shape; with ``cut`` the model is built from a schema of the kept fields.
        """
        unknown = sorted(set(kept) - set(self.names))
        if unknown:
            raise FieldError(f"cannot keep {unknown[0]!r}: no such part; the model has {_list_some(self.names)}")
        dropped, device = set(self.slots()) - set(kept), next(self.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            if cut:
                new = self.cut([name for name in self.names if name not in dropped])
            else:
                new = type(self)(self.schema, **self.config, silent=list(dropped))
        old = dict(self.named_parameters())
        for name, parameter in new.named_parameters():
            parameter.data = parameter.data.to(old[name].dtype)
        return new, indices_to_copy(self.layout(), new.layout())

    def cut(self: Self, kept: Sequence[str]) -> Self:
        """Return a new, untrained model of the fields that the kept parts use."""
        fields = self.fields_of_parts()
        return type(self)(self.schema.subset([field for name in kept for field in fields[name]]), **self.config)

    def narrow(self, batch: Batch, smaller: Model) -> Batch:
        """Return the batch with the fields of a smaller model."""
        return batch.select(self.reads, smaller.reads.names)

    def slots(self) -> tuple[str, ...]:
        """Return all parts in order, including silent ones."""
        return tuple(self.fields_of_parts())


def _to_json(value: Any) -> Any:
    return [_to_json(item) for item in value] if isinstance(value, tuple | list) else value


def _list_some(names: Iterable[str]) -> str:
    texts = list(map(repr, names))
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "") or "none"
