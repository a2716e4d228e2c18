"""compare: search with every method, for every K and seed, and report which method is best.

lpfs.compare("clicks.parquet", "cmp", label="click", time="day", methods="all", keep=[5, 10, 20], seeds=3)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs.compare.runner import run_comparison
from lpfs.compare.summary import Comparison
from lpfs.errors import InputError
from lpfs.pipeline.data import with_source
from lpfs.pipeline.settings import Settings

# settings of select that compare replaces by its own arguments
RESERVED_SETTINGS = (
    *("keep", "penalty", "budget", "max_auc_loss", "costs"),
    *("method", "options", "checkpoint", "finish", "seeds"),
)


def compare(
    source: Any = None,
    out: str | os.PathLike[str] = "comparison",
    *,
    methods: str | Sequence[str] | None = None,
    keep: int | Sequence[int] | None = None,
    seeds: int | None = None,
    tune: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    truth: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    retry_failed: bool = False,
    tables_only: bool = False,
    quiet: bool = False,
    **changes: Any,
) -> Comparison:
    """Search with every method for every K and seed, train the kept fields from scratch and test them.

    A second call does only the missing runs. Several processes or machines may work on one directory at the same
    time; so do processes that torchrun starts: each does some of the runs, and rank 0 writes the tables.

    Args:
        source: a log (files, a table in memory), or a Dataset or its directory; not needed to continue.
        out: directory of the comparison.
        methods: names from ``lpfs methods``; ``"all"``, the default, for all of them.
        keep: numbers of fields to keep.
        seeds: number of seeds (3).
        tune: number of option sets of each method to try on the validation rows (0: use the defaults).
        options: options of single methods, ``{"lpfs++": {"alpha": 20.0}}``.
        truth: ``truth.json`` of a simulated log that was prepared from raw files; a simulated Dataset contains it.
        settings: settings to start from, see :class:`Settings`.
        retry_failed: repeat runs that failed.
        tables_only: only write the tables of the results so far.
        quiet: print nothing.
        changes: single settings: ``label``, ``time``, ``model``, ``batch_size`` …; ``fleet`` is whether what several
            runs train alike is trained at once, which is faster for small batches.
    """
    for name in RESERVED_SETTINGS:
        if changes.get(name) is not None:
            raise InputError(
                f"{name} is not a setting of compare; use its arguments methods, keep, seeds, tune and options"
            )
    settings, source = with_source((settings or Settings()).updated(**changes), source)
    request = {"methods": methods, "keep": keep, "seeds": seeds, "tune": tune, "options": options}
    run_dir, console = Path(out), Console(quiet=quiet)
    flags: dict[str, Any] = {"retry_failed": retry_failed, "tables_only": tables_only}
    return run_comparison(settings, source, run_dir, request, console, truth=truth, **flags)
