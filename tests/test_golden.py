"""The selections of a few small configurations equal the committed ones; tools/golden.py compares every number."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = json.loads((ROOT / "tests" / "golden_selections.json").read_text("utf-8"))

spec = importlib.util.spec_from_file_location("tools_golden", ROOT / "tools" / "golden.py")
assert spec is not None
assert spec.loader is not None
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)


@pytest.mark.long
@pytest.mark.parametrize("name", golden.FAST)
def test_kept_fields_equal_the_committed_ones(name):
    assert golden.run_one(name)["kept"] == EXPECTED[name]


def record(kept=("a", "b"), auc=0.75, gate=0.5, key="auc"):
    return {"kept": {"run": list(kept)}, "metrics": {"test": {key: auc}}, "gates": {"b": gate}}


@pytest.mark.parametrize(
    ("new", "verdict", "text"),
    [
        (record(), golden.IDENTICAL, ""),
        (record(key="test_auc"), golden.IDENTICAL, "/test/auc is now /test/test_auc"),
        (record(auc=0.75 + 1e-9), golden.NUMBERS, "metrics: largest difference 1e-09"),
        (record(gate=0.25), golden.NUMBERS, "gates: largest difference 0.25"),
        (record(auc=None), golden.NUMBERS, "/test/auc: 0.75 -> null"),
        (record(kept="ac"), golden.DIFFERENT, "no longer kept ['b'], newly kept ['c']"),
        (record(kept="ba"), golden.DIFFERENT, "same fields in another order"),
    ],
)
def test_records_are_compared_by_kept_fields_and_numbers(new, verdict, text):
    found, lines = golden.compare_records(record(), new)
    assert found == verdict
    assert text in "\n".join(lines)
