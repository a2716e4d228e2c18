"""TorchRec modules made smaller: EmbeddingBagCollections, the dense columns of its models, sharded collections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lpfs._imports import import_optional
from lpfs.errors import AbsenceError, InputError
from lpfs.gates.hooks import FactorSource, Multiply
from lpfs.gates.sites import ResolvedSite


def import_torchrec(module: str) -> Any:
    """Return a module of torchrec; raise MissingPackageError with the commands that install it."""
    advice = (
        "or, without CUDA: pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0, then "
        "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions (this pair fits torch 2.13)"
    )
    return import_optional(f"torchrec.{module}", "torchrec", "the adapter TorchRec", advice)


_embedding_modules = import_torchrec("modules.embedding_modules")
_dlrm, _deepfm = import_torchrec("models.dlrm"), import_torchrec("models.deepfm")
EmbeddingBagCollection: Any = _embedding_modules.EmbeddingBagCollection
KeyedTensor: Any = import_torchrec("sparse.jagged_tensor").KeyedTensor
KeptColumns = dict[str, dict[int, Tensor]]  # parameter -> dimension -> kept indices
OVER_ARCH_WEIGHT = "over_arch.model.0._mlp.0._linear.weight"  # first weight of the layers after the interaction


@dataclass(frozen=True)
class Slot:
    """Columns start … stop-1 of a collection's output."""

    feature: str
    table: str
    start: int
    stop: int
    alone: bool  # no other feature uses its table
    looked_up: bool = True  # False: zeros, because the feature was dropped

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.stop - self.start


class ZeroPaddedCollection(EmbeddingBagCollection):  # type: ignore[misc]
    """A collection of the kept ``tables`` with all original slots and keys; zeros for dropped features."""

    def __init__(
        self, tables: list[Any], slots: Sequence[Slot], keys: list[str], is_weighted: bool, device: torch.device
    ) -> None:
        super().__init__(tables=tables, is_weighted=is_weighted, device=device)
        kept = {(name, config.name) for config in tables for name in config.feature_names}
        self.slots = tuple(replace(slot, looked_up=(slot.feature, slot.table) in kept) for slot in slots)
        self.keys = keys

    def forward(self, features: Any) -> Any:
        """Return a KeyedTensor (B, D) with all original keys."""
        if self._embedding_bag_configs:
            values = super().forward(features).values()
        else:
            values = torch.zeros(features.stride(), 0, device=features.device())
        parts = iter(values.split([slot.width for slot in self.slots if slot.looked_up], 1))
        columns = [next(parts) if slot.looked_up else values.new_zeros(len(values), slot.width) for slot in self.slots]
        widths = [slot.width for slot in self.slots]
        return KeyedTensor(keys=self.keys, length_per_key=widths, values=torch.cat(columns, 1))


def embedding_collections(model: nn.Module) -> list[tuple[str, Any]]:
    """Return path and module of every EmbeddingBagCollection."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)]


def get_slots(collection: Any) -> tuple[Slot, ...]:
    """Return the slots of a collection's output, in order."""
    if isinstance(collection, ZeroPaddedCollection):
        alone = {config.name: len(config.feature_names) == 1 for config in collection.embedding_bag_configs()}
        return tuple(replace(slot, alone=alone.get(slot.table, slot.alone)) for slot in collection.slots)
    slots, start = [], 0
    for config in collection.embedding_bag_configs():
        for name in config.feature_names:
            stop = start + config.embedding_dim
            slots.append(Slot(name, config.name, start, stop, len(config.feature_names) == 1))
            start = stop
    return tuple(slots)


def untie_collection(path: str, collection: Any) -> Any:
    """Return a collection with the same weights and one table per feature; None if this collection has that.

    The first feature of a table keeps the table's name; columns and keys of the output do not change.
    """
    configs = collection.embedding_bag_configs()
    if type(collection) is not EmbeddingBagCollection or all(len(config.feature_names) == 1 for config in configs):
        return None
    features = [name for config in configs for name in config.feature_names]
    if len(set(features)) < len(features):
        raise InputError(
            f"{path!r} has a feature in several tables; its KeyedTensor names them feature@table, and untying "
            "would change these keys. Give every feature its own tables yourself"
        )
    used_names, tables = {config.name for config in configs}, []
    for config in configs:
        for number, feature in enumerate(config.feature_names):
            name = config.name if number == 0 else f"{config.name}_{feature}"
            while number and name in used_names:
                name += "_"
            used_names.add(name)
            tables.append((config.name, replace(config, name=name, feature_names=[feature])))
    untied = EmbeddingBagCollection(
        tables=[config for _, config in tables], is_weighted=collection.is_weighted(), device=torch.device("meta")
    )
    for old_name, config in tables:
        weight = collection.embedding_bags[old_name].weight
        untied.embedding_bags[config.name].weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    untied._device = collection.device
    return untied.train(collection.training)


