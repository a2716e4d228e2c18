"""Every model is exported as clicks.py makes it; logs with raw values are in ``rawlog.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A prepared log with every kind of field; tests must not change it."""
    from rawlog import prepared

    return prepared(tmp_path_factory.mktemp("export") / "data")
