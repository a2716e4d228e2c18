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

from lpfs.adapters.base import Builds
from lpfs.adapters.fuxictr_config import kept_columns, repoint
from lpfs.adapters.fuxictr_layers import layers_of, map_of, separate, table_of, values_of, width_of
from lpfs.adapters.layout import Layout
from lpfs.errors import InputError
from lpfs.gates.attach import twin
from lpfs.gates.leak import Where
from lpfs.gates.module import NAME, Gates
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
        for path, layer in layers_of(model):
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
        separate(model, self.untie or settings.pop("untie", False))
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
        return kept_columns(config, selection.dropped)

    def _kept_map(self, model: nn.Module, kept: Sequence[str]) -> Any:
        old = map_of(model)
        result = copy.copy(old)
        gated = self.sites(model)
        stays = {name: dict(spec) for name, spec in old.features.items() if name in kept or name not in gated}
        repoint(stays, {name: table_of(model, name) for name in stays})
        result.features = type(old.features)(stays)
        result.labels, result.column_index = list(old.labels), {}
        result.num_fields = result.get_num_fields()
        result.total_features = sum(map(values_of, stays.values()))
        result.set_column_index()
        return result

    def again(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
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

    def layout(self, model: nn.Module) -> Layout:
        """Return the features in the order of the feature_map, and their widths."""
        features = map_of(model).features
        widths = {}
        for name in self.sites(model):
            spec = features[name]
            widths[name] = spec.get("emb_output_dim", width_of(model, name, spec))
        return Layout(widths, tuple(widths))

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
