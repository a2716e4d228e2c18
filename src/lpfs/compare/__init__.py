"""Compare search methods on one log: every method, every K, several seeds.

::

    compare.py        lpfs.compare()
    plan.py           methods, sizes and seeds -> the runs
    run_dir.py        the directory of a comparison, its files, and the locks that share the work
    runner.py         runs: pretrain once per seed, search, train from scratch, evaluate; run_comparison()
    statistics.py     areas, overlaps, confidence intervals, bootstrap over test rows
    summary.py        results -> comparison.json; tables.py: as tables on the terminal, Markdown and CSV

"""

from lpfs._imports import callable_package
from lpfs.compare.compare import compare
from lpfs.compare.summary import Comparison

__all__ = ["Comparison", "compare"]

callable_package(__name__, "lpfs.compare.compare:compare")
