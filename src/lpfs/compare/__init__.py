"""Every method, every K, several seeds, under one protocol.

::

    plan.py           methods, sizes and seeds -> the runs to do
    folder.py         a folder that is begun once; store.py: its files; claims.py: who is doing what
    runs.py           pretrain once a seed, search, train from scratch, judge; cost.py: seconds and memory
    progress.py       what is told on the way
    measures.py       area, overlap, intervals, picks; bootstrap.py: the luck of the test rows
    truth.py          what is true of a simulated log
    loaded.py         the results of a folder; series.py: numbers by seed, and their differences
    summary.py        results -> comparison; tables.py: on the terminal; files.py: as Markdown and CSV
    verb.py           compare: all of it in order

"""

import sys
from types import ModuleType
from typing import Any

from lpfs.compare.compare import compare
from lpfs.compare.summary import Comparison

__all__ = ["Comparison", "compare"]


class _Verb(ModuleType):
    """The package, which may be called: ``lpfs.compare(…)`` is ``lpfs.compare.compare.compare(…)``."""

    def __call__(self, *args: Any, **given: Any) -> Comparison:
        return compare(*args, **given)


sys.modules[__name__].__class__ = _Verb
