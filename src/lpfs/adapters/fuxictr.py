"""FuxiCTR: models of its model zoo, and any other that is made of its layers, from their feature_map.

adapter = FuxiCTR(make=lambda feature_map: DeepFM(feature_map, **params))
gates = adapter.attach(model, steps=20_000)
…
feature_map = adapter.feature_map(model, selection)   # FuxiCTR's own description of the fields that stay

FuxiCTR's configuration with fewer fields: inactive columns, and tables that have lost their namesake.

The layers of a model of FuxiCTR that look features up, and what its feature_map says of them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters.base import FieldLayout, RebuildingAdapter
from lpfs.adapters.need import package
from lpfs.errors import FieldError, InputError, SharedTableError
from lpfs.gates.attach import twin
from lpfs.gates.leak import Where
from lpfs.gates.module import NAME, Gates
from lpfs.gates.sites import SiteLike
from lpfs.schema import Selection

SHARED = "share_embedding"


def deactivate_columns(config: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return a dataset configuration whose dropped columns are inactive; the rest of it is as it was.

    They are not removed: other columns may be made of them by ``preprocess``. A dropped column whose vocabulary
    others share hands that over to the first of them.

    >>> columns = [{"name": ["user", "city"], "active": True, "dtype": "str", "type": "categorical"}]
    >>> kept_columns({"feature_cols": columns}, ["city"])["feature_cols"][1]
    {'name': ['city'], 'active': False, 'dtype': 'str', 'type': 'categorical'}

    """
    result = copy.deepcopy(dict(config))
    columns: list[dict[str, Any]] = []
    for column in result.get("feature_cols", []):
        names = column["name"] if isinstance(column["name"], list) else [column["name"]]
        for gone in (False, True):
            several = [name for name in names if (name in dropped) == gone]
            if not several:
                continue
            if SHARED in column:  # each of them may point elsewhere
                columns += [_column(column, name, gone) for name in several]
            else:
                columns.append(_column(column, several if isinstance(column["name"], list) else several[0], gone))
    known = {name for column in columns for name in _names(column)}
    unknown = [name for name in dropped if name not in known]
    if unknown:
        raise FieldError(f"feature_cols has no column {unknown[0]!r} that was dropped; it has {sorted(known)}")
    stays = {name: column for column in columns if column["active"] is not False for name in _names(column)}
    repair_shared_embeddings(stays, {name: column.get(SHARED, name) for name, column in stays.items()})
    for column in columns:
        if column["active"] is False:
            column.pop(SHARED, None)
            column.pop("pretrained_emb", None)  # FuxiCTR would look for the feature
    result["feature_cols"] = columns
    return result


def repair_shared_embeddings(features: Mapping[str, dict[str, Any]], groups: Mapping[str, Any]) -> None:
    """Let features that share a table point at one of them that is left, in place.

    ``groups`` is feature -> what is equal for those that share a table: the name of one of them, which stays what
    they point at if it is there, or anything else.
    """
    first: dict[Any, str] = {}
    for name, spec in features.items():
        group = groups[name]
        head = group if group in features else first.setdefault(group, name)
        spec.pop(SHARED, None)
        if head != name:
            spec[SHARED] = head


def _column(column: Mapping[str, Any], name: Any, gone: bool) -> dict[str, Any]:
    result = copy.deepcopy({**column, "name": name})
    result["active"] = False if gone else column.get("active", True)
    return result


def _names(column: Mapping[str, Any]) -> list[str]:
    return column["name"] if isinstance(column["name"], list) else [column["name"]]


def embedding_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return every layer of FuxiCTR in a model that holds a table for every feature, and its path."""
    kind = package("fuxictr.pytorch.layers", "fuxictr").FeatureEmbeddingDict
    return [(path, module) for path, module in model.named_modules() if isinstance(module, kind)]


def map_of(model: Any) -> Any:
    """Return the feature_map of a model."""
    found = getattr(model, "feature_map", None)
    if found is None:
        raise InputError(f"{type(model).__name__} has no feature_map: it is no model of FuxiCTR")
    return found


def values_of(spec: Mapping[str, Any]) -> int:
    """Return what a feature counts for in ``total_features``."""
    if spec["type"] == "numeric":
        return 1
    return int(spec.get("vocab_size", 0)) if "share_embedding" not in spec and spec["type"] != "meta" else 0


def _embedding_of(model: nn.Module, name: str) -> Any:
    """Return the module of a feature in the layer that is its embedding, and no linear part."""
    layers = [layer for _, layer in embedding_layers(model) if name in layer.embedding_layers]
    layers.sort(key=lambda layer: not layer.use_pretrain)  # a linear part never uses pretrained vectors
    return layers[0].embedding_layers[name] if layers else None


def table_of(model: nn.Module, name: str) -> int | str:
    """Return what tells a table from others: its weight where it is a plain one, else the name of the feature."""
    module = _embedding_of(model, name)
    return id(module.weight) if isinstance(module, nn.Embedding) else name


def embedding_width(model: nn.Module, name: str, spec: Mapping[str, Any]) -> int:
    """Return how many columns the embedding of a feature has."""
    width = spec.get("embedding_dim", map_of(model).default_emb_dim)
    module = _embedding_of(model, name)
    if isinstance(module, nn.Embedding):
        width = module.embedding_dim
    elif isinstance(module, nn.Linear):
        width = module.out_features
    if width is None:
        raise InputError(f"the width of feature {name!r} is not known: the feature_map has no embedding_dim")
    return int(width)


def untie_tables(model: nn.Module, untie: bool) -> None:
    """Give features that share a table a module each, around the same weight, in place."""
    for path, layer in embedding_layers(model):
        users: dict[nn.Module, list[str]] = {}
        for name, module in layer.embedding_layers.items():
            users.setdefault(module, []).append(name)
        for module, names in users.items():
            if len(names) > 1 and not untie:
                raise SharedTableError(
                    f"features {names} share one table in {path!r}, and so would share one gate. "
                    "FuxiCTR(untie=True) gives each a module of its own around the same weight, and a copy of the "
                    "weight when gates are absorbed"
                )
            for name in names[1:]:
                layer.embedding_layers[name] = twin(module)


class FuxiCTR(RebuildingAdapter):
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
        for path, layer in embedding_layers(model):
            for name in layer.embedding_layers:
                # a projection of given vectors is the last of its modules, pooling of a sequence is not
                projected = isinstance(layer.embedding_layers[name], nn.Identity)
                kind = "feature_encoders" if projected else "embedding_layers"
                found.setdefault(name, []).append(f"{path}.{kind}.{name}")
        if not found:
            raise InputError(f"{type(model).__name__} has no FeatureEmbedding layer: it is no model of FuxiCTR")
        order = [name for name in map_of(model).features if name in found]
        return {name: found[name] for name in order}

    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return feature -> its key in the batch."""
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
        """Put gates on all features of the model, or those named, in place; its predictions stay bit-identical."""
        untie_tables(model, self.untie or settings.pop("untie", False))
        return super().attach(model, fields, **settings)

    def batches(self, model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Yield (batch, labels (B, T)) of one of FuxiCTR's data loaders, again and again, for ``search``."""
        labels = map_of(model).labels
        device = next(model.parameters()).device
        while True:
            empty = True
            for batch in loader:
                columns = batch[0] if isinstance(batch, tuple | list) else batch
                yield batch, torch.stack([columns[name].float().reshape(-1) for name in labels], 1).to(device)
                empty = False
            if empty:
                raise InputError("the data loader has no batch")

    def penalty(self, model: Any, rows: int) -> Any:
        """Return FuxiCTR's regularisation, which would take the gates for weights of the network."""
        bare: Any = twin(model)
        bare._modules.pop(NAME, None)
        return bare.regularization_loss()

    # ------------------------------------------------------------------------------ a smaller model

    def feature_map(self, model: nn.Module, selection: Selection) -> Any:
        """Return FuxiCTR's ``FeatureMap`` of the fields that stay; its ``save`` writes feature_map.json."""
        return self._kept_map(model, [name for name in self.sites(model) if name not in selection.dropped])

    def dataset_config(self, config: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
        """Return an entry of FuxiCTR's dataset_config.yaml with the dropped fields inactive, to prepare data anew.

        The vocabularies are then learnt anew too: ids change, so train anew. To go on with the weights there are,
        keep the prepared data and use :meth:`feature_map`.
        """
        return deactivate_columns(config, selection.dropped)

    def _kept_map(self, model: nn.Module, kept: Sequence[str]) -> Any:
        old = map_of(model)
        result = copy.copy(old)
        gated = self.sites(model)
        stays = {name: dict(spec) for name, spec in old.features.items() if name in kept or name not in gated}
        repair_shared_embeddings(stays, {name: table_of(model, name) for name in stays})
        result.features = type(old.features)(stays)
        result.labels, result.column_index = list(old.labels), {}
        result.num_fields = result.get_num_fields()
        result.total_features = sum(map(values_of, stays.values()))
        result.set_column_index()
        return result

    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return a model made from the feature_map of the fields that stay."""
        assert self.make is not None
        return self.make(self._kept_map(model, kept))

    def narrow(self, model: nn.Module, batch: Any, smaller: Any) -> Any:
        """Return the batch without the columns that the smaller model does not know."""
        dropped = set(self.sites(model)) - set(map_of(smaller).features)

        def narrowed(part: Any) -> Any:
            if not isinstance(part, Mapping):
                return part
            return {name: column for name, column in part.items() if name not in dropped}

        if isinstance(batch, tuple | list):
            return type(batch)(narrowed(part) for part in batch)
        return narrowed(batch)

    def layout(self, model: nn.Module) -> FieldLayout:
        """Return the features in the order of the feature_map, and their widths."""
        features = map_of(model).features
        widths = {}
        for name in self.sites(model):
            spec = features[name]
            widths[name] = spec.get("emb_output_dim", embedding_width(model, name, spec))
        return FieldLayout(widths, tuple(widths))

    def other_loss(self, model: nn.Module) -> str | None:
        """Return why the loss is another: a regression."""
        binary = all(isinstance(each, nn.Sigmoid) for each in self.activations(model))
        return None if binary else "not all of its tasks are binary"

    def activations(self, model: nn.Module) -> list[nn.Module]:
        """Return ``output_activation``, one a task."""
        end: Any = getattr(model, "output_activation", None)
        if isinstance(end, nn.ModuleList):
            return list(end)
        return [] if end is None else [end]
