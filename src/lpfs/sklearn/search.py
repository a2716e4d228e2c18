"""The search: pretrain the net on all columns, then train it on with gates until exactly K are alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

import lpfs
from lpfs.schema import Selection
from lpfs.sklearn.encode import Encoded, standardised
from lpfs.sklearn.net import Net
from lpfs.sklearn.rows import Sampler
from lpfs.sklearn.settings import Settings
from lpfs.sklearn.target import Task

Floats = NDArray[np.float64]
# How often the history is written.
RECORDS = 50


class Rows:
    """Encoded rows and targets, drawn in batches, and the loss of a batch."""

    def __init__(self, data: Encoded, y: Floats, weight: Floats, task: Task, sampler: Sampler) -> None:
        self.data, self.sampler = data, sampler
        self.loss: Callable[..., Tensor]
        if task == "multiclass":
            self.target, self.loss = torch.from_numpy(y).long(), functional.cross_entropy
        elif task == "binary":
            self.target, self.loss = torch.from_numpy(y).float(), functional.binary_cross_entropy_with_logits
        else:
            self.target, self.loss = torch.from_numpy(standardised(y, weight)).float(), functional.mse_loss
        # Drawn rows have had their weight in the draw; only where a batch is all rows does it enter the loss.
        self.weight = None if sampler.all is None else torch.from_numpy(weight / weight.mean()).float()

    def next_loss(self, net: Net) -> Tensor:
        """Return the mean loss over the next batch."""
        data, rows = self.data, torch.from_numpy(self.sampler.draw())
        logits = net(data.numbers[rows], data.missing[rows], data.ids[rows])
        if self.target.dtype == torch.float32:
            logits = logits.squeeze(1)
        if self.weight is None:
            return self.loss(logits, self.target[rows])
        return (self.loss(logits, self.target[rows], reduction="none") * self.weight[rows]).mean()


def search(
    data: Encoded, y: Floats, weight: Floats, task: Task, outputs: int, names: Sequence[str], how: Settings
) -> Selection:
    """Return which K columns stay; the gates of the others are exactly 0.0."""
    net = Net(data.numbers.shape[1], data.sizes, how.hidden, outputs, torch.Generator().manual_seed(how.seed))
    rows = Rows(data, y, weight, task, Sampler(weight, how.batch_size, how.seed))
    optimizer = torch.optim.AdamW(net.parameters(), lr=how.lr, weight_decay=how.weight_decay)
    for _ in range(how.pretrain):
        optimizer.zero_grad()
        rows.next_loss(net).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    at = {column: place for place, column in enumerate(data.order)}
    sites = {name: lpfs.Site(net.columns, index=at[column]) for column, name in enumerate(names)}
    gates = lpfs.attach(net, sites, steps=how.steps, gate=how.method, seed=how.seed)
    prox = gates.optimizer(keep=how.keep, must_keep=how.must_keep)
    history: list[dict[str, Any]] = []
    every = max(1, how.steps // RECORDS)
    for step in range(1, how.steps + 1):
        optimizer.zero_grad()
        prox.zero_grad()
        loss = rows.next_loss(net)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        prox.step()
        gates.step()
        if step % every == 0 or step == how.steps:
            status = gates.status()
            entry = {"step": step, "loss": float(loss.detach()), "alive": status.alive, "penalty": status.penalty}
            history.append({**entry, "epsilon": status.epsilon})
            if how.verbose and (how.verbose > 1 or len(history) % 10 == 0):
                print(f"loss {entry['loss']:.4f}, {status}")
    made = gates.selection(task=task, pretrain=how.pretrain, batch_size=how.batch_size)
    return Selection(made.kept, made.dropped, made.gates, {}, history, made.made)
