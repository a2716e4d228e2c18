"""The page about adapters says what the tests found, and no more."""

from __future__ import annotations

import json
import re
import sys

import pytest
from contract import CHECKS, RESULTS
from table import BEGIN, COLUMNS, PACKAGES, PAGE, page, table

import lpfs.adapters
from lpfs.errors import MissingPackageError


def test_the_table_is_that_of_the_results():
    text = PAGE.read_text("utf-8")
    assert BEGIN in text
    assert page(text) == text, "python tests/adapters/table.py writes it anew"


def test_every_model_was_through_every_check():
    assert [check.__name__ for check in CHECKS] == list(COLUMNS)
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")}
    assert set(found) == set(PACKAGES)
    for rows in found.values():
        for model, row in rows.items():
            assert set(row) == set(COLUMNS), model
    assert len(table().splitlines()) == 2 + sum(len(rows) for rows in found.values())


def test_commands_and_names_on_the_page_exist():
    text = PAGE.read_text("utf-8")
    for path in re.findall(r"(?:tests|examples)/[\w/]+\.\w+", text):
        assert (PAGE.parents[1] / path).exists(), path
    for name in re.findall(r"from lpfs\.adapters import (\w+)", text):
        assert name in lpfs.adapters.__all__


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lpfs.adapters.torchrec")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ["torchrec", *(name for name in sys.modules if name.startswith("torchrec."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[torchrec\]' or, without CUDA: pip install"):
        lpfs.adapters.TorchRec  # noqa: B018


def test_only_known_names():
    assert set(dir(lpfs.adapters)) == set(lpfs.adapters.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Keras'"):
        lpfs.adapters.Keras  # noqa: B018
