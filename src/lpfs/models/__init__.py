"""The models by name. A new model is registered by a line in ``MODELS``; its class is imported at first use."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lpfs._imports import lazy_exports
from lpfs._validation import check_name
from lpfs.errors import InputError

if TYPE_CHECKING:
    from lpfs.models.base import Model
    from lpfs.models.dcnv2 import DCNv2
    from lpfs.models.dlrm import DLRM, DLRMCross
    from lpfs.models.inputs import Inputs
    from lpfs.models.layers import dense_layers
    from lpfs.models.mlp import FM, MLP, DeepFM, WideDeep
    from lpfs.models.user_item import UserItem
    from lpfs.schema import Schema

# name -> module and class
MODELS = {
    "mlp": "lpfs.models.mlp:MLP",
    "wide_deep": "lpfs.models.mlp:WideDeep",
    "fm": "lpfs.models.mlp:FM",
    "deepfm": "lpfs.models.mlp:DeepFM",
    "dcnv2": "lpfs.models.dcnv2:DCNv2",
    "dlrm": "lpfs.models.dlrm:DLRM",
    "dlrm_cross": "lpfs.models.dlrm:DLRMCross",
    "user_item": "lpfs.models.user_item:UserItem",
}

__all__ = [
    "DLRM",
    "FM",
    "MLP",
    "MODELS",
    "DCNv2",
    "DLRMCross",
    "DeepFM",
    "Inputs",
    "Model",
    "UserItem",
    "WideDeep",
    "dense_layers",
    "make_model",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Model": "base",
        "Inputs": "inputs",
        "dense_layers": "layers",
        **{path.partition(":")[2]: path.partition(":")[0] for path in MODELS.values()},
    },
)


def model_class(name: str) -> type[Model]:
    """Return the class of a model by its name."""
    check_name(name, MODELS, "model")
    module, _, attribute = MODELS[name].partition(":")
    cls: type[Model] = getattr(import_module(module), attribute)
    return cls


def make_model(name: str, schema: Schema, **config: Any) -> Model:
    """Return a new model by name; an unknown argument is an error.

    >>> from lpfs.schema import Field, Schema
    >>> make_model("mlp", Schema((Field("user", cardinality=10),)), dim=4, hidden=[8]).config
    {'dim': 4, 'hidden': [8], 'pooling': 'mean'}
    """
    check_model_options(name, config)
    try:
        return model_class(name)(schema, **config)
    except TypeError as error:
        raise InputError(f"model {name!r} cannot be created with {config}: {error}") from error


def check_model_options(name: str, config: Mapping[str, Any]) -> None:
    """Raise InputError if the model or one of the arguments is unknown."""
    known = [key for key in inspect.signature(model_class(name)).parameters if key != "schema"]
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r} for model {name!r}; known keys: {', '.join(known)}")


def registered_name(model: Model) -> str:
    """Return the name under which the class of a model is registered."""
    path = f"{type(model).__module__}:{type(model).__qualname__}"
    for name, registered in MODELS.items():
        if registered == path:
            return name
    raise InputError(f"{path} is not registered; add it to lpfs.models.MODELS")
