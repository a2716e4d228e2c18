"""lpfs: which feature fields does a CTR model really need?

Learnable polarizing gates (LPFS, LPFS++) find out, and hand back a smaller model that predicts the same.
Public names are imported when they are first used, so that ``import lpfs`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lpfs.compare.compare import compare as compare
    from lpfs.data.batch import Batch as Batch
    from lpfs.data.dataset import Dataset as Dataset
    from lpfs.data.prepare import prepare as prepare
    from lpfs.data.reencode import encode_rows as encode_rows
    from lpfs.data.simulate import simulate as simulate
    from lpfs.data.store.writer import DatasetWriter as DatasetWriter
    from lpfs.data.stream import Stream as Stream
    from lpfs.export.export import export as export
    from lpfs.gates.absorb import absorb as absorb, restore as restore
    from lpfs.gates.attach import attach as attach, detach as detach
    from lpfs.gates.controller import Keep as Keep
    from lpfs.gates.functions import (
        FUNCTIONS as FUNCTIONS,
        GateFunction as GateFunction,
        gate_function as gate_function,
    )
    from lpfs.gates.module import Gates as Gates
    from lpfs.gates.optimizer import ProxSGD as ProxSGD
    from lpfs.gates.prune import Certificate as Certificate, Pruned as Pruned, prune as prune
    from lpfs.gates.schedule import Decay as Decay, Schedule as Schedule
    from lpfs.gates.sites import Site as Site
    from lpfs.methods.registry import METHODS as METHODS
    from lpfs.methods.search import search as search
    from lpfs.methods.target import Costs as Costs
    from lpfs.models import MODELS as MODELS, make_model as make_model
    from lpfs.models.base import Model as Model
    from lpfs.pipeline.results import Outcome as Outcome
    from lpfs.pipeline.select import select as select
    from lpfs.pipeline.settings import Settings as Settings
    from lpfs.report import report as report
    from lpfs.schema import Field as Field, Schema as Schema, Selection as Selection
    from lpfs.serialization import load as load, save as save
    from lpfs.train.callbacks import Callback as Callback, State as State
    from lpfs.train.config import Training as Training
    from lpfs.train.distributed.group import joined as joined
    from lpfs.train.evaluate import Metrics as Metrics, evaluate as evaluate
    from lpfs.train.fit import Trained as Trained, fit as fit
    from lpfs.train.metrics import Scores as Scores

_NAMES = {  # the public names of each module
    "lpfs.data.batch": ["Batch"],
    "lpfs.data.dataset": ["Dataset"],
    "lpfs.data.prepare": ["prepare"],
    "lpfs.data.reencode": ["encode_rows"],
    "lpfs.data.simulate": ["simulate"],
    "lpfs.data.store.writer": ["DatasetWriter"],
    "lpfs.data.stream": ["Stream"],
    "lpfs.gates.absorb": ["absorb", "restore"],
    "lpfs.gates.attach": ["attach", "detach"],
    "lpfs.gates.controller": ["Keep"],
    "lpfs.gates.functions": ["FUNCTIONS", "GateFunction", "gate_function"],
    "lpfs.gates.module": ["Gates"],
    "lpfs.gates.optimizer": ["ProxSGD"],
    "lpfs.gates.prune": ["Certificate", "Pruned", "prune"],
    "lpfs.gates.schedule": ["Decay", "Schedule"],
    "lpfs.gates.sites": ["Site"],
    "lpfs.methods.registry": ["METHODS"],
    "lpfs.methods.search": ["search"],
    "lpfs.methods.target": ["Costs"],
    "lpfs.models": ["MODELS", "make_model"],
    "lpfs.models.base": ["Model"],
    "lpfs.pipeline.results": ["Outcome"],
    "lpfs.pipeline.select": ["select"],
    "lpfs.pipeline.settings": ["Settings"],
    "lpfs.schema": ["Field", "Schema", "Selection"],
    "lpfs.serialization": ["load", "save"],
    "lpfs.train.callbacks": ["Callback", "State"],
    "lpfs.train.config": ["Training"],
    "lpfs.train.distributed.group": ["joined"],
    "lpfs.train.evaluate": ["Metrics", "evaluate"],
    "lpfs.train.fit": ["Trained", "fit"],
    "lpfs.train.metrics": ["Scores"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_CALLABLE_PACKAGES = ("compare", "report", "export")  # they can be called like the function of their name
__all__ = sorted([*_HOME, *_CALLABLE_PACKAGES])


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"lpfs.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'lpfs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
