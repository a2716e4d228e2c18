"""lpfs: which feature fields does a CTR model really need?

Learnable polarizing gates (LPFS, LPFS++) find out, and hand back a smaller model that predicts the same.
Public names are imported when they are first used, so that ``import lpfs`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lpfs.compare.compare import compare
    from lpfs.data.batch import Batch
    from lpfs.data.dataset import Dataset
    from lpfs.data.prepare import prepare
    from lpfs.data.reencode import encode_rows
    from lpfs.data.simulate import simulate
    from lpfs.data.store.writer import DatasetWriter
    from lpfs.data.stream import Stream
    from lpfs.export.export import export
    from lpfs.gates.absorb import absorb, restore
    from lpfs.gates.attach import attach, detach
    from lpfs.gates.controller import Keep
    from lpfs.gates.functions import FUNCTIONS, GateFunction, gate_function
    from lpfs.gates.module import Gates
    from lpfs.gates.optimizer import ProxSGD
    from lpfs.gates.prune import Certificate, Pruned, prune
    from lpfs.gates.schedule import Decay, Schedule
    from lpfs.gates.sites import Site
    from lpfs.methods.registry import METHODS
    from lpfs.methods.search import search
    from lpfs.methods.target import Costs
    from lpfs.models import MODELS, make_model
    from lpfs.models.base import Model
    from lpfs.pipeline.results import Outcome
    from lpfs.pipeline.select import select
    from lpfs.pipeline.settings import Settings
    from lpfs.report import report
    from lpfs.schema import Field, Schema, Selection
    from lpfs.serialization import load, save
    from lpfs.train.callbacks import Callback, State
    from lpfs.train.config import Training
    from lpfs.train.distributed.group import joined
    from lpfs.train.evaluate import Metrics, evaluate
    from lpfs.train.fit import Trained, fit
    from lpfs.train.metrics import Scores

_HOME = {
    "Batch": "lpfs.data.batch",
    "Dataset": "lpfs.data.dataset",
    "DatasetWriter": "lpfs.data.store.writer",
    "Stream": "lpfs.data.stream",
    "prepare": "lpfs.data.prepare",
    "simulate": "lpfs.data.simulate",
    "absorb": "lpfs.gates.absorb",
    "restore": "lpfs.gates.absorb",
    "attach": "lpfs.gates.attach",
    "detach": "lpfs.gates.attach",
    "Keep": "lpfs.gates.controller",
    "FUNCTIONS": "lpfs.gates.functions",
    "GateFunction": "lpfs.gates.functions",
    "gate_function": "lpfs.gates.functions",
    "Gates": "lpfs.gates.module",
    "ProxSGD": "lpfs.gates.optimizer",
    "Certificate": "lpfs.gates.prune",
    "Pruned": "lpfs.gates.prune",
    "prune": "lpfs.gates.prune",
    "Decay": "lpfs.gates.schedule",
    "Schedule": "lpfs.gates.schedule",
    "Site": "lpfs.gates.sites",
    "Model": "lpfs.models.base",
    "MODELS": "lpfs.models",
    "make_model": "lpfs.models",
    "save": "lpfs.serialization",
    "load": "lpfs.serialization",
    "search": "lpfs.methods.search",
    "METHODS": "lpfs.methods.registry",
    "Settings": "lpfs.pipeline.settings",
    "select": "lpfs.pipeline.select",
    "Outcome": "lpfs.pipeline.results",
    "Costs": "lpfs.methods.target",
    "encode_rows": "lpfs.data.reencode",
    "Field": "lpfs.schema",
    "Schema": "lpfs.schema",
    "Selection": "lpfs.schema",
    "Callback": "lpfs.train.callbacks",
    "State": "lpfs.train.callbacks",
    "Training": "lpfs.train.config",
    "Metrics": "lpfs.train.evaluate",
    "evaluate": "lpfs.train.evaluate",
    "Trained": "lpfs.train.fit",
    "fit": "lpfs.train.fit",
    "joined": "lpfs.train.distributed.group",
    "Scores": "lpfs.train.metrics",
}

# Packages that can be called like the function of their name.
_CALLABLE_PACKAGES = ("compare", "report", "export")

__all__ = [
    "FUNCTIONS",
    "METHODS",
    "MODELS",
    "Batch",
    "Callback",
    "Certificate",
    "Costs",
    "Dataset",
    "DatasetWriter",
    "Decay",
    "Field",
    "GateFunction",
    "Gates",
    "Keep",
    "Metrics",
    "Model",
    "Outcome",
    "ProxSGD",
    "Pruned",
    "Schedule",
    "Schema",
    "Scores",
    "Selection",
    "Settings",
    "Site",
    "State",
    "Stream",
    "Trained",
    "Training",
    "absorb",
    "attach",
    "compare",
    "detach",
    "encode_rows",
    "evaluate",
    "export",
    "fit",
    "gate_function",
    "joined",
    "load",
    "make_model",
    "prepare",
    "prune",
    "report",
    "restore",
    "save",
    "search",
    "select",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"lpfs.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'lpfs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
