"""The site builds without a warning and makes no request to other servers; the notebook runs (make test-docs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.doc_blocks import NAV, ROOT, tool

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return out


def test_every_page_is_there_and_makes_no_request_to_other_servers(site):
    for name in NAV:
        text = (site / name).with_suffix(".html").read_text("utf-8")
        assert re.findall(r'(?:src|<link[^>]+href)="(https?:[^"]+)"', text) == [], name


def test_formulas_are_drawn_and_linked_files_are_there(site):
    assert "<math" in (site / "methods.html").read_text("utf-8")
    assert "$$" not in (site / "methods.html").read_text("utf-8")
    assert (site / "examples" / "own_model.py").read_bytes() == (ROOT / "examples" / "own_model.py").read_bytes()


def test_the_api_page_has_every_docstring_rendered(site):
    text = (site / "api.html").read_text("utf-8")
    assert 'id="lpfs.attach"' in text
    assert "Parameters:" in text
    for raw in (":class:", ":func:", ".. math::", "::: lpfs"):
        assert raw not in text, raw


def test_the_notebook_runs_and_shows_what_is_committed():
    import nbformat

    committed = nbformat.read(ROOT / "examples" / "lpfs.ipynb", as_version=4)
    done = tool("notebook").executed(ROOT / "examples" / "lpfs.ipynb")
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 3
    for before, after in zip(committed.cells, done.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", [])] for cell in (before, after)]
        assert kinds[0] == kinds[1], before.source
    assert (ROOT / "examples" / "lpfs.ipynb").stat().st_size < 400_000
