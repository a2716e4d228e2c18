"""The search: pretrain the net on all columns, then train it on with gates until exactly K are alive.

On a log of clicks every row is seen once, so the gates feel how a column predicts rows that are new. A table is
seen many times over, and a net learns its rows by heart, best by the columns with the most values. So the rows are
parted here: the weights of the net learn from two thirds of them, the gates from the rest, which the weights never
see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

import lpfs
from lpfs.gates.control import STEEP, Keep
from lpfs.schema import Selection
from lpfs.sklearn.encode import Encoded, standardised
from lpfs.sklearn.net import Net
from lpfs.sklearn.rows import Sampler
from lpfs.sklearn.settings import Settings
from lpfs.sklearn.target import Task

Floats = NDArray[np.float64]
# The share of the rows that the gates learn from.
HELD = 1 / 3
# How often the history is written.
RECORDS = 50
# When gates die in these short searches over few columns, and when the dead set is frozen: early.
PACE = {**STEEP, "end": 0.55, "freeze": 0.55, "hurry": 0.7}


class Part:
    """Some of the rows, drawn in batches, and the loss of a batch."""

    def __init__(self, data: Encoded, target: Tensor, task: Task, weight: Floats, size: int, seed: int) -> None:
        self.data, self.target = data, target
        losses: dict[str, Callable[..., Tensor]] = {
            "binary": functional.binary_cross_entropy_with_logits,
            "multiclass": functional.cross_entropy,
            "regression": functional.mse_loss,
        }
        self.loss = losses[task]
        self.sampler = Sampler(weight, size, seed)
        # Drawn rows have had their weight in the draw; only where a batch is all rows does it enter the loss.
        self.weight = None if self.sampler.all is None else torch.from_numpy(weight / weight.mean()).float()

    def next_loss(self, net: Net) -> Tensor:
        """Return the mean loss over the next batch."""
        data, rows = self.data, torch.from_numpy(self.sampler.draw())
        logits = net(data.numbers[rows], data.missing[rows], data.ids[rows])
        if self.target.is_floating_point():
            logits = logits.squeeze(1)
        if self.weight is None:
            return self.loss(logits, self.target[rows])
        return (self.loss(logits, self.target[rows], reduction="none") * self.weight).mean()


def part_rows(
    data: Encoded, y: Floats, weight: Floats, task: Task, batch_size: int, seed: int
) -> tuple[Part, Part]:
    """Return the rows for the weights of the net and those for the gates; neither is empty."""
    numbers = torch.from_numpy(standardised(y, weight) if task == "regression" else y)
    target = numbers.long() if task == "multiclass" else numbers.float()
    cut = min(len(y) - 1, max(1, round(len(y) * (1 - HELD))))
    first, last = slice(None, cut), slice(cut, None)
    return (
        Part(data[first], target[first], task, weight[first], batch_size, seed),
        Part(data[last], target[last], task, weight[last], batch_size, seed + 1),
    )


def search(
    data: Encoded, y: Floats, weight: Floats, task: Task, outputs: int, names: Sequence[str], how: Settings
) -> Selection:
    """Return which K columns stay; the gates of the others are exactly 0.0."""
    net = Net(data.numbers.shape[1], data.sizes, how.hidden, outputs, torch.Generator().manual_seed(how.seed))
    own, held = part_rows(data, y, weight, task, how.batch_size, how.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=how.lr, weight_decay=how.weight_decay, fused=True)

    def learn() -> None:
        optimizer.zero_grad()
        own.next_loss(net).backward()
        optimizer.step()

    for _ in range(how.pretrain):
        learn()
    at = {column: place for place, column in enumerate(data.order)}
    sites = {name: lpfs.Site(net.columns, index=at[column]) for column, name in enumerate(names)}
    gates = lpfs.attach(net, sites, steps=how.steps, gate=how.method, seed=how.seed)
    # the paper's symmetric step, with which the defaults here were found; x >= 0 is level on the toy sets
    control = Keep(how.keep, **PACE)
    prox = gates.optimizer(keep=how.keep, must_keep=how.must_keep, prox="l1", control=control)
    history: list[dict[str, Any]] = []
    for step in range(1, how.steps + 1):
        learn()
        loss = held.next_loss(net)
        (gates.x.grad,) = torch.autograd.grad(loss, [gates.x])
        prox.step()
        gates.step()
        if step % max(1, how.steps // RECORDS) == 0 or step == how.steps:
            status = gates.status()
            history.append(
                {
                    "step": step,
                    "loss": float(loss.detach()),
                    "alive": status.alive,
                    "penalty": status.penalty,
                    "epsilon": status.epsilon,
                }
            )
            if how.verbose > 1 or (how.verbose and len(history) % 10 == 0):
                print(f"loss {float(loss.detach()):.4f}, {status}")
    made = gates.selection(task=task, pretrain=how.pretrain, batch_size=how.batch_size)
    return Selection(made.kept, made.dropped, made.gates, {}, history, made.made)
