"""One self-contained HTML file of a run: ``lpfs.report("run")``.

The report shows values that are given to it and loads no data or model. Field names are untrusted: Jinja2 escapes
every value, and :mod:`lpfs._text` makes control characters visible.
"""

from lpfs._imports import callable_package
from lpfs.report.build import (
    REPORT_FILE,
    build_report,
    report,
    report_comparison,
    report_experiment,
    write_report_safely,
)
from lpfs.report.comparison_data import ComparisonReport as Comparison, Difference, Result

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

callable_package(__name__, "lpfs.report.build:report")
