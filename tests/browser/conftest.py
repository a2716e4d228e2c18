from __future__ import annotations

import os
from pathlib import Path

import pytest
from chromium import Chromium, find_chromium

ARTEFACTS = Path(__file__).parents[2] / "artefacts"


@pytest.fixture(scope="session")
def browser():
    """A browser for all tests: skipped where there is none, unless LPFS_BROWSER=required says there must be."""
    program = find_chromium()
    if program is None:
        if os.environ.get("LPFS_BROWSER") == "required":
            pytest.fail("no Chromium was found; install: apt-get install chromium, or set LPFS_CHROMIUM")
        pytest.skip("no Chromium here; install: apt-get install chromium (make test-browser runs these tests)")
    found = Chromium(program)
    yield found
    found.close()


@pytest.fixture(scope="session")
def artefacts():
    """Where pictures of the pages are kept."""
    return ARTEFACTS
