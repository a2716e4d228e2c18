"""Gates on collections that DistributedModelParallel has sharded, and the way back to one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lpfs.adapters.need import package
from lpfs.adapters._torchrec_modules import ADVICE
from lpfs.errors import StateError
from lpfs.gates.hooks import HOLDERS, Multiply, Source
from lpfs.gates.module import NAME, Gates
from lpfs.gates.sites import Place

_names = package("torchrec.modules.embedding_modules", "torchrec", ADVICE).get_embedding_names_by_table


class OnShards(Multiply):
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
        gates.hooks[number] = OnShards(gates, hook.at, keys)
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
        found = _whole(each, device, to)
        if here == to:
            whole[name] = found
    if model is not None and here == to:
        model.load_state_dict(whole)


def _whole(value: Any, device: torch.device, to: int) -> Any:
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
