"""Gates: gate functions, proximal optimizer, control of λ; attach, absorb, prune.

The names below are imported on first use. The functions attach, absorb and prune have the names of their modules;
``lpfs`` exports them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "detach": "attach",
    "restore": "absorb",
    "Keep": "controller",
    "FUNCTIONS": "functions",
    "GateFunction": "functions",
    "gate_function": "functions",
    "Gates": "module",
    "ProxSGD": "optimizer",
    "Certificate": "prune",
    "Pruned": "prune",
    "Rebuilds": "rebuild",
    "Decay": "schedule",
    "Schedule": "schedule",
    "PartWeight": "sites",
    "Site": "sites",
    "TakesGates": "sites",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
