"""The layers of a model of FuxiCTR that look features up, and what its feature_map says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lpfs.adapters.need import package
from lpfs.errors import InputError, SharedTableError
from lpfs.gates.attach import twin


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
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
    layers = [layer for _, layer in layers_of(model) if name in layer.embedding_layers]
    layers.sort(key=lambda layer: not layer.use_pretrain)  # a linear part never uses pretrained vectors
    return layers[0].embedding_layers[name] if layers else None


def table_of(model: nn.Module, name: str) -> int | str:
    """Return what tells a table from others: its weight where it is a plain one, else the name of the feature."""
    module = _embedding_of(model, name)
    return id(module.weight) if isinstance(module, nn.Embedding) else name


def width_of(model: nn.Module, name: str, spec: Mapping[str, Any]) -> int:
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


def separate(model: nn.Module, untie: bool) -> None:
    """Give features that share a table a module each, around the same weight, in place."""
    for path, layer in layers_of(model):
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