def smaller_collection(path: str, collection: Any, kept: Sequence[str], cut: bool) -> Any:
    """Return the smaller collection; its tables are on the meta device until ``rebuild`` fills in the weights."""
    if type(collection) not in (EmbeddingBagCollection, ZeroPaddedCollection):
        raise InputError(f"{path!r} is a {type(collection).__name__}; only an EmbeddingBagCollection can be pruned")
    configs, meta = [], torch.device("meta")
    for config in collection.embedding_bag_configs():
        names = [name for name in config.feature_names if name in kept]
        if names:
            configs.append(replace(config, feature_names=names))
    if cut:
        if not configs:
            raise AbsenceError(f"columns cannot be removed: every feature of {path!r} is dropped; prune without cut")
        smaller = EmbeddingBagCollection(tables=configs, is_weighted=collection.is_weighted(), device=meta)
    else:
        keys = list(collection.keys if isinstance(collection, ZeroPaddedCollection) else collection._embedding_names)
        smaller = ZeroPaddedCollection(configs, get_slots(collection), keys, collection.is_weighted(), meta)
    smaller._device = collection.device
    return smaller


# ``kept`` are the positions of the kept features in the collection. Each function cuts columns of a copied model
# in place and returns the kept indices of each weight; the weights are filled in later.


def cut_linear(linear: nn.Linear, dropped: Sequence[slice]) -> Tensor:
    """Remove columns of a Linear, in place, and return the indices of the kept ones."""
    keep = torch.ones(linear.in_features, dtype=torch.bool)
    for columns in dropped:
        keep[columns] = False
    index = keep.nonzero().flatten().to(linear.weight.device)
    linear.in_features = index.numel()
    shape = linear.out_features, linear.in_features
    linear.weight = nn.Parameter(torch.empty(shape, device="meta"), linear.weight.requires_grad)
    return index


def dlrm(model: Any, kept: Sequence[int]) -> KeptColumns:
    """DLRM: the dense token (D,), then the products of all pairs i < j of tokens; token 0 is the dense one."""
    dim, tokens = model.sparse_arch.D, [0, *(position + 1 for position in kept)]
    indices = model.inter_arch.triu_indices
    dropped = [number for number, pair in enumerate(indices.T.tolist()) if not set(pair) <= set(tokens)]
    _drop_tokens(model, kept)
    model.inter_arch.triu_indices = torch.triu_indices(len(tokens), len(tokens), offset=1).to(indices.device)
    pairs = [slice(dim + pair, dim + pair + 1) for pair in dropped]
    return {OVER_ARCH_WEIGHT: {1: cut_linear(model.over_arch.model[0]._mlp[0]._linear, pairs)}}


def dlrm_dcn(model: Any, kept: Sequence[int]) -> KeptColumns:
    """DLRM_DCN: crosses of the concatenated tokens; x·(W V x + b) + x is zero where x is, in every layer."""
    columns = cut_linear(model.over_arch.model[0]._mlp[0]._linear, _drop_tokens(model, kept))
    index: KeptColumns = {OVER_ARCH_WEIGHT: {1: columns}}
    for name, dim in (("W_kernels", 0), ("V_kernels", 1), ("bias", 0)):
        kernels = getattr(model.inter_arch.crossnet, name)
        for number, kernel in enumerate(kernels):
            shape = list(kernel.shape)
            shape[dim] = columns.numel()
            kernels[number] = nn.Parameter(torch.empty(shape, device="meta"), kernel.requires_grad)
            index[f"inter_arch.crossnet.{name}.{number}"] = {dim: columns}
    return index


