"""Your own PyTorch model: gates on, search, gates off, a smaller model that predicts the same.

    python examples/own_model.py

Everything between the two lines of dashes below is somebody's model and data, as they were before lpfs. The log
here is made up, so that the truth is known: of 24 fields only the first 6 decide about a click, 6 more are noisy
copies of them, the rest is noise.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs

FIELDS, TRUE, COPIES, VALUES = 24, 6, 6, 20
NAMES = [f"field_{n:02d}" for n in range(FIELDS)]

# ------------------------------------------------------------------------- a model and its data


class Clicks(nn.Module):
    """A table for every field, concatenated, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({name: nn.Embedding(VALUES, 8) for name in NAMES})
        self.top = nn.Sequential(nn.Linear(FIELDS * 8, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in self.emb.values():
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:  # (B, F) -> (B,)
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        logits: Tensor = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return logits


class Log:
    """An endless log of clicks."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.effects = torch.randn(TRUE, VALUES, generator=self.random)

    def batch(self, rows: int = 512) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VALUES, (rows, FIELDS), generator=self.random)
        copied = torch.rand(rows, COPIES, generator=self.random) < 0.7
        ids[:, TRUE : TRUE + COPIES] = torch.where(copied, ids[:, :COPIES], ids[:, TRUE : TRUE + COPIES])
        logits = -1.5 + sum(self.effects[n][ids[:, n]] for n in range(TRUE))
        assert isinstance(logits, Tensor)
        return ids, (torch.rand(rows, generator=self.random) < torch.sigmoid(logits)).float()


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(data[0]), data[1])


# ---------------------------------------------------------------------------------------- lpfs


def main(steps: int = 1000, keep: int = TRUE) -> lpfs.Pruned:
    torch.manual_seed(0)
    started = time.perf_counter()
    log, model = Log(), Clicks()
    held_out = log.batch(20_000)

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for _ in range(steps):  # the training you have already done
        optimizer.zero_grad()
        loss_of(model, log.batch()).backward()
        optimizer.step()
    print(f"trained on all {FIELDS} fields: held-out log loss {loss_of(model, held_out):.4f}")

    before = model(held_out[0])
    gates = lpfs.attach(model, model.emb, steps=steps, reader=model.top[0])
    print(f"gates on: predictions bit-identical: {torch.equal(before, model(held_out[0]))}")

    prox = gates.optimizer(keep=keep)
    for step in range(steps):
        optimizer.zero_grad()
        prox.zero_grad()
        loss_of(model, log.batch()).backward()
        prox.step()
        optimizer.step()
        gates.step()
        if (step + 1) % (steps // 5) == 0:
            print(f"  {gates.status()}")

    gated = model(held_out[0])
    selection = lpfs.absorb(model, optimizer, batch=(held_out[0],))
    print(f"gates absorbed: predictions bit-identical: {torch.equal(gated, model(held_out[0]))}")

    where = {name: (0, n) for n, name in enumerate(NAMES)}  # so that leaks can be looked for
    pruned = lpfs.prune(model, selection, batch=(held_out[0],), inputs=where, optimizer=optimizer, cut=True)
    print(f"pruned: {pruned.certificate}")
    counts = [sum(each.numel() for each in one.parameters()) for one in (model, pruned.model)]
    print(f"parameters {counts[0]:,} -> {counts[1]:,}; held-out log loss {loss_of(pruned.model, held_out):.4f}")
    print(f"kept {list(selection.kept)}")
    print(f"true {NAMES[:TRUE]}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: README.md, docs/method.md")
    return pruned


if __name__ == "__main__":
    main()
