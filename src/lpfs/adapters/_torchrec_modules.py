"""TorchRec's collections of tables: what each feature takes of one, and smaller ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lpfs.adapters.need import package
from lpfs.errors import AbsenceError, InputError

ADVICE = (
    "or, without CUDA: pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0, then "
    "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions (this pair fits torch 2.13)"
)
EmbeddingBagCollection: Any = package(
    "torchrec.modules.embedding_modules", "torchrec", ADVICE
).EmbeddingBagCollection
KeyedTensor: Any = package("torchrec.sparse.jagged_tensor", "torchrec", ADVICE).KeyedTensor


@dataclass(frozen=True)
class Slot:
    """What a feature takes of a collection's output: columns start … stop-1; ``alone``: its table is its own."""

    feature: str
    table: str
    start: int
    stop: int
    alone: bool


class Padded(EmbeddingBagCollection):  # type: ignore[misc]
    """A smaller collection whose output has the keys and columns of before: zeros where a feature was dropped.

    Args:
        tables: the configurations that stay.
        slots: of the collection before.
        keys: its keys, one a slot.
        is_weighted: as before.
        device: where its tables are made.

    """

    def __init__(
        self, tables: list[Any], slots: Sequence[Slot], keys: list[str], is_weighted: bool, device: torch.device
    ) -> None:
        super().__init__(tables=tables, is_weighted=is_weighted, device=device)
        there = {(name, each.name) for each in tables for name in each.feature_names}
        self.slots, self.keys = tuple(slots), keys
        self.held = tuple((slot.feature, slot.table) in there for slot in slots)

    def forward(self, features: Any) -> Any:
        """Return a KeyedTensor (B, D) with all keys of before."""
        inside = super().forward(features).values() if self._embedding_bag_configs else None
        rows = features.stride() if inside is None else inside.shape[0]
        like = torch.zeros((), device=features.device()) if inside is None else inside
        parts, at = [], 0
        for slot, held in zip(self.slots, self.held, strict=True):
            width = slot.stop - slot.start
            if held and inside is not None:
                parts.append(inside[:, at : at + width])
                at += width
            else:
                parts.append(like.new_zeros(rows, width))
        widths = [slot.stop - slot.start for slot in self.slots]
        return KeyedTensor(keys=self.keys, length_per_key=widths, values=torch.cat(parts, 1))


def collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every EmbeddingBagCollection."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            yield path, module


def slots_of(collection: Any) -> tuple[Slot, ...]:
    """Return what each feature takes of a collection's output, in order."""
    if isinstance(collection, Padded):
        alone = {each.name: len(each.feature_names) == 1 for each in collection.embedding_bag_configs()}
        return tuple(replace(slot, alone=alone.get(slot.table, slot.alone)) for slot in collection.slots)
    found, at = [], 0
    for config in collection.embedding_bag_configs():
        for name in config.feature_names:
            found.append(Slot(name, config.name, at, at + config.embedding_dim, len(config.feature_names) == 1))
            at += config.embedding_dim
    return tuple(found)


def held_in(collection: Any) -> tuple[bool, ...]:
    """Return for every slot whether it is still looked up."""
    return collection.held if isinstance(collection, Padded) else (True,) * len(slots_of(collection))


def configs_of(collection: Any, kept: Sequence[str]) -> list[Any]:
    """Return the configurations of a collection with the kept features alone; tables without any are gone."""
    found = []
    for config in collection.embedding_bag_configs():
        names = [name for name in config.feature_names if name in kept]
        if names:
            found.append(replace(config, feature_names=names))
    return found


def untied(path: str, collection: Any) -> Any:
    """Return a collection with the same weights in which every feature has a table of its own; None if this has.

    The first feature of a table keeps its name; columns and keys of the output stay as they are.
    """
    configs = collection.embedding_bag_configs()
    if type(collection) is not EmbeddingBagCollection or all(len(each.feature_names) == 1 for each in configs):
        return None
    features = [name for each in configs for name in each.feature_names]
    if len(set(features)) < len(features):
        raise InputError(
            f"{path!r} has a feature in several tables, which its KeyedTensor calls feature@table: with other "
            "tables these keys would change. Give every feature tables of its own by hand"
        )
    taken, parts = {each.name for each in configs}, []
    for config in configs:
        for number, feature in enumerate(config.feature_names):
            name = config.name if number == 0 else f"{config.name}_{feature}"
            while number and name in taken:
                name += "_"
            taken.add(name)
            parts.append((config.name, replace(config, name=name, feature_names=[feature])))
    tables, nowhere = [each for _, each in parts], torch.device("meta")
    made = EmbeddingBagCollection(tables=tables, is_weighted=collection.is_weighted(), device=nowhere)
    for old, config in parts:
        weight = collection.embedding_bags[old].weight
        made.embedding_bags[config.name].weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    made._device = collection.device
    return made.train(collection.training)


def fewer(path: str, collection: Any, kept: Sequence[str], cut: bool) -> Any:
    """Return the smaller collection; its tables are on no device yet: ``rebuild`` puts the weights in."""
    if type(collection) not in (EmbeddingBagCollection, Padded):
        raise InputError(
            f"{path!r} is a {type(collection).__name__}; only EmbeddingBagCollection can be made smaller"
        )
    configs, nowhere = configs_of(collection, kept), torch.device("meta")
    if cut:
        if not configs:
            raise AbsenceError(f"columns cannot be cut: every feature of {path!r} is dropped; prune without cut")
        made = EmbeddingBagCollection(tables=configs, is_weighted=collection.is_weighted(), device=nowhere)
    else:
        keys = list(collection.keys if isinstance(collection, Padded) else collection._embedding_names)
        made = Padded(configs, slots_of(collection), keys, collection.is_weighted(), nowhere)
    made._device = collection.device
    return made
