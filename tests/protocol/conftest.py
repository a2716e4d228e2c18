from __future__ import annotations

import pytest
from known_truth import known_truth


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log")
