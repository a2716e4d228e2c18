"""report: one self-contained HTML file of a selection, a comparison or an experiment of the paper."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lpfs import __version__
from lpfs._fileio import write_text_atomic
from lpfs._text import field_name_html, html_environment, json_script, quote_command
from lpfs.errors import InputError
from lpfs.report.comparison import comparison_context
from lpfs.report.comparison_data import COMPARISON_FILE, FORMAT, ComparisonReport, from_record, read_comparison
from lpfs.report.format import format_duration
from lpfs.report.selection import selection_context
from lpfs.report.selection_data import (
    ADVICE,
    SELECTION_FILE,
    Records,
    ReportTable,
    Tile,
    from_record as selection_from_record,
    history_from_records,
    read_selection,
    text_cell,
)

if TYPE_CHECKING:
    from jinja2 import Environment

REPORT_FILE = "report.html"
SCRIPTS, STYLES = ("uplot.min.js", "report.js"), ("uplot.min.css", "report.css")


def report(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: directory that ``select``, ``search`` or ``compare`` wrote.
        out: file to write; by default ``report.html`` in the run directory.
    """
    run_dir = Path(run)
    if not run_dir.is_dir():
        raise InputError(f"no directory {run_dir}; pass one that select, search or compare wrote")
    is_comparison = (run_dir / COMPARISON_FILE).exists()
    try:
        if is_comparison:
            text = render("comparison.html", comparison_context(read_comparison(run_dir)))
        else:
            text = render("selection.html", selection_context(read_selection(run_dir)))
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # in values without a type
        path = run_dir / (COMPARISON_FILE if is_comparison else SELECTION_FILE)
        raise InputError(f"{path} has values that no report can show ({error!r}); {ADVICE}") from error
    return _write(run_dir / REPORT_FILE if out is None else Path(out), text)


def build_report(record: Mapping[str, Any], history: Records = (), *, name: str = "run") -> str:
    """Return the page of a record in memory, byte for byte the one that :func:`report` makes from its directory.

    Args:
        record: the values of ``selection.json``, or those of ``comparison.json`` as ``compare`` writes them.
        history: ``Selection.history``.
        name: name of the run in the page; ``report`` uses the name of the directory.
    """
    if record.get("format") == FORMAT:
        return render("comparison.html", comparison_context(from_record(record, name)))
    thinned = history_from_records(history, list(record.get("gates") or ()))
    return render("selection.html", selection_context(selection_from_record(record, thinned, name=name)))


def write_report_safely(
    record: Mapping[str, Any], history: Records, path: Path, console_message: Callable[[str], None]
) -> None:
    """Write the report of a finished run to ``path``; an error becomes a ``console_message`` and is not raised."""
    try:
        _write(path, build_report(record, history, name=path.resolve().parent.name))
    except Exception as error:
        command = quote_command("lpfs", "report", path.parent)
        console_message(f"  the report could not be written ({error}); the run is complete. Try: {command}")
    else:
        console_message(f"  {quote_command('open', path)}")


def report_comparison(comparison: ComparisonReport, out: str | os.PathLike[str]) -> Path:
    """Write the report of a comparison in memory and return its path."""
    return _write(Path(out), render("comparison.html", comparison_context(comparison)))


def report_experiment(record: Mapping[str, Any], title: str, picture: Path, out: Path) -> Path:
    """Write the page of an experiment of the paper, with its figure inside, and return its path."""
    data = record["data"]
    rows = [[text_cell(text, kind="isolated") for text in row] for row in record["table"]]
    context = {
        "record": record,
        "headline": title,
        "tiles": [
            Tile("Data", data["kind"], data["description"].partition(": ")[2]),
            Tile("Size", "full" if record["full"] else "small", format_duration(record["seconds"])),
            Tile("Seed", record["seed"], f"{record['settings']['seeds']} in all"),
        ],
        "results": ReportTable(["", "The paper", "This run"], rows),
        "picture": f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}",
        "settings": json.dumps(record["settings"], indent=1),
        "numbers": json.dumps(record["measured"], indent=1, ensure_ascii=False),
        "charts": {},
    }
    return _write(out, render("experiment.html", context))


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return a page; it loads nothing from the network and runs only scripts and styles whose hash it lists.

    Args:
        template: file in ``templates/``.
        context: its variables; ``picture`` allows images inside the page.
    """
    scripts, styles = [_asset(name) for name in SCRIPTS], [_asset(name) for name in STYLES]
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_csp_hash, scripts))}",
        f"style-src {' '.join(map(_csp_hash, styles))}",
        *(["img-src data:"] if "picture" in context else []),
        *("base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'"),
    ]
    page = {"policy": "; ".join(policy), "scripts": scripts, "styles": styles, "version": __version__}
    return _environment().get_template(template).render(context, **page)


@cache
def _environment() -> Environment:
    from jinja2 import PackageLoader

    environment = html_environment(PackageLoader("lpfs.report"))
    environment.filters |= {"json_script": json_script, "field_name": _breakable_name}
    return environment


def _breakable_name(name: str) -> Markup:
    """Return the HTML of a field name; a line that is too long breaks after an underscore."""
    html = field_name_html(name)
    return html if "title=" in html else Markup(str(html).replace("_", "_<wbr>"))


@cache
def _asset(name: str) -> Markup:
    return Markup((resources.files("lpfs.report") / "assets" / name).read_text("utf-8").strip())


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _write(path: Path, text: str) -> Path:
    if path.is_dir():
        raise InputError(f"{path} is a directory; pass the file to write, for example {path / REPORT_FILE}")
    write_text_atomic(path, text)
    return path
