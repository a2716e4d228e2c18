"""The search: pretrain the net on all columns, then train it on with gates until exactly K are alive.

On a log of clicks every row is seen once, so the gates feel how a column predicts rows that are new. A table is
seen many times over, and a net learns its rows by heart, best by the columns with the most values. So the rows are
parted here: the weights of the net learn from two thirds of them, the gates from the rest, which the weights never
see.

The small net that the selector trains: an embedding for every column, concatenated, then an MLP.

Settings: the selector's arguments, checked and resolved for the table at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

import lpfs
from lpfs.errors import FieldError, InputError
from lpfs.gates.control import STEEP, Keep
from lpfs.schema import Selection
from lpfs.sklearn.tables import EncodedTable, Task, WeightedSampler, standardised

DIM = 8


class ColumnEmbeddings(nn.Module):
    """The embeddings of all columns, (B, N, D): numeric ones first, then categorical ones.

    A number v becomes v·w, or m where it is missing; an id becomes its row of a table. All weights are drawn from
    ``random``, so that nobody else's random numbers are touched.
    """

    starts: Tensor

    def __init__(self, numeric: int, sizes: Sequence[int], random: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, DIM, generator=random) / math.sqrt(DIM))
        self.absent = nn.Parameter(torch.zeros(numeric, DIM))
        self.rows = skip_init(nn.Embedding, max(1, sum(sizes)), DIM)
        nn.init.normal_(self.rows.weight, std=1 / math.sqrt(DIM), generator=random)
        starts = torch.tensor([0, *sizes[:-1]] if sizes else [], dtype=torch.int64)
        self.register_buffer("starts", starts.cumsum(0))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        """Return the embeddings (B, N, D) of numbers (B, C), marks (B, C) or (B, 0), and ids (B, M)."""
        parts = numbers[:, :, None] * self.weight  # (B, C, D)
        if missing.shape[1]:
            parts = parts + missing[:, :, None] * self.absent
        if not ids.shape[1]:
            return parts
        return torch.cat([parts, self.rows(ids + self.starts)], dim=1)


class Net(nn.Module):
    """Columns, concatenated, then an MLP with ReLUs; returns logits (B, outputs)."""

    def __init__(
        self, numeric: int, sizes: Sequence[int], hidden: Sequence[int], outputs: int, random: torch.Generator
    ) -> None:
        super().__init__()
        self.columns = ColumnEmbeddings(numeric, sizes, random)
        widths = [(numeric + len(sizes)) * DIM, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [_linear(before, after, random), nn.ReLU()]
        self.top = nn.Sequential(*layers, _linear(widths[-1], outputs, random))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        """Return the logits (B, outputs)."""
        logits: Tensor = self.top(self.columns(numbers, missing, ids).flatten(1))
        return logits


def _linear(before: int, after: int, random: torch.Generator) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, before, after)
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=random)
    nn.init.zeros_(layer.bias)
    return layer


METHODS = ("lpfs++", "lpfs")


@dataclass(frozen=True)
class SelectorSettings:
    """How a search is done."""

    keep: int
    method: str
    steps: int
    pretrain: int
    batch_size: int
    hidden: tuple[int, ...]
    lr: float
    weight_decay: float
    must_keep: tuple[str, ...]
    seed: int
    verbose: int


def resolve_settings(given: Any, rows: int, names: Sequence[str], random: Any) -> SelectorSettings:
    """Return the settings for a table of this size; refuse arguments that make no sense."""
    columns = len(names)
    if given.method not in METHODS:
        raise InputError(f"method must be one of {', '.join(map(repr, METHODS))}, found {given.method!r}")
    batch_size = whole("batch_size", given.batch_size, 1)
    steps = default_steps(rows, columns, batch_size) if given.steps is None else whole("steps", given.steps, 1)
    return SelectorSettings(
        keep=count_to_keep(given.keep, columns),
        method=given.method,
        steps=steps,
        pretrain=steps // 2 if given.pretrain is None else whole("pretrain", given.pretrain, 0),
        batch_size=batch_size,
        hidden=_widths(given.hidden),
        lr=_number("lr", given.lr, above=True),
        weight_decay=_number("weight_decay", given.weight_decay, above=False),
        must_keep=_names(given.must_keep, names),
        seed=int(random.randint(2**31 - 1)),
        verbose=whole("verbose", given.verbose, 0),
    )


def default_steps(rows: int, columns: int, batch_size: int) -> int:
    """Return how long a search is by default: five times through the data, within limits.

    At least 1,000 steps from 250 rows on, fewer for toys, at most 10,000; at least 2 for every column.

    >>> [default_steps(rows, 20, 256) for rows in (20, 100, 500, 100_000, 10_000_000)]
    [100, 400, 1000, 1953, 10000]
    """
    least = min(1000, max(100, 4 * rows))
    return max(least, min(10_000, 5 * rows // batch_size), 2 * columns)


def count_to_keep(keep: Any, columns: int) -> int:
    """Return K for ``keep``, a number of columns or a share of them.

    >>> count_to_keep(3, 10), count_to_keep(0.25, 10), count_to_keep(0.01, 10)
    (3, 2, 1)
    """
    if isinstance(keep, Real) and not isinstance(keep, Integral):
        if not 0 < float(keep) <= 1:
            raise InputError(f"keep as a share must be in (0, 1], found {keep!r}; a whole number counts columns")
        return max(1, int(float(keep) * columns))
    count = whole("keep", keep, 1)
    if count > columns:
        raise InputError(f"keep={count}, but X has only {columns} column(s); keep at most {columns}")
    return count


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``, or say what was found."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, found {value!r}")
    return int(value)


def _number(name: str, value: Any, above: bool) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise InputError(f"{name} must be a number {'above 0' if above else '>= 0'}, found {value!r}")
    return number


def _widths(hidden: Any) -> tuple[int, ...]:
    if isinstance(hidden, str) or not hasattr(hidden, "__iter__"):
        raise InputError(f"hidden must be a sequence of widths such as (64, 32), found {hidden!r}")
    return tuple(whole("a width in hidden", each, 1) for each in hidden)


def _names(must_keep: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns to keep in any case, given by name or by number."""
    if isinstance(must_keep, str) or not hasattr(must_keep, "__iter__"):
        raise InputError(f"must_keep must be a list of columns, found {must_keep!r}")
    found = []
    for each in must_keep:
        if isinstance(each, Integral) and not isinstance(each, bool) and 0 <= int(each) < len(names):
            found.append(names[int(each)])
        elif each in names:
            found.append(each)
        else:
            raise FieldError(f"must_keep names {each!r}, but X has no such column; it has {', '.join(names[:20])}")
    return tuple(dict.fromkeys(found))


