"""Search methods: a class for each, a registry of their names, and the code that they share.

::

    base.py           Method, SearchTask, SearchCost; scores -> Selection
    target.py         SelectionTarget, Costs: what to search for
    registry.py       METHODS, importable without torch
    search.py         lpfs.search, run_search
    masks.py          masks on the fields of a model; training.py: how they are trained
    pretraining.py    a network of a method's own, trained as the model was pretrained
    sampling.py       rows of the search as columns, for methods that need no training
    group_sparsity.py the first layer by field; λ moved until K groups are left
    gate_search.py    the callbacks that train gates; lpfs.py: LPFS and LPFS++

Every other file is one method, or a family of methods that share their mathematics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs._imports import lazy_exports

if TYPE_CHECKING:
    from lpfs.methods.base import Method, SearchTask, rank_fields
    from lpfs.methods.registry import METHODS, MethodEntry
    from lpfs.methods.target import Costs, SelectionTarget

__all__ = ["METHODS", "Costs", "Method", "MethodEntry", "SearchTask", "SelectionTarget", "rank_fields"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "METHODS": "registry",
        "Costs": "target",
        "Method": "base",
        "MethodEntry": "registry",
        "SearchTask": "base",
        "SelectionTarget": "target",
        "rank_fields": "base",
    },
)
