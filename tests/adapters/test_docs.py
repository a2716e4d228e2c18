"""The page about adapters shows exactly the results of the tests."""

from __future__ import annotations

import json
import re
import sys

import pytest

import lpfs.adapters
from lpfs.errors import MissingPackageError
from tests.adapters.table import BEGIN, COLUMNS, PACKAGES, PAGE, page, table
from tests.helpers.adapter_contract import CHECKS, RESULTS


def test_table_shows_the_results():
    text = PAGE.read_text("utf-8")
    assert BEGIN in text
    assert page(text) == text, "run python tests/adapters/table.py"


def test_every_model_has_every_check():
    assert [check.__name__ for check in CHECKS] == list(COLUMNS)
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")}
    assert set(results) == set(PACKAGES)
    for rows in results.values():
        for model, row in rows.items():
            assert set(row) == set(COLUMNS), model
    assert len(table().splitlines()) == 2 + sum(len(rows) for rows in results.values())


def test_commands_and_names_on_the_page_exist():
    text = PAGE.read_text("utf-8")
    for path in re.findall(r"(?:tests|examples)/[\w/]+\.\w+", text):
        assert (PAGE.parents[1] / path).exists(), path
    for name in re.findall(r"from lpfs\.adapters import (\w+)", text):
        assert name in lpfs.adapters.__all__


def test_missing_package_names_the_extra(monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("lpfs.adapters.torchrec", "lpfs.adapters._torchrec"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in ["torchrec", *(name for name in sys.modules if name.startswith("torchrec."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[torchrec\]' or, without CUDA: pip install"):
        lpfs.adapters.TorchRec  # noqa: B018


def test_unknown_name_is_an_attribute_error():
    assert set(lpfs.adapters.__all__) <= set(dir(lpfs.adapters))
    with pytest.raises(AttributeError, match="no attribute 'Keras'"):
        lpfs.adapters.Keras  # noqa: B018