Floats = NDArray[np.float64]
# The share of the rows that the gates learn from.
GATE_FRACTION = 1 / 3
# How often the history is written.
RECORDS = 50
# When gates die in these short searches over few columns, and when the dead set is frozen: early.
CONTROL = {**STEEP, "end": 0.55, "freeze": 0.55, "hurry": 0.7}


class WeightedRows:
    """Some of the rows, drawn in batches, and the loss of a batch."""

    def __init__(
        self, data: EncodedTable, target: Tensor, task: Task, weight: Floats, size: int, seed: int
    ) -> None:
        self.data, self.target = data, target
        losses: dict[str, Callable[..., Tensor]] = {
            "binary": functional.binary_cross_entropy_with_logits,
            "multiclass": functional.cross_entropy,
            "regression": functional.mse_loss,
        }
        self.loss = losses[task]
        self.sampler = WeightedSampler(weight, size, seed)
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


def split_rows(
    data: EncodedTable, y: Floats, weight: Floats, task: Task, batch_size: int, seed: int
) -> tuple[WeightedRows, WeightedRows]:
    """Return the rows for the weights of the net and those for the gates; neither is empty."""
    numbers = torch.from_numpy(standardised(y, weight) if task == "regression" else y)
    target = numbers.long() if task == "multiclass" else numbers.float()
    cut = min(len(y) - 1, max(1, round(len(y) * (1 - GATE_FRACTION))))
    first, last = slice(None, cut), slice(cut, None)
    return (
        WeightedRows(data[first], target[first], task, weight[first], batch_size, seed),
        WeightedRows(data[last], target[last], task, weight[last], batch_size, seed + 1),
    )


def search(
    data: EncodedTable,
    y: Floats,
    weight: Floats,
    task: Task,
    outputs: int,
    names: Sequence[str],
    how: SelectorSettings,
) -> Selection:
    """Return which K columns stay; the gates of the others are exactly 0.0."""
    net = Net(data.numbers.shape[1], data.sizes, how.hidden, outputs, torch.Generator().manual_seed(how.seed))
    own, held = split_rows(data, y, weight, task, how.batch_size, how.seed)
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
    control = Keep(how.keep, **CONTROL)
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
