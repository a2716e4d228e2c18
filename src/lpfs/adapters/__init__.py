"""Adapters: models that others wrote, with what lpfs has to know of them; nothing else in lpfs imports these.

``TorchRec`` (pip install 'lpfs[torchrec]'), ``FuxiCTR`` ('lpfs[fuxictr]'), ``DeepCTR`` ('lpfs[deepctr]') and
``Plain``, for hand-written tables in plain torch. Each is imported when it is first used::

    from lpfs.adapters import TorchRec
    adapter = TorchRec()
    gates = adapter.attach(model, steps=20_000)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpfs.adapters.base import Adapter
    from lpfs.adapters.deepctr import DeepCTR
    from lpfs.adapters.fuxictr import FuxiCTR
    from lpfs.adapters.plain import Plain
    from lpfs.adapters.torchrec import TorchRec

_HOME = {
    "Adapter": "adapter",
    "DeepCTR": "deepctr",
    "FuxiCTR": "fuxictr",
    "Plain": "plain",
    "TorchRec": "torchrec",
}

__all__ = ["Adapter", "DeepCTR", "FuxiCTR", "Plain", "TorchRec"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lpfs.adapters' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lpfs.adapters.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
