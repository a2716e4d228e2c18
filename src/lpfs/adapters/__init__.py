"""Adapters for models of other libraries, imported on first use; nothing else in lpfs imports them.

``TorchRec`` (pip install 'lpfs[torchrec]'), ``FuxiCTR`` ('lpfs[fuxictr]'), ``DeepCTR`` ('lpfs[deepctr]') and
``Plain``, for hand-written tables in plain torch::

    from lpfs.adapters import TorchRec adapter = TorchRec() gates = adapter.attach(model, steps=20_000)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs._imports import lazy_exports

if TYPE_CHECKING:
    from lpfs.adapters.base import Adapter
    from lpfs.adapters.deepctr import DeepCTR
    from lpfs.adapters.fuxictr import FuxiCTR
    from lpfs.adapters.plain import Plain
    from lpfs.adapters.torchrec import TorchRec

__all__ = ["Adapter", "DeepCTR", "FuxiCTR", "Plain", "TorchRec"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"Adapter": "base", "DeepCTR": "deepctr", "FuxiCTR": "fuxictr", "Plain": "plain", "TorchRec": "torchrec"}
)
