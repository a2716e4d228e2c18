"""A tiny model and a small log for tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema

VALUES = 20


class Tiny(nn.Module):
    """Embeddings of two fields, a number, dropout, a linear layer: logits (B,), or (B, T) for several tasks."""

    def __init__(self, tasks: int | None = None, dropout: float = 0.1, sparse: bool = False) -> None:
        super().__init__()
        self.user = nn.Embedding(VALUES, 4, sparse=sparse)
        self.item = nn.Embedding(VALUES, 4, sparse=sparse)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(9, tasks or 1)
        self.tasks = tasks

    def forward(self, batch: Batch) -> Tensor:
        parts = [self.user(batch.ids[:, 0]), self.item(batch.ids[:, 1]), batch.dense]
        out = self.head(self.drop(torch.cat(parts, 1)))
        return out[:, 0] if self.tasks is None else out


def tiny(seed: int = 0, **options) -> Tiny:
    """Return a tiny model from a seed."""
    torch.manual_seed(seed)
    return Tiny(**options)


def log(out: Path, rows: int = 640, days: int = 2, tasks: tuple[str, ...] = (), rate: float = 0.5) -> Dataset:
    """Write a log whose clicks depend on user, item and a number."""
    schema = Schema(
        (Field("user", cardinality=VALUES), Field("item", cardinality=VALUES), Field("x", "numeric")),
        label="click",
        tasks=tasks,
    )
    random = np.random.default_rng(7)
    effects = random.normal(size=(2, VALUES))
    with DatasetWriter(out, schema, fingerprint="tiny", settings={}) as writer:
        for number in range(days):
            user, item = random.integers(VALUES, size=(2, rows // days))
            x = random.normal(size=rows // days)
            odds = 1 / (1 + np.exp(-(effects[0][user] + effects[1][item] + x)))
            labels = {name: (random.random(len(x)) < odds).astype(np.float32) for name in ("click", *tasks)}
            day = writer.day(f"day {number}", negative_rate=rate)
            day.append(ids={"user": user, "item": item}, bags={}, dense={"x": x}, labels=labels)
    return Dataset(out)
