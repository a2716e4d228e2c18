from __future__ import annotations

import pytest

from tests.helpers.bundles import prepare_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return prepare_dataset(tmp_path_factory.mktemp("serve") / "data")
