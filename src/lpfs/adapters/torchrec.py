"""Adapter for TorchRec: fields are the features of EmbeddingBagCollections; pruning makes the collections smaller.

For TorchRec's own DLRM, DLRM_DCN, DLRM_Projection and SimpleDeepFMNN the dense columns of each feature can be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lpfs.adapters._torchrec_modules import (
    COLUMN_CUTS,
    KeptColumns,
    KeyedTensor,
    ShardedMultiply,
    columns_of_keys,
    cut_linear,
    embedding_collections,
    gather_tensor,
    get_slots,
    smaller_collection,
    untie_collection,
)
from lpfs.adapters.base import Adapter
from lpfs.adapters.torchrec_batches import drop_features, perturb_dense, perturb_feature
from lpfs.errors import AbsenceError, InputError, StateError
from lpfs.gates.hooks import OUTPUT_TYPES
from lpfs.gates.module import ATTRIBUTE, Gates
from lpfs.gates.prune import ZeroBranch
from lpfs.gates.rebuild import copy_without_factors
from lpfs.gates.sites import Site, SiteLike
from lpfs.gates.verification import InputPath


def _with_values(output: Any, values: Tensor) -> Any:
    return KeyedTensor(output.keys(), output.length_per_key(), values, output.key_dim())


OUTPUT_TYPES[KeyedTensor] = (KeyedTensor.values, _with_values)


class TorchRec(Adapter):
    """Adapter for models with TorchRec's ``EmbeddingBagCollection``, including its own DLRM and DeepFM.

    A feature is a field; its gate multiplies its columns of the ``KeyedTensor``. ``absorb`` folds the gate into
    the feature's table, or leaves a constant if features share the table. A feature of several collections (for
    example a deep and a wide one) has one gate for all of them.

    Args:
        dense: name of the field for the dense branch of TorchRec's own models; None leaves it without a gate.
        readers: for your own model, path of a collection -> path of the ``nn.Linear`` whose input are its values,
            or (path, first column), or None if they are only summed; ``prune(…, cut=True)`` needs it.
        probabilities: whether the model returns probabilities, as SimpleDeepFMNN does, instead of logits.
    """

    def __init__(
        self,
        *,
        dense: str | None = "dense",
        readers: Mapping[str, str | tuple[str, int] | None] | None = None,
        probabilities: bool = False,
    ) -> None:
        self.dense, self.readers, self.probabilities = dense, dict(readers or {}), probabilities

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        sites: dict[str, list[SiteLike]] = {}
        if self.dense is not None:
            for path, _ in _known_models(model):
                inner = f"{path}.dense_arch".lstrip(".")
                branch = model.get_submodule(inner)
                if not isinstance(branch, ZeroBranch):
                    # the gate of an nn.Sequential can be folded into its last Linear
                    is_sequential = type(getattr(branch, "model", None)) is nn.Sequential
                    sites.setdefault(self.dense, []).append(Site(f"{inner}.model" if is_sequential else inner))
        for path, collection in embedding_collections(model):
            for slot in (slot for slot in get_slots(collection) if slot.looked_up):
                # outputs are float32, so a gate can only be folded into a float32 table
                foldable = slot.alone and collection.embedding_bags[slot.table].weight.dtype == torch.float32
                table = f"{path}.embedding_bags.{slot.table}".lstrip(".") if foldable else None
                sites.setdefault(slot.feature, []).append(Site(path, slice(slot.start, slot.stop), table=table))
        if not sites:
            raise InputError(f"{type(model).__name__} has no EmbeddingBagCollection; give a model of TorchRec")
        return sites

    def inputs_of_fields(self, model: nn.Module) -> dict[str, InputPath]:
        """Return field -> function that replaces its values in a batch by those of other rows."""
        features = [slot.feature for _, collection in embedding_collections(model) for slot in get_slots(collection)]
        inputs: dict[str, InputPath] = {name: partial(perturb_feature, name=name) for name in features}
        if self.dense is not None and _known_models(model):
            inputs[self.dense] = perturb_dense
        return inputs

    def untie(self, model: nn.Module) -> None:
        """Give every feature its own table with the same weights, in place; predictions do not change.

        Call it before ``attach`` and before the optimizer is created. Gates of features that share a table stay
        constants on the collection, which ``DistributedModelParallel`` loses; gates of untied features are folded
        into their tables.
        """
        if hasattr(model, ATTRIBUTE):
            raise StateError("untie: the model has gates already; untie its tables before attach")
        untied = {module: untie_collection(path, module) for path, module in embedding_collections(model)}
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if untied.get(module) is not None:
                parent, _, child = path.rpartition(".")
                model.get_submodule(parent)._modules[child] = untied[module]

    def rehook(self, parallel: nn.Module) -> None:
        """Attach the gates to the sharded collections of a DistributedModelParallel, in place.

        DistributedModelParallel replaces plain collections, and with them the hooks of the gates. The gates are in
        its data-parallel part, so that every rank has the same gradient for them.
        """
        inner = getattr(parallel, "module", parallel)
        gates = getattr(inner, ATTRIBUTE, None)
        if not isinstance(gates, Gates):
            raise StateError("rehook: the wrapped model has no gates; attach them before DistributedModelParallel")
        for number, hook in enumerate(gates.hooks):
            if hook.at[0][1].at_reader:
                continue
            path = hook.at[0][1].module
            module = inner.get_submodule(path)
            if any(registered is hook for registered in module._forward_hooks.values()):
                continue
            configs = getattr(module, "_embedding_bag_configs", None)
            if configs is None:
                raise StateError(f"rehook: {path!r} is a {type(module).__name__}, not a sharded EmbeddingBagCollection")
            gates.hooks[number] = ShardedMultiply(gates, hook.at, columns_of_keys(configs))
            module.register_forward_hook(gates.hooks[number])

    def gather(self, parallel: nn.Module, model: nn.Module | None, *, to: int = 0) -> None:
        """Load weights and gates of a DistributedModelParallel into a plain model on one rank, to absorb it there.

        Every rank must call it; ``model`` is a plain model with the same gates attached, and may be None on ranks
        other than ``to``. Every rank needs memory for one full table at a time.
        """
        ready = [isinstance(getattr(model, ATTRIBUTE, None), Gates)]
        distributed.broadcast_object_list(ready, to)  # so that all ranks raise together
        if not ready[0]:
            raise StateError(f"gather: rank {to} needs a plain model with the same gates attached")
        device = next((parameter.device for parameter in parallel.parameters()), torch.device("cpu"))
        state = {}
        for name, value in parallel.state_dict().items():  # in the same order on every rank
            gathered = gather_tensor(value, device, to)
            if distributed.get_rank() == to:
                state[name] = gathered
        if model is not None and distributed.get_rank() == to:
            model.load_state_dict(state)

    def smaller(self, model: nn.Module, kept: Sequence[str], cut: bool) -> tuple[nn.Module, KeptColumns]:
        """Return a copy with smaller collections, and the kept columns of the layers after them."""
        memo: dict[int, Any] = {
            id(collection): smaller_collection(path, collection, kept, cut)
            for path, collection in _changed_collections(model, kept).items()
        }
        for path, _ in _known_models(model):
            branch = model.get_submodule(f"{path}.dense_arch".lstrip("."))
            if self.dense is not None and self.dense not in kept and not isinstance(branch, ZeroBranch):
                last = [module for module in branch.modules() if isinstance(module, nn.Linear)][-1]
                memo[id(branch)] = ZeroBranch((last.out_features,), last.weight)
        copied = copy_without_factors(model, memo)
        return copied, self._cut_columns(model, copied, kept) if cut else {}

    def _cut_columns(self, model: nn.Module, smaller: nn.Module, kept: Sequence[str]) -> KeptColumns:
        """Cut the columns of dropped features in the layers of the copy, and return the kept columns."""
        changed = _changed_collections(model, kept)
        index: KeptColumns = {}
        for path, module in _known_models(model):
            prefix = f"{path}." if path else ""
            collection = changed.pop(f"{prefix}sparse_arch.embedding_bag_collection", None)
            if collection is not None:
                positions = [number for number, slot in enumerate(get_slots(collection)) if slot.feature in kept]
                kept_columns = COLUMN_CUTS[type(module)](smaller.get_submodule(path), positions)
                index |= {prefix + name: columns for name, columns in kept_columns.items()}
        for path, collection in changed.items():
            if path not in self.readers:
                raise InputError(
                    f"columns cannot be removed: the layer after {path!r} is unknown; give it, "
                    f"TorchRec(readers={{{path!r}: 'path of the Linear'}}), or prune without cut"
                )
            location = self.readers[path]
            if location is None:
                continue
            reader, first = (location, 0) if isinstance(location, str) else location
            linear = smaller.get_submodule(reader)
            if type(linear) is not nn.Linear:
                kind = type(linear).__name__
                raise AbsenceError(f"columns cannot be removed: {reader!r} is a {kind}, not an nn.Linear")
            dropped = [slot for slot in get_slots(collection) if slot.feature not in kept]
            spans = [slice(first + slot.start, first + slot.stop) for slot in dropped]
            index[f"{reader}.weight"] = {1: cut_linear(linear, spans)}
        return index

    def narrow(self, model: nn.Module, batch: Any, smaller: nn.Module) -> Any:
        """Return the batch without the features that the smaller model does not look up."""
        return drop_features(batch, _looked_up_features(model) - _looked_up_features(smaller))


def _changed_collections(model: nn.Module, kept: Sequence[str]) -> dict[str, Any]:
    """Return path -> collection for those with a dropped feature."""
    return {
        path: collection
        for path, collection in embedding_collections(model)
        if any(slot.feature not in kept for slot in get_slots(collection))
    }


def _looked_up_features(model: nn.Module) -> set[str]:
    slots = [slot for _, collection in embedding_collections(model) for slot in get_slots(collection)]
    return {slot.feature for slot in slots if slot.looked_up}


def _known_models(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if type(module) in COLUMN_CUTS]
