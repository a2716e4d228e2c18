"""From the folder of a run to one file that can be forwarded.

::

    verb.py           report: read, build, write
    run.py            what is read from a run         selection.py   its page
    comparison.py     what a comparison says          versus.py      its page, differences.py: beyond noise
    compared.py       what compare wrote, read so     reproduced.py  the page of an experiment of the paper
    fields.py         the table of fields             moves.py       how the gates moved
    worth.py          AUC, certificate, savings       made.py        command, configuration, versions
    charts.py         charts as plain values          parts.py       cards, tables, bars
    page.py           the document and its policy     words.py       numbers and sentences
    assets/           uPlot, the script and the style that go into every page

Names of fields are untrusted: everything goes through :mod:`lpfs.markup`.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lpfs.report.comparison import Comparison, Difference, Result
from lpfs.report.verb import report, report_comparison, try_report

__all__ = ["Comparison", "Difference", "Result", "report", "report_comparison", "try_report"]


class _Verb(ModuleType):
    """The package, which may be called: ``lpfs.report(…)`` is ``lpfs.report.verb.report(…)``."""

    def __call__(self, *args: Any, **given: Any) -> Path:
        return report(*args, **given)


sys.modules[__name__].__class__ = _Verb
