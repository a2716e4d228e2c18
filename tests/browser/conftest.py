from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.chromium import Chromium, find_chromium

ARTEFACTS = Path(__file__).parents[2] / "artefacts"


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests; without one they are skipped, or fail if LPFS_BROWSER=required."""
    program = find_chromium()
    if program is None:
        if os.environ.get("LPFS_BROWSER") == "required":
            pytest.fail("no Chromium found; install: apt-get install chromium, or set LPFS_CHROMIUM")
        pytest.skip("no Chromium found; install: apt-get install chromium (make test-browser runs these tests)")
    browser = Chromium(program)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def artefacts():
    """Directory for screenshots of the pages."""
    return ARTEFACTS
