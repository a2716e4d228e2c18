"""Click logs with a known truth: true fields, noisy copies of them, noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs
from lpfs import Gates, Site
from tests.helpers.zoo import Stacked

VALUES = 10


class Planted:
    """Fields 0 … true-1 decide the click; the next are copies with 30 % of the values replaced; then noise."""

    def __init__(self, seed: int, true: int = 15, copies: int = 15, noise: int = 30) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.true, self.copies, self.size = true, copies, true + copies + noise
        effects = torch.randn(true, VALUES, generator=self.random)
        effects = (effects - effects.mean(1, keepdim=True)) / effects.std(1, keepdim=True)
        self.effects = effects * torch.linspace(0.4, 1.0, true)[:, None]

    def batch(self, rows: int = 256) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VALUES, (rows, self.size), generator=self.random)
        replaced = torch.rand(rows, self.copies, generator=self.random) < 0.3
        own = ids[:, self.true : self.true + self.copies]
        ids[:, self.true : self.true + self.copies] = torch.where(replaced, own, ids[:, : self.copies])
        logit = -1 + sum(self.effects[n][ids[:, n]] for n in range(self.true))
        clicks = torch.rand(rows, generator=self.random) < torch.sigmoid(logit)
        return ids, clicks.float()


def train(model: nn.Module, log: Planted, steps: int, optimizer: torch.optim.Optimizer, *others) -> None:
    """Train for some steps; ``others`` are stepped after the optimizer: the gates' optimizer, the gates."""
    for _ in range(steps):
        ids, clicks = log.batch()
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(ids), clicks).backward()
        optimizer.step()
        for each in others:
            each.step()


def search(seed: int, gate: str, keep: int, steps: int = 1000) -> tuple[Planted, Gates]:
    """Pretrain a small net on all fields, then search."""
    torch.manual_seed(seed)
    log = Planted(seed)
    model = Stacked(log.size, rows=VALUES, hidden=32)
    nn.init.normal_(model.table.rows.weight, std=0.1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    train(model, log, 600, optimizer)
    gates = lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(log.size)}, steps=steps, gate=gate)
    train(model, log, steps, optimizer, gates.optimizer(keep=keep), gates)
    return log, gates
