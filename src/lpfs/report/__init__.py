"""One self-contained HTML file of a run: ``lpfs.report("run")``.

The report shows values that are given to it and loads no data or model. Field names are untrusted: Jinja2 escapes
every value, and :mod:`lpfs._text` makes control characters visible.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lpfs.report.build import (
    REPORT_FILE,
    build_report,
    report,
    report_comparison,
    report_experiment,
    write_report_safely,
)
from lpfs.report.comparison_data import ComparisonReport as Comparison
from lpfs.report.comparison_data import Difference, Result

__all__ = [
    "REPORT_FILE",
    "Comparison",
    "Difference",
    "Result",
    "build_report",
    "report",
    "report_comparison",
    "report_experiment",
    "write_report_safely",
]


class _CallableReport(ModuleType):
    """Make ``lpfs.report(…)`` the same as ``lpfs.report.build.report(…)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableReport
