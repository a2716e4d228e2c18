"""What the method is for: the true fields are found, and a field that matters again comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from tests.helpers.planted import search
from tests.helpers.zoo import D

pytestmark = pytest.mark.long  # whole runs


@pytest.mark.parametrize(("gate", "enough"), [("lpfs++", 4), ("lpfs", 3)])
def test_the_true_fields_are_found_among_copies_and_noise(gate, enough):
    found = 0
    for seed in range(5):
        log, gates = search(seed, gate, keep=15)
        values = gates.values
        alive = values[values != 0].abs()
        assert alive.numel() == 15
        assert 0.2 <= float(alive.min()) <= float(alive.max()) <= 5
        assert int((values == 0.0).sum()) == 45
        found += gates.kept == [f"f{n}" for n in range(log.true)]
    assert found >= enough


class Small(nn.Module):
    def __init__(self, fields: int) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({f"f{n}": nn.Embedding(4, D) for n in range(fields)})
        self.top = nn.Sequential(nn.Linear(fields * D, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        return self.top(torch.cat(parts, 1)).squeeze(1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("gate", "comes_back"), [("lpfs++", True), ("lpfs", False)])
def test_a_field_that_matters_only_later_comes_back(gate, comes_back, seed):
    """f0 matters all the time, f1 from half-time on, f2 and f3 never."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    effects = torch.tensor([-3.0, 3.0, -3.0, 3.0])
    model, steps = Small(4), 2000

    def step(late: bool, *movers) -> None:
        ids = torch.randint(4, (256, 4), generator=random)
        logit = effects[ids[:, 0]] + (effects[ids[:, 1]] if late else 0)
        clicks = (torch.rand(256, generator=random) < torch.sigmoid(logit)).float()
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(ids), clicks).backward()
        for each in movers:
            each.step()

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for _ in range(500):
        step(False, optimizer)
    gates = lpfs.attach(model, model.emb, steps=steps, gate=gate)
    prox = gates.optimizer(penalty=0.3)
    for _ in range(steps // 2):
        step(False, optimizer, prox, gates)
    assert "f0" in gates.kept
    assert "f1" in gates.dropped
    for _ in range(steps // 2):
        step(True, optimizer, prox, gates)
    assert ("f1" in gates.kept) is comes_back
    assert "f0" in gates.kept
