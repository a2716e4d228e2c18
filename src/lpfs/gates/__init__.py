"""Gates: gate functions, proximal optimizer, control of λ; attach, absorb, prune.

The names below are imported on first use. The functions attach, absorb and prune have the names of their modules;
``lpfs`` exports them.
"""

from __future__ import annotations

from lpfs._imports import lazy_exports

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


__getattr__, __dir__ = lazy_exports(__name__, _HOME)
