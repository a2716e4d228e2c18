from __future__ import annotations

import pytest

from tests.helpers import raw_log


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A prepared log with every kind of field; tests must not change it."""
    return raw_log.prepared(tmp_path_factory.mktemp("export") / "data")
