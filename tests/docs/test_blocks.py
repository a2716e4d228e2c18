"""Every command and every program of README and docs is run, page by page, in small (make test-docs)."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import small
from blocks import PAGES, Block, blocks

import lpfs
from lpfs.pipeline import splits

pytestmark = pytest.mark.docs
RUN = [page for page in PAGES if any(each.language in ("python", "sh") for each in blocks(page))]


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Short searches and short logs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(splits, "LEAST_PRETRAIN", 60)
    monkeypatch.setattr(splits, "LEAST_SEARCH", 60)
    monkeypatch.setattr("lpfs.methods.permutation.MOST", 1)
    whole = lpfs.simulate

    def little(out, preset="small", *, rows=None, **given):
        return whole(out, preset, rows=min(rows or small.ROWS, small.ROWS), **given)

    monkeypatch.setattr(lpfs, "simulate", little, raising=False)
    monkeypatch.setattr(importlib.import_module("lpfs.data.simulate"), "simulate", little)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_everything_on_the_page_runs(page: Path, few):
    run(page, blocks(page))


def run(page: Path, every: list[Block]) -> None:
    names = {"lpfs": lpfs, "__name__": "docs"}
    if page.name in small.GIVEN:
        names |= small.GIVEN[page.name]()
    for large in small.SMALLER.get(page.name, {}):
        assert any(large in each.text for each in every), f"{page.name}: no {large!r} to make smaller"
    for each in every:
        if each.not_run:
            continue
        if page.name == "options.md":  # the examples of each command are a world of their own
            for made in Path().iterdir():
                small.remove(made)
        if each.file:
            Path(each.file).write_text(each.text, "utf-8")
        elif each.language == "python":
            small.run_python(each, names)
        elif each.language == "sh":
            for words in each.commands():
                if words[0].removeprefix(".venv/bin/") == "lpfs":
                    small.run_command(words[1:])


def test_every_file_and_key_of_a_run_is_explained(few):
    page = next(page for page in PAGES if page.name == "formats.md").read_text("utf-8")
    said = set(re.findall(r"`([\w.]+?)/?`", page))
    small.provide("run")
    names = {each.name for each in Path("run").iterdir()}
    for told in ("run/selection.json", "run/model/model.json"):
        names |= set(json.loads(Path(told).read_text("utf-8")))
    methods = ["permutation", "random"]
    found = lpfs.compare("run/data", "cmp", methods=methods, keep=[10], seeds=1, quiet=True)
    names |= {each.name for each in Path("cmp").iterdir()} | set(found.values)
    assert not names - said, f"formats.md does not say what {sorted(names - said)} are"
