"""Batches of TorchRec: converted from those of lpfs, with perturbed values, or without some features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpfs.adapters._torchrec_modules import import_torchrec
from lpfs.data.batch import Batch
from lpfs.gates.verification import permuted_values
from lpfs.schema import Schema

KeyedJaggedTensor: Any = import_torchrec("sparse.jagged_tensor").KeyedJaggedTensor


def _map_batch(batch: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a nested batch with ``change`` applied to every part of a type; the batch itself if none changes."""
    if isinstance(batch, kind):
        return change(batch)
    old: dict[Any, Any]
    if isinstance(batch, Mapping):
        old = dict(batch)
    elif isinstance(batch, tuple | list):
        old = dict(enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        old = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    else:
        return batch
    new = {key: _map_batch(value, kind, change) for key, value in old.items()}
    if all(new[key] is value for key, value in old.items()):
        return batch
    if isinstance(batch, Mapping):
        return new
    if isinstance(batch, tuple | list):
        return type(batch)(*new.values()) if hasattr(batch, "_fields") else type(batch)(new.values())
    return replace(batch, **new)


def inputs_of(batch: Batch, schema: Schema) -> tuple[Tensor, Any]:
    """Return the numbers (B, C) and the features, a KeyedJaggedTensor, of a batch of a Dataset.

    Features have the order of the schema: one id per row for categorical fields, a bag for multi fields.
    """
    features = [field for field in schema if field.kind != "numeric"]
    columns = iter(batch.ids.unbind(1))
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for field in features:
        if field.kind == "multi":
            ids, starts = batch.bags[field.name]
            lengths.append(torch.diff(starts, append=starts.new_tensor([ids.numel()])).long())
        else:
            ids = next(columns)
            lengths.append(torch.ones_like(ids, dtype=torch.int64))
        values.append(ids.long())
    keys = [field.name for field in features]
    jagged = {"values": torch.cat(values), "lengths": torch.cat(lengths), "stride": len(batch)}
    return batch.dense, KeyedJaggedTensor.from_lengths_sync(keys=keys, **jagged)


def perturb_feature(batch: Any, name: str) -> Any:
    """Return a batch in which one feature has the ids of other rows."""
    return _map_batch(batch, KeyedJaggedTensor, partial(_perturb_ids, name=name))


def _perturb_ids(features: Any, name: str) -> Any:
    keys = features.keys()
    if name not in keys:
        return features
    position = keys.index(name)
    start, stop = features.offset_per_key()[position : position + 2]
    perturbed = permuted_values(features.values()[start:stop], 1) if stop > start else None
    if perturbed is None:
        return features
    values = features.values().clone()
    values[start:stop] = perturbed
    varying = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if varying else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varying else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def perturb_dense(batch: Any) -> Any:
    """Return a batch with perturbed values in its first float tensor, the input of the dense branch."""
    is_done = False

    def change(tensor: Tensor) -> Tensor:
        nonlocal is_done
        if is_done or not tensor.is_floating_point():
            return tensor
        is_done = True
        perturbed = permuted_values(tensor, 1)
        return tensor if perturbed is None else perturbed

    return _map_batch(batch, Tensor, change)


def drop_features(batch: Any, names: set[str]) -> Any:
    """Return a batch without some features."""

    def drop(features: Any) -> Any:
        kept = [number for number, key in enumerate(features.keys()) if key not in names]
        if len(kept) == len(features.keys()):
            return features
        return features.permute(kept or [0])  # at least one: it defines the number of rows

    return _map_batch(batch, KeyedJaggedTensor, drop)
