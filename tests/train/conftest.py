from __future__ import annotations

import pytest

from tests.helpers.tiny import log


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return log(tmp_path_factory.mktemp("tiny") / "log")
