"""TorchRec's collections of tables: what each feature takes of one, and smaller ones.

Which columns of TorchRec's own models read which feature, so that they can go with it.

The features of a model stand in the order of its collection; ``stay`` are the positions of those that stay. Each
function makes a copy of the model narrower, in place, and returns what stays of each weight, per dim.

Gates on collections that DistributedModelParallel has sharded, and the way back to one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lpfs.adapters.need import package
from lpfs.errors import AbsenceError, InputError, StateError
from lpfs.gates.hooks import HOLDERS, Multiply, Source
from lpfs.gates.module import NAME, Gates
from lpfs.gates.sites import Place

INSTALL_HINT = (
    "or, without CUDA: pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0, then "
    "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions (this pair fits torch 2.13)"
)
EmbeddingBagCollection: Any = package(
    "torchrec.modules.embedding_modules", "torchrec", INSTALL_HINT
).EmbeddingBagCollection
KeyedTensor: Any = package("torchrec.sparse.jagged_tensor", "torchrec", INSTALL_HINT).KeyedTensor


@dataclass(frozen=True)
class Slot:
    """What a feature takes of a collection's output: columns start … stop-1; ``alone``: its table is its own."""

    feature: str
    table: str
    start: int
    stop: int
    alone: bool


class ZeroPaddedCollection(EmbeddingBagCollection):  # type: ignore[misc]
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
    if isinstance(collection, ZeroPaddedCollection):
        alone = {each.name: len(each.feature_names) == 1 for each in collection.embedding_bag_configs()}
        return tuple(replace(slot, alone=alone.get(slot.table, slot.alone)) for slot in collection.slots)
    found, at = [], 0
    for config in collection.embedding_bag_configs():
        for name in config.feature_names:
            found.append(Slot(name, config.name, at, at + config.embedding_dim, len(config.feature_names) == 1))
            at += config.embedding_dim
    return tuple(found)


def still_looked_up(collection: Any) -> tuple[bool, ...]:
    """Return for every slot whether it is still looked up."""
    return collection.held if isinstance(collection, ZeroPaddedCollection) else (True,) * len(slots_of(collection))


def configs_of(collection: Any, kept: Sequence[str]) -> list[Any]:
    """Return the configurations of a collection with the kept features alone; tables without any are gone."""
    found = []
    for config in collection.embedding_bag_configs():
        names = [name for name in config.feature_names if name in kept]
        if names:
            found.append(replace(config, feature_names=names))
    return found


def untie_collection(path: str, collection: Any) -> Any:
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


def smaller_collection(path: str, collection: Any, kept: Sequence[str], cut: bool) -> Any:
    """Return the smaller collection; its tables are on no device yet: ``rebuild`` puts the weights in."""
    if type(collection) not in (EmbeddingBagCollection, ZeroPaddedCollection):
        raise InputError(
            f"{path!r} is a {type(collection).__name__}; only EmbeddingBagCollection can be made smaller"
        )
    configs, nowhere = configs_of(collection, kept), torch.device("meta")
    if cut:
        if not configs:
            raise AbsenceError(f"columns cannot be cut: every feature of {path!r} is dropped; prune without cut")
        made = EmbeddingBagCollection(tables=configs, is_weighted=collection.is_weighted(), device=nowhere)
    else:
        keys = list(
            collection.keys if isinstance(collection, ZeroPaddedCollection) else collection._embedding_names
        )
        made = ZeroPaddedCollection(configs, slots_of(collection), keys, collection.is_weighted(), nowhere)
    made._device = collection.device
    return made


_dlrm = package("torchrec.models.dlrm", "torchrec", INSTALL_HINT)
_deepfm = package("torchrec.models.deepfm", "torchrec", INSTALL_HINT)

Kept = dict[str, dict[int, Tensor]]


