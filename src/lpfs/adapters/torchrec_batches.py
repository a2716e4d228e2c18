"""Batches of TorchRec: from those of lpfs; other values in one feature; features that nobody looks up left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpfs.adapters._torchrec_modules import INSTALL_HINT
from lpfs.adapters.need import package
from lpfs.data.batch import Batch
from lpfs.gates.leak import other_values
from lpfs.schema import Schema

KeyedJaggedTensor: Any = package("torchrec.sparse.jagged_tensor", "torchrec", INSTALL_HINT).KeyedJaggedTensor


def _change(at: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a batch in which every part of a kind is changed; the batch itself if nothing is."""
    if isinstance(at, kind):
        return change(at)
    if isinstance(at, Mapping):
        values = {key: _change(each, kind, change) for key, each in at.items()}
        return values if any(values[key] is not each for key, each in at.items()) else at
    if isinstance(at, tuple | list):
        several = [_change(each, kind, change) for each in at]
        if all(new is old for new, old in zip(several, at, strict=True)):
            return at
        return type(at)(*several) if hasattr(at, "_fields") else type(at)(several)
    if is_dataclass(at) and not isinstance(at, type):
        parts = {each.name: getattr(at, each.name) for each in fields(at) if each.init}
        changed = {name: _change(each, kind, change) for name, each in parts.items()}
        return replace(at, **changed) if any(changed[name] is not parts[name] for name in parts) else at
    return at


def inputs_of(batch: Batch, schema: Schema) -> tuple[Tensor, Any]:
    """Return the numbers (B, C) and the features, a KeyedJaggedTensor, of a batch of a prepared log.

    Features stand in the order of the schema: one id a row for categorical fields, a bag for multi ones.
    """
    rows, column = len(batch), 0
    keys: list[str] = []
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for each in schema:
        if each.kind == "numeric":
            continue
        keys.append(each.name)
        if each.kind == "multi":
            ids, starts = batch.bags[each.name]
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
    """Return a batch with other ids in one feature, of those that it has in other rows."""
    return _change(batch, KeyedJaggedTensor, partial(_with_other_ids, name=name))


def _with_other_ids(features: Any, name: str) -> Any:
    keys = features.keys()
    if name not in keys:
        return features
    at = keys.index(name)
    start, stop = features.offset_per_key()[at], features.offset_per_key()[at + 1]
    other = other_values(features.values()[start:stop], 1) if stop > start else None
    if other is None:
        return features
    values = features.values().clone()
    values[start:stop] = other
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
    stay = [number for number, key in enumerate(features.keys()) if key not in names]
    if len(stay) == len(features.keys()):
        return features
    return features.permute(stay or [0])  # one at least: it knows the number of rows


def perturb_dense(batch: Any) -> Any:
    """Return a batch with other numbers in its first tensor of floats, which is what the dense branch reads."""
    seen: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if seen or not tensor.is_floating_point():
            return tensor
        seen.append(tensor)
        other = other_values(tensor, 1)
        return tensor if other is None else other

    return _change(batch, Tensor, change)


def drop_features(batch: Any, names: set[str]) -> Any:
    """Return a batch without some features."""
    return _change(batch, KeyedJaggedTensor, partial(_drop, names=names))
