"""Which engine reads a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from lpfs.data.engines.base import Engine
    from lpfs.data.planning import PreparePlan
    from lpfs.data.progress import Reporter


ENGINES = ("embedded", "spark")


def make_engine(name: str, job: PreparePlan, reporter: Reporter) -> Engine:
    """Return the engine of a name for a planned job."""
    if name not in ENGINES:
        raise InputError(f"no engine {name!r}; there are {', '.join(ENGINES)}")
    if name == "embedded":
        from lpfs.data.engines.base import LocalEngine

        return LocalEngine(job, reporter)
    try:
        from lpfs.data.engines.spark import SparkEngine
    except ImportError as error:
        raise MissingPackageError(
            f"the engine spark needs pyspark and ibis ({error}); install: pip install 'lpfs[spark]'"
        ) from None
    return SparkEngine(job, reporter)
