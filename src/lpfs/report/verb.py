"""report: one self-contained HTML file of a run or a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lpfs.errors import InputError
from lpfs.report.compared import read_comparison
from lpfs.report.comparison import COMPARISON, Comparison
from lpfs.report.reproduced import reproduced_page
from lpfs.report.run import ANSWER, read_run
from lpfs.report.selection import selection_page
from lpfs.report.versus import comparison_page

REPORT = "report.html"


def report(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run and return where it is.

    Args:
        run: the folder that ``select``, ``search`` or ``compare`` left.
        out: the file to write; ``report.html`` in the folder, if nothing is said.

    """
    folder = Path(run)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; give the folder of a run, which holds {ANSWER}")
    compared = (folder / COMPARISON).exists()
    text = comparison_page(read_comparison(folder)) if compared else selection_page(read_run(folder))
    return put(folder / REPORT if out is None else Path(out), text)


def report_comparison(found: Comparison, out: str | os.PathLike[str]) -> Path:
    """Write the report of a comparison that is at hand, and return where it is."""
    return put(Path(out), comparison_page(found))


def put(path: Path, text: str) -> Path:
    """Write a file aside, then put it in its place."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the file to write, as {path / REPORT}")
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, "utf-8")
    aside.replace(path)
    return path


def report_reproduced(values: Mapping[str, Any], title: str, picture: Path, out: Path) -> Path:
    """Write the page of an experiment of the paper, and return where it is."""
    return put(out, reproduced_page(values, title, picture))


def try_report(folder: Path, say: Callable[[str], None]) -> None:
    """Write the report of a run that is complete without it: whatever goes wrong is told, and no more."""
    try:
        say(f"  open {report(folder)}")
    except Exception as error:
        say(f"  the report could not be written ({error}); the run is complete. Try: lpfs report {folder}")
