"""Adapter for FuxiCTR: models of its model zoo, and other models built from its layers and a feature_map."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._imports import import_optional
from lpfs._validation import check_name
from lpfs.adapters.base import FieldLayout, RebuildingAdapter
from lpfs.errors import FieldError, InputError, SharedTableError
from lpfs.gates.attach import share_parameters
from lpfs.gates.module import ATTRIBUTE, Gates
from lpfs.gates.sites import SiteLike
from lpfs.gates.verification import InputPath
from lpfs.schema import Selection

SHARED = "share_embedding"  # key of a feature: the feature whose table it uses


def deactivate_columns(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return a copy of a dataset configuration in which the dropped columns are inactive.

    They are not removed, because ``preprocess`` may compute other columns from them. If a dropped column owns a
    shared vocabulary, the first of the columns that share it becomes the owner.

    >>> columns = [{"name": ["user", "city"], "active": True, "dtype": "str", "type": "categorical"}]
    >>> deactivate_columns({"feature_cols": columns}, ["city"])["feature_cols"][1]
    {'name': ['city'], 'active': False, 'dtype': 'str', 'type': 'categorical'}
    """
    result = copy.deepcopy(dict(config))
    columns: list[dict[str, Any]] = []
    for column in result.get("feature_cols", []):
        for inactive in (False, True):
            names: list[Any] = [name for name in _names(column) if (name in dropped) == inactive]
            if SHARED not in column and isinstance(column["name"], list) and names:
                names = [names]  # they stay together; columns that share a table may get different owners
            active = False if inactive else column.get("active", True)
            columns += [copy.deepcopy({**column, "name": name, "active": active}) for name in names]
    known = {name for column in columns for name in _names(column)}
    for name in dropped:
        check_name(name, sorted(known), "column", "feature_cols", FieldError)
    kept = {name: column for column in columns if column["active"] is not False for name in _names(column)}
    repair_shared_embeddings(kept, {name: column.get(SHARED, name) for name, column in kept.items()})
    for column in columns:
        if column["active"] is False:
            column.pop(SHARED, None)
            column.pop("pretrained_emb", None)  # FuxiCTR would load vectors for it
    result["feature_cols"] = columns
    return result


def repair_shared_embeddings(features: Mapping[str, dict[str, Any]], groups: Mapping[str, Any]) -> None:
    """Make features that share a table refer to one of the remaining ones, in place.

    ``groups`` is feature -> a key that is equal for features that share a table. If the key is the name of a
    remaining feature, that feature owns the table, otherwise the first of them does.
    """
    first: dict[Any, str] = {}
    for name, spec in features.items():
        group = groups[name]
        owner = group if group in features else first.setdefault(group, name)
        spec.pop(SHARED, None)
        if owner != name:
            spec[SHARED] = owner


def _names(column: Mapping[str, Any]) -> list[str]:
    return column["name"] if isinstance(column["name"], list) else [column["name"]]


def embedding_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return path and module of every FeatureEmbeddingDict of a model."""
    layers = import_optional("fuxictr.pytorch.layers", "fuxictr", "the adapter FuxiCTR")
    return [(path, module) for path, module in model.named_modules() if isinstance(module, layers.FeatureEmbeddingDict)]


def get_feature_map(model: Any) -> Any:
    """Return the feature_map of a model."""
    feature_map = getattr(model, "feature_map", None)
    if feature_map is None:
        raise InputError(f"{type(model).__name__} has no feature_map; give a model of FuxiCTR")
    return feature_map


def count_values(spec: Mapping[str, Any]) -> int:
    """Return the contribution of a feature to ``total_features``."""
    if spec["type"] == "numeric":
        return 1
    return int(spec.get("vocab_size", 0)) if SHARED not in spec and spec["type"] != "meta" else 0


def _embedding_module(model: nn.Module, name: str) -> Any:
    """Return the embedding module of a feature, not its weight in a linear part."""
    layers = [layer for _, layer in embedding_layers(model) if name in layer.embedding_layers]
    layers.sort(key=lambda layer: not layer.use_pretrain)  # a linear part never uses pretrained vectors
    return layers[0].embedding_layers[name] if layers else None


def table_key(model: nn.Module, name: str) -> int | str:
    """Return a key of the feature's table: the id of its weight if it is an nn.Embedding, else the name."""
    module = _embedding_module(model, name)
    return id(module.weight) if isinstance(module, nn.Embedding) else name


def embedding_width(model: nn.Module, name: str, spec: Mapping[str, Any]) -> int:
    """Return the number of columns of the embedding of a feature."""
    module = _embedding_module(model, name)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features
    width = spec.get("embedding_dim", get_feature_map(model).default_emb_dim)
    if width is None:
        raise InputError(f"the width of feature {name!r} is unknown: the feature_map has no embedding_dim")
    return int(width)


