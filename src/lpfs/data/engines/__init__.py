"""Engines: how a planned log is read, in this process or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from lpfs._console import Console
    from lpfs.data.engines.base import Engine
    from lpfs.data.planning import PreparePlan

ENGINES = ("embedded", "spark")


def make_engine(name: str, plan: PreparePlan, console: Console) -> Engine:
    """Return the engine with this name for a plan."""
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    if name == "embedded":
        from lpfs.data.engines.base import LocalEngine

        return LocalEngine(plan, console)
    try:
        from lpfs.data.engines.spark import SparkEngine
    except ImportError as error:
        raise MissingPackageError(
            f"the engine spark needs pyspark and ibis ({error}); install: pip install 'lpfs[spark]'"
        ) from None
    return SparkEngine(plan, console)
