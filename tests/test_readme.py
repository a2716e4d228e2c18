"""What the README shows runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs

ROOT = Path(__file__).parents[1]
PACKAGES = {"torchrec_model.py": "torchrec", "fuxictr_model.py": "fuxictr", "deepctr_model.py": "deepctr_torch"}
README = (ROOT / "README.md").read_text("utf-8")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(30, 4)})
        self.top = nn.Linear(8, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.emb["user"](ids[:, 0]), self.emb["item"](ids[:, 1])], 1)).squeeze(1)


def test_the_five_lines(capsys):
    """As they stand there, with 300 steps instead of 20,000 and 1 field to keep of 2."""
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    block = block.replace("20_000", "300").replace("keep=20", "keep=1")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (300, 64, 2), generator=random)
    clicks = (ids[:, :, 1] % 2).float()
    model = Model()
    before = model(ids[0])
    seen = {}

    def loss_of(model, batch):
        if not seen:
            seen["attached"] = model(ids[0])
        return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    names = {"lpfs": lpfs, "torch": torch, "model": model, "stream": list(zip(ids, clicks, strict=True))}
    gated = {}
    real = lpfs.absorb

    def absorb(given):
        gated["logits"] = given(ids[0])
        return real(given)

    lpfs.absorb = absorb
    try:
        exec(block, {**names, "loss_of": loss_of}, names)
    finally:
        del lpfs.absorb
    assert torch.equal(seen["attached"], before)
    assert torch.equal(model(ids[0]), gated["logits"])
    assert names["selection"].kept == ("item",)
    assert capsys.readouterr().out.strip() == "['item'] ['user']"


def test_the_loop(tmp_path, monkeypatch):
    """As it stands there, with fewer rows."""
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1].replace("100_000", "3_000")
    monkeypatch.chdir(tmp_path)

    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Embedding(2_000_000, 1)

        def forward(self, batch):
            return self.weight(batch.ids).sum((1, 2))

    names = {"lpfs": lpfs, "model": Ids()}
    exec(block, names)
    assert 0 <= names["done"].metrics.auc <= 1
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_every_link_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_commands_in_the_readme_name_files_that_exist():
    for path in re.findall(r"(?:tests|examples|benchmarks)/[\w/]+\.\w+", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", sorted(each.name for each in (ROOT / "examples").glob("*.py")))
def test_every_example_runs(name, capsys):
    if name in PACKAGES:  # make test-adapters runs these
        pytest.importorskip(PACKAGES[name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = capsys.readouterr().out
    assert out
    assert name != "own_model.py" or "certified: max |Δlogit|" in out
    assert name != "hot_start.py" or re.search(r"the hot start (was level .* [\d,]+ saved|saved nothing)", out)
    assert "bit-identical: False" not in out
