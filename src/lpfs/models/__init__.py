"""The models by name; a new one is a line here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lpfs.errors import InputError
from lpfs.models.base import Model
from lpfs.schema import Schema

# name -> where its class is; it is imported when it is asked for
MODELS = {
    "mlp": "lpfs.models.mlp:MLP",
    "wide_deep": "lpfs.models.wide_deep:WideDeep",
    "fm": "lpfs.models.fm:FM",
    "deepfm": "lpfs.models.wide_deep:DeepFM",
    "dcnv2": "lpfs.models.dcnv2:DCNv2",
    "dlrm": "lpfs.models.dlrm:DLRM",
    "dlrm_cross": "lpfs.models.dlrm_cross:DLRMCross",
    "user_item": "lpfs.models.user_item:UserItem",
}


def model_class(name: str) -> type[Model]:
    """Return the class of a model by its name."""
    if name not in MODELS:
        raise InputError(f"there is no model {name!r}; known are {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    found: type[Model] = getattr(importlib.import_module(module), attribute)
    return found


def make_model(name: str, schema: Schema, **config: Any) -> Model:
    """Return a new model by name; an unknown argument is an error.

    >>> from lpfs.schema import Field
    >>> make_model("mlp", Schema((Field("user", cardinality=10),)), dim=4, hidden=[8]).config
    {'dim': 4, 'hidden': [8], 'pooling': 'mean'}
    """
    check_model_options(name, config)
    try:
        return model_class(name)(schema, **config)
    except TypeError as error:
        raise InputError(f"model {name!r} cannot be made with {config}: {error}") from error


def check_model_options(name: str, config: Mapping[str, Any]) -> None:
    """Refuse an unknown model or argument."""
    known = [each for each in inspect.signature(model_class(name)).parameters if each != "schema"]
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r} for model {name!r}; it knows {', '.join(known)}")


def registered_name(model: Model) -> str:
    """Return the name that a model is registered under."""
    where = f"{type(model).__module__}:{type(model).__qualname__}"
    for name, each in MODELS.items():
        if each == where:
            return name
    raise InputError(f"{where} is not registered: add it to lpfs.models.MODELS")
