"""The program in the README does what it says, and every example runs."""

from __future__ import annotations

import re
import runpy
import socket
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs.pipeline import splits

ROOT = Path(__file__).parents[1]
PACKAGES = {"torchrec_model.py": "torchrec", "fuxictr_model.py": "fuxictr", "deepctr_model.py": "deepctr_torch"}
README = (ROOT / "README.md").read_text("utf-8")
SLOW = ("cross_features.py", "multi_task.py")
EXAMPLES = [
    pytest.param(path.name, marks=[pytest.mark.campaign] if path.name in SLOW else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]
# example -> a pattern in its output
OUTPUT = {
    "own_model.py": r"certified: max \|Δlogit\|",
    "hot_start.py": r"the hot start (reached .* [\d,]+ steps saved|saved no steps)",
    "criteo.py": r"(?s)kept 15 of 27: .*the report: .*report\.html",
    "cross_features.py": r"378 gates: 31 fields .*; 40 are left",
    "multi_task.py": r"(?s)kept 20: .*  purchase +0\.\d+",
    "online.py": r"(?s)watch http://.* requests answered by [1-9]\d* versions of the model, 0 failed",
    "cost_budget.py": r"with prices +\d+ fields for +(?:1[0-4]|\d)\.\d ms",
}
SHORTER = ("demo.py",)  # as it is it takes a minute


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(30, 4)})
        self.top = nn.Linear(8, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.emb["user"](ids[:, 0]), self.emb["item"](ids[:, 1])], 1)).squeeze(1)


def test_the_program_in_the_readme(capsys):
    """As it stands there, with 300 steps instead of 20,000 and 1 field to keep of 2."""
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    block = block.replace("20_000", "300").replace("keep=20", "keep=1")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (300, 64, 2), generator=generator)
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

    def absorb(model, **settings):
        gated["logits"] = model(ids[0])
        return real(model, **settings)

    lpfs.absorb = absorb
    try:
        exec(block, {**names, "loss_of": loss_of}, names)
    finally:
        del lpfs.absorb
    assert torch.equal(seen["attached"], before)
    assert torch.equal(model(ids[0]), gated["logits"])
    assert names["selection"].kept == ("item",)
    assert capsys.readouterr().out.strip() == "['item'] ['user']"


def test_the_first_screen_says_what_to_do():
    first = "\n".join(README.splitlines()[:20])
    for part in ("make demo", "make test", "lpfs select clicks.parquet --label click", "docs/images/report.png"):
        assert part in first


def test_the_readme_is_short_and_its_picture_is_small():
    assert len(README.splitlines()) < 105
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size < 300_000


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs(name, capsys, monkeypatch):
    if name in PACKAGES:  # make test-adapters runs these
        pytest.importorskip(PACKAGES[name])
    arguments = {"online.py": ["--seconds", "30", "--port", str(free_port())], "demo.py": ["--rows", "30000"]}
    monkeypatch.setattr("sys.argv", [name, *arguments.get(name, [])])
    if name in SHORTER:
        monkeypatch.setattr(splits, "MIN_PRETRAIN_STEPS", 400)
        monkeypatch.setattr(splits, "MIN_SEARCH_STEPS", 400)
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(OUTPUT.get(name, "."), out)
    assert "bit-identical: False" not in out