def dlrm_projection(model: Any, kept: Sequence[int]) -> KeptColumns:
    """DLRM_Projection: two branches, each an MLP of the concatenated tokens."""
    dropped = _drop_tokens(model, kept)
    index: KeptColumns = {}
    for branch in ("interaction_branch1", "interaction_branch2"):
        columns = cut_linear(getattr(model.inter_arch, branch).model._mlp[0]._linear, dropped)
        index[f"inter_arch.{branch}.model._mlp.0._linear.weight"] = {1: columns}
    return index


def deepfm(model: Any, kept: Sequence[int]) -> KeptColumns:
    """SimpleDeepFMNN: a Linear of the concatenated tokens; zeros add nothing to its second-order sums."""
    inter = model.inter_arch
    linear = inter.deep_fm.dense_module[0]
    dim = linear.in_features // (len(inter.sparse_feature_names) + 1)
    dropped = _token_columns(dim, len(inter.sparse_feature_names), kept)
    inter.sparse_feature_names = [inter.sparse_feature_names[position] for position in kept]
    return {"inter_arch.deep_fm.dense_module.0.weight": {1: cut_linear(linear, dropped)}}


COLUMN_CUTS: dict[type, Callable[[Any, Sequence[int]], KeptColumns]] = {
    _dlrm.DLRM: dlrm,
    _dlrm.DLRM_DCN: dlrm_dcn,
    _dlrm.DLRM_Projection: dlrm_projection,
    _deepfm.SimpleDeepFMNN: deepfm,
}


def _token_columns(dim: int, count: int, kept: Sequence[int]) -> list[slice]:
    """Return the columns of the dropped tokens in the concatenation, after the dense token."""
    return [slice(dim * (token + 1), dim * (token + 2)) for token in range(count) if token not in kept]


def _drop_tokens(model: Any, kept: Sequence[int]) -> list[slice]:
    """Set the features of a model to the kept ones, in place, and return the columns of the dropped tokens."""
    sparse = model.sparse_arch
    dropped = _token_columns(sparse.D, sparse.F, kept)
    sparse._sparse_feature_names = [sparse._sparse_feature_names[position] for position in kept]
    sparse.F = model.inter_arch.F = len(kept)
    return dropped


class ShardedMultiply(Multiply):
    """Forward hook of a sharded collection: wait for its KeyedTensor and multiply it by the gates.

    Sharding may change the order of the keys, so the columns of each gate are looked up by key. ``at`` and ``keys``
    contain the columns of each gate and of each key in the plain collection.
    """

    def __init__(
        self, source: FactorSource, at: list[tuple[int, ResolvedSite]], keys: dict[str, tuple[int, int]]
    ) -> None:
        super().__init__(source, at)
        self.keys, self.arranged = keys, False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the gated KeyedTensor with its keys in the same order."""
        result = output.wait() if hasattr(output, "wait") else output
        if not self.arranged:
            self._arrange(result)
        gated = super().__call__(module, args, result)
        return result if gated is None else gated

    def _arrange(self, output: Any) -> None:
        """Set the columns of each gate to those of its key in the sharded output."""
        starts = dict(zip(output.keys(), output.offset_per_key()[:-1], strict=True))
        new_starts = {columns: starts[key] for key, columns in self.keys.items()}
        arranged = []
        for number, place in self.at:
            assert place.start is not None
            assert place.stop is not None
            start = new_starts[place.start, place.stop]
            arranged.append((number, replace(place, start=start, stop=start + place.stop - place.start)))
        self.at, self.arranged = arranged, True


def columns_of_keys(configs: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Return key -> its columns in the KeyedTensor of a plain collection of these tables."""
    columns, start = {}, 0
    for config, keys in zip(configs, _embedding_modules.get_embedding_names_by_table(configs), strict=True):
        for key in keys:
            columns[key] = (start, start + config.embedding_dim)
            start += config.embedding_dim
    return columns


def gather_tensor(value: Any, device: torch.device, to: int) -> Any:
    """Return a sharded tensor assembled on rank ``to``, any other value unchanged."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if not hasattr(value, "local_shards"):
        return value
    metadata = value.metadata()
    full: Tensor = torch.zeros(tuple(metadata.size), dtype=metadata.tensor_properties.dtype, device=device)
    for shard in value.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        full[region] = shard.tensor
    distributed.reduce(full, to)  # every entry is in exactly one shard: the sum with zeros is that entry
    return full
