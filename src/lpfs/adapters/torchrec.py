"""TorchRec: fields are the features of its EmbeddingBagCollections; a smaller model has smaller collections.

Its own DLRM, DLRM_DCN, DLRM_Projection and SimpleDeepFMNN are known down to the columns that read each feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters._torchrec_modules import (
    COLUMN_CUTS,
    Kept,
    KeyedTensor,
    collections,
    cut_linear,
    gather,
    rehook,
    slots_of,
    smaller_collection,
    still_looked_up,
    untie_collection,
)
from lpfs.adapters.base import Adapter
from lpfs.adapters.torchrec_batches import drop_features, perturb_dense, perturb_feature
from lpfs.errors import AbsenceError, InputError, StateError
from lpfs.gates.hooks import HOLDERS
from lpfs.gates.leak import Where
from lpfs.gates.module import NAME
from lpfs.gates.prune import ZeroBranch
from lpfs.gates.rebuild import bare_copy
from lpfs.gates.sites import Site, SiteLike, paths_by_module


def _with_values(output: Any, values: Tensor) -> Any:
    """Return a KeyedTensor with other values under the same keys."""
    return KeyedTensor(output.keys(), output.length_per_key(), values, output.key_dim())


HOLDERS[KeyedTensor] = (KeyedTensor.values, _with_values)


class TorchRec(Adapter):
    """Models around TorchRec's ``EmbeddingBagCollection``, its own DLRM and DeepFM among them.

    A feature is a field; its gate multiplies its columns of the ``KeyedTensor``. ``absorb`` puts it into the table
    of the feature, or leaves a constant where features share a table. A feature of several collections (a deep and
    a wide one, say) has one gate for all of them.

    Args:
        dense: name of the field that is the dense branch of TorchRec's own models; None leaves it without a gate.
        readers: for a model of yours, path of a collection -> path of the ``nn.Linear`` that reads its values,
            or (path, first column), or None where they are only summed: ``prune(…, cut=True)`` then cuts columns.
        probabilities: whether the model returns probabilities, as SimpleDeepFMNN does, and not logits.

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
        """Return field -> its tables, its columns of a KeyedTensor, or the dense branch."""
        found: dict[str, list[SiteLike]] = {}
        if self.dense is not None:
            for path, _ in _known_models(model):
                inner = f"{path}.dense_arch" if path else "dense_arch"
                branch = model.get_submodule(inner)
                plain = (
                    type(getattr(branch, "model", None)) is nn.Sequential
                )  # its last Linear can take the gate in
                if not isinstance(branch, ZeroBranch):
                    found.setdefault(self.dense, []).append(Site(f"{inner}.model" if plain else inner))
        for path, collection in collections(model):
            for slot, held in zip(slots_of(collection), still_looked_up(collection), strict=True):
                if held:
                    # outputs are float32: a gate that multiplied them fits into a table of float32 alone
                    own = slot.alone and collection.embedding_bags[slot.table].weight.dtype == torch.float32
                    inside = f"{path}.embedding_bags.{slot.table}" if path else f"embedding_bags.{slot.table}"
                    site = Site(path, index=slice(slot.start, slot.stop), table=inside if own else None)
                    found.setdefault(slot.feature, []).append(site)
        if not found:
            raise InputError(
                f"{type(model).__name__} has no EmbeddingBagCollection: nothing can be selected in it"
            )
        return found

    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return how a batch gets other values in a feature: those of other rows."""
        names = dict.fromkeys(slot.feature for _, each in collections(model) for slot in slots_of(each))
        found: dict[str, Where] = {name: partial(perturb_feature, name=name) for name in names}
        if self.dense is not None and any(True for _ in _known_models(model)):
            found[self.dense] = perturb_dense
        return found

    def untie(self, model: nn.Module) -> None:
        """Give every feature a table of its own with the weights of before, in place; predictions stay the same.

        To be done before ``attach``, and before the optimizer is made. Gates of features that share a table stay
        as constants on the collection, which ``DistributedModelParallel`` loses; those of untied ones go into
        their tables.
        """
        if hasattr(model, NAME):
            raise StateError("untie: this model has gates already; untie its tables before attach")
        made = {module: untie_collection(path, module) for path, module in collections(model)}
        for module, paths in paths_by_module(model).items():
            for path in paths:
                if made.get(module) is not None:
                    parent, _, child = path.rpartition(".")
                    model.get_submodule(parent)._modules[child] = made[module]

    def rehook(self, parallel: nn.Module) -> None:
        """Put the gates on the sharded collections of a DistributedModelParallel, in place, once it is made.

        It replaces plain collections, and the hooks of gates with them. What follows is as before: gates are in
        its data-parallel part, so that every rank has the same gradient of them.
        """
        rehook(parallel)

    def gather(self, parallel: nn.Module, model: nn.Module | None, *, to: int = 0) -> None:
        """Load weights and gates of a DistributedModelParallel into a plain model on one rank, to absorb it there.

        Every rank calls it; ``model`` is a plain one with the same gates attached, and may be None on other ranks
        than ``to``. A table at a time stands whole in memory on every rank.
        """
        gather(parallel, model, to)

    # ------------------------------------------------------------------------------- the smaller model

    def smaller(self, model: nn.Module, kept: Sequence[str], cut: bool) -> tuple[nn.Module, Kept]:
        """Return a copy with smaller collections, and which columns stay of the layers that read them."""
        memo: dict[int, Any] = {}
        for path, collection in collections(model):
            if any(slot.feature not in kept for slot in slots_of(collection)):
                memo[id(collection)] = smaller_collection(path, collection, kept, cut)
        for path, _ in _known_models(model):
            branch = model.get_submodule(f"{path}.dense_arch" if path else "dense_arch")
            if self.dense is not None and self.dense not in kept and not isinstance(branch, ZeroBranch):
                last = [each for each in branch.modules() if isinstance(each, nn.Linear)][-1]
                memo[id(branch)] = ZeroBranch((last.out_features,), last.weight)
        copied = bare_copy(model, memo)
        return copied, self._cut(model, copied, kept) if cut else {}

    def _cut(self, model: nn.Module, smaller: nn.Module, kept: Sequence[str]) -> Kept:
        """Make the layers of the copy narrower that read a collection, and return which columns stay."""
        changed = {
            path: each for path, each in collections(model) if any(s.feature not in kept for s in slots_of(each))
        }
        index: Kept = {}
        for path, module in _known_models(model):
            inside = (
                f"{path}.sparse_arch.embedding_bag_collection" if path else "sparse_arch.embedding_bag_collection"
            )
            collection = changed.pop(inside, None)
            if collection is not None:
                stay = [number for number, slot in enumerate(slots_of(collection)) if slot.feature in kept]
                found = COLUMN_CUTS[type(module)](smaller.get_submodule(path), stay)
                index |= {f"{path}.{name}" if path else name: each for name, each in found.items()}
        for path, collection in changed.items():
            if path not in self.readers:
                raise InputError(
                    f"columns cannot be cut: it is not known what reads {path!r}; say so, "
                    f"TorchRec(readers={{{path!r}: 'path of the Linear'}}), or prune without cut"
                )
            given = self.readers[path]
            if given is None:
                continue
            reader, first = (given, 0) if isinstance(given, str) else given
            linear = smaller.get_submodule(reader)
            if type(linear) is not nn.Linear:
                raise AbsenceError(f"columns cannot be cut: {reader!r} is a {type(linear).__name__}, no nn.Linear")
            gone = [slice(first + s.start, first + s.stop) for s in slots_of(collection) if s.feature not in kept]
            index[f"{reader}.weight"] = {1: cut_linear(linear, gone)}
        return index

    def narrow(self, model: nn.Module, batch: Any, smaller: nn.Module) -> Any:
        """Return the batch without the features that nothing in the smaller model looks up."""
        before, after = (
            {
                slot.feature
                for _, each in collections(one)
                for slot, held in zip(slots_of(each), still_looked_up(each), strict=True)
                if held
            }
            for one in (model, smaller)
        )
        return drop_features(batch, before - after)


def _known_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of TorchRec's own models, wherever they are inside this one."""
    for path, module in model.named_modules():
        if type(module) in COLUMN_CUTS:
            yield path, module
