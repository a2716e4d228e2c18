"""Every test and every campaign that SECURITY.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")


def named_tests():
    """Yield (file, name of a test) for `tests/x.py::test_a` and for the `::test_b` that follow it."""
    file = ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", TEXT):
        file = path or file
        yield file, name


def test_every_test_exists():
    tests = list(named_tests())
    assert len(tests) > 40
    missing = [
        f"{file}::{name}"
        for file, name in tests
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert missing == []
    assert "TODO" not in TEXT


def test_every_campaign_and_its_result_exist():
    scripts = set(re.findall(r"benchmarks/\w+\.py", TEXT))
    results = set(re.findall(r"\]\((benchmarks/results/\w+\.json)\)", TEXT))
    assert len(results) == 4
    assert [name for name in sorted(scripts | results) if not (ROOT / name).exists()] == []