def cut_linear(linear: nn.Linear, gone: Sequence[slice]) -> Tensor:
    """Take columns off a Linear, whose weight is filled in later, and return those that stay."""
    keep = torch.ones(linear.in_features, dtype=torch.bool)
    for each in gone:
        keep[each] = False
    columns = keep.nonzero().flatten().to(linear.weight.device)
    shape = linear.out_features, columns.numel()
    linear.weight = nn.Parameter(torch.empty(shape, device="meta"), linear.weight.requires_grad)
    linear.in_features = columns.numel()
    return columns


def dlrm(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM reads the dense token (D,) and the products of all pairs i < j of tokens, 0 being the dense one."""
    dim, tokens = model.sparse_arch.D, [0, *(at + 1 for at in stay)]
    first, second = (each.tolist() for each in model.inter_arch.triu_indices)
    pairs = [number for number, (i, j) in enumerate(zip(first, second, strict=True)) if not {i, j} <= set(tokens)]
    _fewer_features(model, stay)
    there = model.inter_arch.triu_indices
    model.inter_arch.triu_indices = torch.triu_indices(len(tokens), len(tokens), offset=1).to(there.device)
    columns = cut_linear(_first(model.over_arch), [slice(dim + at, dim + at + 1) for at in pairs])
    return {f"{OVER}.weight": {1: columns}}


def dlrm_dcn(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM_DCN crosses all tokens side by side: x·(W V x + b) + x is zero where x is, in every layer."""
    gone = _gone_tokens(model, stay)
    _fewer_features(model, stay)
    columns = cut_linear(_first(model.over_arch), gone)
    index: Kept = {f"{OVER}.weight": {1: columns}}
    for name, dim in (("W_kernels", 0), ("V_kernels", 1), ("bias", 0)):
        kernels = getattr(model.inter_arch.crossnet, name)
        for number, kernel in enumerate(kernels):
            shape = list(kernel.shape)
            shape[dim] = columns.numel()
            kernels[number] = nn.Parameter(torch.empty(shape, device="meta"), kernel.requires_grad)
            index[f"inter_arch.crossnet.{name}.{number}"] = {dim: columns}
    return index


def dlrm_projection(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM_Projection has two branches, each an MLP of all tokens side by side."""
    gone = _gone_tokens(model, stay)
    _fewer_features(model, stay)
    index: Kept = {}
    for branch in ("interaction_branch1", "interaction_branch2"):
        columns = cut_linear(getattr(model.inter_arch, branch).model._mlp[0]._linear, gone)
        index[f"inter_arch.{branch}.model._mlp.0._linear.weight"] = {1: columns}
    return index


def deepfm(model: Any, stay: Sequence[int]) -> Kept:
    """SimpleDeepFMNN has one Linear of all tokens side by side; zeros vanish in the sums of its second order."""
    inter = model.inter_arch
    linear = inter.deep_fm.dense_module[0]
    dim = linear.in_features // (len(inter.sparse_feature_names) + 1)
    gone = [
        slice(dim * (at + 1), dim * (at + 2)) for at in range(len(inter.sparse_feature_names)) if at not in stay
    ]
    inter.sparse_feature_names = [inter.sparse_feature_names[at] for at in stay]
    return {"inter_arch.deep_fm.dense_module.0.weight": {1: cut_linear(linear, gone)}}


OVER = "over_arch.model.0._mlp.0._linear"
COLUMN_CUTS: dict[type, Callable[[Any, Sequence[int]], Kept]] = {
    _dlrm.DLRM: dlrm,
    _dlrm.DLRM_DCN: dlrm_dcn,
    _dlrm.DLRM_Projection: dlrm_projection,
    _deepfm.SimpleDeepFMNN: deepfm,
}


def _first(over: Any) -> nn.Linear:
    linear: nn.Linear = over.model[0]._mlp[0]._linear
    return linear


def _gone_tokens(model: Any, stay: Sequence[int]) -> list[slice]:
    dim = model.sparse_arch.D
    return [slice(dim * (at + 1), dim * (at + 2)) for at in range(model.sparse_arch.F) if at not in stay]


def _fewer_features(model: Any, stay: Sequence[int]) -> None:
    sparse = model.sparse_arch
    sparse._sparse_feature_names = [sparse._sparse_feature_names[at] for at in stay]
    sparse.F = model.inter_arch.F = len(stay)


_names = package("torchrec.modules.embedding_modules", "torchrec", INSTALL_HINT).get_embedding_names_by_table


class ShardedMultiply(Multiply):
    """After the forward of a sharded collection: wait for its KeyedTensor, and multiply by key.

    Its keys may stand in another order than those of the plain collection: they go by how tables are sharded.

    Args:
        source: the gates.
        at: number of a gate, and its columns in the plain collection.
        keys: key -> its columns in the plain collection.

    """

    def __init__(self, source: Source, at: list[tuple[int, Place]], keys: dict[str, tuple[int, int]]) -> None:
        super().__init__(source, at)
        self.keys, self.arranged = keys, False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the gated KeyedTensor, its keys in the order in which they came."""
        found = output.wait() if hasattr(output, "wait") else output
        if not self.arranged:
            self._arrange(found)
        take, put = HOLDERS[type(found)]
        gated = super().__call__(module, args, take(found))
        return found if gated is None else put(found, gated)

    def _arrange(self, found: Any) -> None:
        """Take the columns of each gate from where its key stands now."""
        starts = dict(zip(found.keys(), found.offset_per_key()[:-1], strict=True))
        moved = {columns: starts[key] for key, columns in self.keys.items()}
        arranged = []
        for number, place in self.at:
            assert place.start is not None
            assert place.stop is not None
            start = moved[place.start, place.stop]
            arranged.append((number, replace(place, start=start, stop=start + place.stop - place.start)))
        self.at, self.arranged = arranged, True


def rehook(parallel: nn.Module) -> None:
    """Put the gates of a model on the sharded collections that now stand in the place of plain ones, in place."""
    inner = getattr(parallel, "module", parallel)
    gates = getattr(inner, NAME, None)
    if not isinstance(gates, Gates):
        raise StateError("rehook: the model inside has no gates; attach them before DistributedModelParallel")
    for number, hook in enumerate(gates.hooks):
        path = hook.at[0][1].module
        module = inner.get_submodule(path)
        if any(each is hook for each in module._forward_hooks.values()):
            continue
        configs = getattr(module, "_embedding_bag_configs", None)
        if configs is None:
            raise StateError(f"rehook: {path!r} is a {type(module).__name__} now, no collection of TorchRec")
        keys, at = {}, 0
        for config, names in zip(configs, _names(configs), strict=True):
            for name in names:
                keys[name] = (at, at + config.embedding_dim)
                at += config.embedding_dim
        gates.hooks[number] = ShardedMultiply(gates, hook.at, keys)
        module.register_forward_hook(gates.hooks[number])


def gather(parallel: nn.Module, model: nn.Module | None, to: int) -> None:
    """Load weights and gates of a sharded model into a plain one on rank ``to``; every rank calls it."""
    here = distributed.get_rank()
    ready = [isinstance(getattr(model, NAME, None), Gates)]
    distributed.broadcast_object_list(ready, to)  # so that nobody waits for a rank that gives up
    if not ready[0]:
        raise StateError(f"gather: rank {to} needs a plain model with the same gates attached to load into")
    device = next((each.device for each in parallel.parameters()), torch.device("cpu"))
    whole = {}
    for name, each in parallel.state_dict().items():  # in the same order on every rank
        found = _gather_tensor(each, device, to)
        if here == to:
            whole[name] = found
    if model is not None and here == to:
        model.load_state_dict(whole)


def _gather_tensor(value: Any, device: torch.device, to: int) -> Any:
    """Return a tensor, put together from its shards on rank ``to``; what is no tensor as it is."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if not hasattr(value, "local_shards"):
        return value
    about = value.metadata()
    found: Tensor = torch.zeros(tuple(about.size), dtype=about.tensor_properties.dtype, device=device)
    for shard in value.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        found[place] = shard.tensor
    distributed.reduce(found, to)  # every entry is in one shard alone: the sum with zeros is that entry
    return found
