"""The committed results of experiments: format, figure, and a line in the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lpfs.paper.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results" / "paper").glob("*.json"))


def test_results_exist():
    assert len(RESULTS) >= 9


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_have_the_present_format(path):
    values = json.loads(path.read_text("utf-8"))
    assert (values["format"], values["experiment"]) == ("lpfs-paper", path.stem)
    assert values["claim"] == EXPERIMENTS[path.stem].claim
    assert values["command"].startswith(f"lpfs reproduce {path.stem}")
    assert values["data"]["kind"] in ("none", "simulated")
    assert values["measured"]
    assert values["data"]["description"]
    assert path.with_suffix(".png").stat().st_size < 200_000


def test_docs_name_every_experiment():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in EXPERIMENTS if f"| `{name}`" not in text] == []
