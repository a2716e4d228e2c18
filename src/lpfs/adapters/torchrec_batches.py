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
    if isinstance(batch, Mapping):
        values = {key: _map_batch(value, kind, change) for key, value in batch.items()}
        return values if any(values[key] is not value for key, value in batch.items()) else batch
    if isinstance(batch, tuple | list):
        items = [_map_batch(item, kind, change) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        old_values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
        new_values = {name: _map_batch(value, kind, change) for name, value in old_values.items()}
        is_changed = any(new_values[name] is not old_values[name] for name in old_values)
        return replace(batch, **new_values) if is_changed else batch
    return batch


def inputs_of(batch: Batch, schema: Schema) -> tuple[Tensor, Any]:
    """Return the numbers (B, C) and the features, a KeyedJaggedTensor, of a batch of a Dataset.

    Features have the order of the schema: one id per row for categorical fields, a bag for multi fields.
    """
    rows, column = len(batch), 0
    keys: list[str] = []
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for field in schema:
        if field.kind == "numeric":
            continue
        keys.append(field.name)
        if field.kind == "multi":
            ids, starts = batch.bags[field.name]
            ends = torch.cat([starts[1:], starts.new_tensor([ids.numel()])])
            lengths.append((ends - starts).long())
        else:
            ids = batch.ids[:, column]
            column += 1
            lengths.append(torch.ones(rows, dtype=torch.int64, device=ids.device))
        values.append(ids.long())
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=keys, values=torch.cat(values), lengths=torch.cat(lengths), stride=rows
    )
    return batch.dense, features


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


def _drop(features: Any, names: set[str]) -> Any:
    kept = [number for number, key in enumerate(features.keys()) if key not in names]
    if len(kept) == len(features.keys()):
        return features
    return features.permute(kept or [0])  # at least one: it defines the number of rows


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
    return _map_batch(batch, KeyedJaggedTensor, partial(_drop, names=names))
