"""Every command and every program of README and docs is run, page by page, on small data (make test-docs)."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import lpfs
from lpfs.pipeline import splits
from tests.helpers import doc_world
from tests.helpers.doc_blocks import PAGES, Block, blocks

pytestmark = pytest.mark.docs
RUN = sorted(  # those with the most searches first, so that none of them is left to the end
    (page for page in PAGES if any(block.language in ("python", "sh") for block in blocks(page))),
    key=lambda page: (
        -len(re.findall(r"^lpfs (?:select|compare|search)|lpfs\.(?:select|compare)\(", page.read_text("utf-8"), re.M))
    ),
)


@pytest.fixture
def small_world(monkeypatch, tmp_path):
    """Short searches and short logs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(splits, "MIN_PRETRAIN_STEPS", 50)
    monkeypatch.setattr(splits, "MIN_SEARCH_STEPS", 50)
    monkeypatch.setattr("lpfs.pipeline.curve.FOLDS", 2)
    monkeypatch.setattr("lpfs.methods.permutation.MAX_REPEATS", 1)
    real = lpfs.simulate

    def simulate(out, preset="small", *, rows=None, **options):
        return real(out, preset, rows=min(rows or doc_world.ROWS, doc_world.ROWS), **options)

    monkeypatch.setattr(lpfs, "simulate", simulate, raising=False)
    monkeypatch.setattr(importlib.import_module("lpfs.data.simulate"), "simulate", simulate)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_everything_on_the_page_runs(page: Path, small_world):
    run(page, blocks(page))


def run(page: Path, page_blocks: list[Block]) -> None:
    names = {"lpfs": lpfs, "__name__": "docs"}
    if page.name in doc_world.GIVEN:
        names |= doc_world.GIVEN[page.name]()
    for large in doc_world.SMALLER.get(page.name, {}):
        assert any(large in block.text for block in page_blocks), f"{page.name}: no {large!r} to make smaller"
    for block in page_blocks:
        if block.not_run:
            continue
        if page.name == "options.md":  # the examples of each command start in an empty folder
            for path in Path().iterdir():
                doc_world.remove(path)
        if block.file:
            Path(block.file).write_text(block.text, "utf-8")
        elif block.language == "python":
            doc_world.run_python(block, names)
        elif block.language == "sh":
            for words in block.commands():
                if words[0].removeprefix(".venv/bin/") == "lpfs":
                    doc_world.run_command(words[1:])


def test_every_file_and_key_of_a_run_is_explained(small_world):
    page = next(page for page in PAGES if page.name == "formats.md").read_text("utf-8")
    explained = set(re.findall(r"`([\w.]+?)/?`", page))
    doc_world.provide("run")
    names = {path.name for path in Path("run").iterdir()}
    for path in ("run/selection.json", "run/model/model.json"):
        names |= set(json.loads(Path(path).read_text("utf-8")))
    methods = ["permutation", "random"]
    comparison = lpfs.compare("run/data", "cmp", methods=methods, keep=[10], seeds=1, quiet=True)
    names |= {path.name for path in Path("cmp").iterdir()} | set(comparison.values)
    assert not names - explained, f"formats.md does not explain {sorted(names - explained)}"


def test_messy_csv_table_is_true(small_world):
    """The outcomes that the table in data.md states, for a few rows of it."""

    def prepared(lines, **options):
        Path("messy.csv").write_text("\n".join(lines) + "\n", "utf-8")
        doc_world.remove(Path("out"))
        return lpfs.prepare("messy.csv", "out", label="click", quiet=True, **options)

    def table(column, separator=","):
        return [separator.join(["click", "x", "y"])] + [
            separator.join([str(n % 2), column(n), "abc"[n % 3]]) for n in range(400)
        ]

    kinds = {
        "NA": lambda n: "NA" if n % 5 == 0 else str(n / 3),
        "?": lambda n: "?" if n % 5 == 0 else str(n / 3),
        "1,234,567": lambda n: f"{10**6 + n * 1001:,}",
        "$3.50": lambda n: f"${n / 3:.2f}",
    }
    found = {name: prepared(table(column, ";")).schema["x"].kind for name, column in kinds.items()}
    assert found == {"NA": "numeric", "?": "categorical", "1,234,567": "numeric", "$3.50": "numeric"}
    assert prepared(table(kinds["?"]), missing=["?"]).schema["x"].kind == "numeric"
    assert prepared(table(lambda n: f"{n},5", ";")).schema["x"].kind == "numeric"  # decimal commas
    with pytest.raises(lpfs.errors.DataError, match=r"line 31.*columns"):
        prepared([*table(kinds["NA"])[:30], "1;2;3", *table(kinds["NA"])[30:]])
    with pytest.raises(lpfs.errors.DataError, match=r"'x'.*time_format"):
        prepared(table(lambda n: f"{1 + n // 40:02d}/03/2026"), time="x")
    with pytest.raises(lpfs.errors.DataError, match=r"'soon' is not one of the format iso; repair it"):
        prepared(table(lambda n: "soon" if n == 0 else f"2026-01-{1 + n // 40:02d}"), time="x")
