"""FuxiCTR: models of its model zoo, and any other that is made of its layers, from their feature_map.

adapter = FuxiCTR(make=lambda feature_map: DeepFM(feature_map, **params))
gates = adapter.attach(model, steps=20_000)
…
feature_map = adapter.feature_map(model, selection)   # FuxiCTR's own description of the fields that stay
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters.builds import Builds
from lpfs.adapters.layout import Layout
from lpfs.adapters.need import package
from lpfs.errors import InputError, SharedTableError
from lpfs.gates.attach import twin
from lpfs.gates.leak import Where
from lpfs.gates.module import Gates
from lpfs.gates.sites import SiteLike
from lpfs.schema import Selection


class FuxiCTR(Builds):
    """Knows models that look their fields up by FuxiCTR's ``FeatureEmbedding``.

    Each of these layers in a model is a place where a field enters: the embedding, the linear part
    (``LogisticRegression``, in ``FactorizationMachine`` too), the context of FinalMLP's feature selection. A batch
    is what its data loaders give: a dict of columns, labels included.

    Args:
        make: makes a model as yours was made, from a feature_map; ``prune(cut=True)`` needs it.
        untie: for features with ``share_embedding``: give each a table of its own.

    """

    own_optimizer = "optimizer"
    example = "FuxiCTR(make=lambda feature_map: DeepFM(feature_map, **params))"

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return feature -> its module in every ``FeatureEmbedding`` of the model."""
        found: dict[str, list[SiteLike]] = {}
        for path, layer in _layers(model):
            for name in layer.embedding_layers:
                # a projection of given vectors is the last of its modules, pooling of a sequence is not
                projected = isinstance(layer.embedding_layers[name], nn.Identity)
                kind = "feature_encoders" if projected else "embedding_layers"
                found.setdefault(name, []).append(f"{path}.{kind}.{name}")
        if not found:
            raise InputError(f"{type(model).__name__} has no FeatureEmbedding layer: it is no model of FuxiCTR")
        order = [name for name in _map_of(model).features if name in found]
        return {name: found[name] for name in order}

    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return feature -> its key in the batch."""
        return {name: name for name in self.sites(model)}

    def inputs_in(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return feature -> its key in this batch; models of long histories take a tuple of dicts."""
        if not isinstance(batch, tuple | list):
            return self.inputs_of_fields(model)
        return {
            name: (number, name)
            for name in self.sites(model)
            for number, part in enumerate(batch)
            if isinstance(part, Mapping) and name in part
        }

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        """Put gates on all features of the model, or those named, in place; its predictions stay bit-identical."""
        _separate(model, self.untie or settings.pop("untie", False))
        return super().attach(model, fields, **settings)

    def batches(self, model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Yield (batch, labels (B, T)) of one of FuxiCTR's data loaders, again and again, for ``search``."""
        labels = _map_of(model).labels
        device = next(model.parameters()).device
        while True:
            empty = True
            for batch in loader:
                columns = batch[0] if isinstance(batch, tuple | list) else batch
                yield batch, torch.stack([columns[name].float().reshape(-1) for name in labels], 1).to(device)
                empty = False
            if empty:
                raise InputError("the data loader has no batch")

    # ------------------------------------------------------------------------------ a smaller model

    def feature_map(self, model: nn.Module, selection: Selection) -> Any:
        """Return FuxiCTR's ``FeatureMap`` of the fields that stay; its ``save`` writes feature_map.json."""
        return self._kept_map(model, [name for name in self.sites(model) if name not in selection.dropped])

    def _kept_map(self, model: nn.Module, kept: Sequence[str]) -> Any:
        old = _map_of(model)
        result = copy.copy(old)
        gated = self.sites(model)
        stays = {name: dict(spec) for name, spec in old.features.items() if name in kept or name not in gated}
        repoint(stays, {name: _table_of(model, name) for name in stays})
        result.features = type(old.features)(stays)
        result.labels, result.column_index = list(old.labels), {}
        result.num_fields = result.get_num_fields()
        result.total_features = sum(map(_values_of, stays.values()))
        result.set_column_index()
        return result

    def again(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return a model made from the feature_map of the fields that stay."""
        assert self.make is not None
        return self.make(self._kept_map(model, kept))

    def narrow(self, model: nn.Module, batch: Any, smaller: Any) -> Any:
        """Return the batch without the columns that the smaller model does not know."""
        dropped = set(self.sites(model)) - set(_map_of(smaller).features)

        def narrowed(part: Any) -> Any:
            if not isinstance(part, Mapping):
                return part
            return {name: column for name, column in part.items() if name not in dropped}

        if isinstance(batch, tuple | list):
            return type(batch)(narrowed(part) for part in batch)
        return narrowed(batch)

    def layout(self, model: nn.Module) -> Layout:
        """Return the features in the order of the feature_map, and their widths."""
        features = _map_of(model).features
        widths = {}
        for name in self.sites(model):
            spec = features[name]
            widths[name] = spec.get("emb_output_dim", _width_of(model, name, spec))
        return Layout(widths, tuple(widths))

    def activations(self, model: nn.Module) -> list[nn.Module]:
        """Return ``output_activation``, one a task."""
        end: Any = getattr(model, "output_activation", None)
        if isinstance(end, nn.ModuleList):
            return list(end)
        return [] if end is None else [end]


def repoint(features: dict[str, Any], groups: Mapping[str, Any]) -> None:
    """Let features that share a table point at the first of them that is left, in place.

    ``groups`` is feature -> anything that is equal for those that share a table.
    """
    first: dict[Any, str] = {}
    for name, spec in features.items():
        head = first.setdefault(groups[name], name)
        spec.pop("share_embedding", None)
        if head != name:
            spec["share_embedding"] = head


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return every layer of FuxiCTR in a model that holds a table for every feature, and its path."""
    layers = package("fuxictr.pytorch.layers", "fuxictr")
    kind = layers.FeatureEmbeddingDict
    return [(path, module) for path, module in model.named_modules() if isinstance(module, kind)]


def _map_of(model: Any) -> Any:
    found = getattr(model, "feature_map", None)
    if found is None:
        raise InputError(f"{type(model).__name__} has no feature_map: it is no model of FuxiCTR")
    return found


def _values_of(spec: Mapping[str, Any]) -> int:
    """Return what a feature counts for in ``total_features``."""
    if spec["type"] == "numeric":
        return 1
    return int(spec.get("vocab_size", 0)) if "share_embedding" not in spec and spec["type"] != "meta" else 0


def _first(model: nn.Module, name: str) -> Any:
    """Return the module of a feature in the first layer that has it, which is its embedding."""
    return next(
        (layer.embedding_layers[name] for _, layer in _layers(model) if name in layer.embedding_layers), None
    )


def _table_of(model: nn.Module, name: str) -> int | str:
    """Return what tells a table from others: its weight where it is a plain one, else the name of the feature."""
    module = _first(model, name)
    return id(module.weight) if isinstance(module, nn.Embedding) else name


def _width_of(model: nn.Module, name: str, spec: Mapping[str, Any]) -> int:
    width = spec.get("embedding_dim", _map_of(model).default_emb_dim)
    module = _first(model, name)
    if isinstance(module, nn.Embedding):
        width = module.embedding_dim
    elif isinstance(module, nn.Linear):
        width = module.out_features
    if width is None:
        raise InputError(f"the width of feature {name!r} is not known: the feature_map has no embedding_dim")
    return int(width)


def _separate(model: nn.Module, untie: bool) -> None:
    """Give features that share a table a module each, around the same weight, in place."""
    for path, layer in _layers(model):
        users: dict[nn.Module, list[str]] = {}
        for name, module in layer.embedding_layers.items():
            users.setdefault(module, []).append(name)
        for module, names in users.items():
            if len(names) > 1 and not untie:
                raise SharedTableError(
                    f"features {names} share one table in {path!r}, and so would share one gate. FuxiCTR(untie=True) "
                    "gives each a module of its own around the same weight, and a copy of the weight when gates are "
                    "absorbed"
                )
            for name in names[1:]:
                layer.embedding_layers[name] = twin(module)