def untie_tables(model: nn.Module, untie: bool) -> None:
    """Give features that share a table separate modules around the same weight, in place."""
    for path, layer in embedding_layers(model):
        users: dict[nn.Module, list[str]] = {}
        for name, module in layer.embedding_layers.items():
            users.setdefault(module, []).append(name)
        for module, names in users.items():
            if len(names) > 1 and not untie:
                raise SharedTableError(
                    f"features {names} share one table in {path!r}, so they would share one gate. "
                    "FuxiCTR(untie=True) gives each its own module around the same weight, and its own copy of "
                    "the weight when gates are absorbed"
                )
            for name in names[1:]:
                layer.embedding_layers[name] = share_parameters(module)


class FuxiCTR(RebuildingAdapter):
    """Adapter for models that look up their fields by FuxiCTR's ``FeatureEmbedding``.

    A field enters through each of these layers of a model: the embedding, the linear part (``LogisticRegression``,
    also in ``FactorizationMachine``), the context of FinalMLP's feature selection. A batch is an item of FuxiCTR's
    data loaders: a dict of columns, labels included.

    Args:
        make: function that builds your model from a feature_map; needed by ``prune(cut=True)``.
        untie: for features with ``share_embedding``: give each its own table.
    """

    optimizer_attribute, activation_attribute = "optimizer", "output_activation"
    make_example = "FuxiCTR(make=lambda feature_map: DeepFM(feature_map, **params))"

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return feature -> its module in every ``FeatureEmbedding`` of the model."""
        sites: dict[str, list[SiteLike]] = {}
        for path, layer in embedding_layers(model):
            for name in layer.embedding_layers:
                # pretrained vectors pass through a projection last; the pooling of a sequence is not gated
                projected = isinstance(layer.embedding_layers[name], nn.Identity)
                kind = "feature_encoders" if projected else "embedding_layers"
                sites.setdefault(name, []).append(f"{path}.{kind}.{name}")
        if not sites:
            raise InputError(f"{type(model).__name__} has no FeatureEmbedding layer; give a model of FuxiCTR")
        return {name: sites[name] for name in get_feature_map(model).features if name in sites}

    def inputs_of_fields(self, model: nn.Module) -> dict[str, InputPath]:
        return {name: name for name in self.sites(model)}

    def inputs_in_batch(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
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
        untie_tables(model, self.untie or settings.pop("untie", False))
        return super().attach(model, fields, **settings)

    def batches(self, model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Yield (batch, labels (B, T)) of one of FuxiCTR's data loaders in an endless loop, for ``search``."""
        labels = get_feature_map(model).labels
        device = next(model.parameters()).device
        while True:
            batch = None
            for batch in loader:
                columns = batch[0] if isinstance(batch, tuple | list) else batch
                yield batch, torch.stack([columns[name].float().reshape(-1) for name in labels], 1).to(device)
            if batch is None:
                raise InputError("the data loader yields no batch; give one with rows")

    def penalty(self, model: Any, rows: int) -> Any:
        """Return FuxiCTR's regularization, computed without the gates."""
        without_gates: Any = share_parameters(model)
        without_gates._modules.pop(ATTRIBUTE, None)
        return without_gates.regularization_loss()

    def feature_map(self, model: nn.Module, selection: Selection) -> Any:
        """Return FuxiCTR's ``FeatureMap`` of the kept fields; its ``save`` writes feature_map.json."""
        return self._kept_map(model, [name for name in self.sites(model) if name not in selection.dropped])

    def dataset_config(self, config: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
        """Return an entry of dataset_config.yaml with the dropped fields inactive, to prepare the data again.

        The vocabularies are then fitted again and ids change, so the model must be trained from scratch. To
        continue with the present weights, keep the prepared data and use :meth:`feature_map`.
        """
        return deactivate_columns(config, selection.dropped)

    def _kept_map(self, model: nn.Module, kept: Sequence[str]) -> Any:
        old = get_feature_map(model)
        result = copy.copy(old)
        gated = self.sites(model)
        features = {name: dict(spec) for name, spec in old.features.items() if name in kept or name not in gated}
        repair_shared_embeddings(features, {name: table_key(model, name) for name in features})
        result.features = type(old.features)(features)
        result.labels, result.column_index = list(old.labels), {}
        result.num_fields = result.get_num_fields()
        result.total_features = sum(map(count_values, features.values()))
        result.set_column_index()
        return result

    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        assert self.make is not None
        return self.make(self._kept_map(model, kept))

    def narrow(self, model: nn.Module, batch: Any, smaller: Any) -> Any:
        """Return the batch without the columns of dropped fields."""
        if isinstance(batch, tuple | list):
            return type(batch)(self.narrow(model, part, smaller) for part in batch)
        if not isinstance(batch, Mapping):
            return batch
        dropped = set(self.sites(model)) - set(get_feature_map(smaller).features)
        return {name: column for name, column in batch.items() if name not in dropped}

    def layout(self, model: nn.Module) -> FieldLayout:
        specs = {name: get_feature_map(model).features[name] for name in self.sites(model)}
        widths = {name: spec.get("emb_output_dim", embedding_width(model, name, spec)) for name, spec in specs.items()}
        return FieldLayout(widths, tuple(widths))

    def loss_mismatch(self, model: nn.Module) -> str | None:
        is_binary = all(isinstance(activation, nn.Sigmoid) for activation in self.activations(model))
        return None if is_binary else "not all of its tasks are binary"
