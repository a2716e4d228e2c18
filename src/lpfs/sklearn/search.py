"""The search of PolarizingSelector: its settings, its network, and the training with gates.

A click log is seen once, so a gate is trained on how its column predicts new rows. A table is seen many times, and
the network memorizes its rows, best by the columns with the most values. The rows are therefore split: the network
weights are trained on two thirds of them, the gates on the rest, which the weights never see.
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
from lpfs._validation import check_int
from lpfs.errors import FieldError, InputError
from lpfs.gates.controller import FAST_DESCENT, Keep
from lpfs.schema import Selection
from lpfs.sklearn.tables import EncodedTable, Floats, TaskName, standardize

METHODS = ("lpfs++", "lpfs")
DIM = 8  # width of the embedding of a column
GATE_FRACTION = 1 / 3  # fraction of the rows that the gates are trained on
HISTORY_RECORDS = 50  # records in the history of a search
LOSSES: dict[TaskName, Callable[..., Tensor]] = {
    "binary": functional.binary_cross_entropy_with_logits,
    "multiclass": functional.cross_entropy,
    "regression": functional.mse_loss,
}
# These searches are short and have few columns: gates become zero early, and the zero set is frozen early.
CONTROL = {**FAST_DESCENT, "end": 0.55, "freeze": 0.55, "hurry": 0.7}


@dataclass(frozen=True)
class SelectorSettings:
    """The selector's arguments, checked and resolved for a table."""

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


def resolve_settings(selector: Any, rows: int, names: Sequence[str], random_state: Any) -> SelectorSettings:
    """Return the settings for a table of this size; raise InputError for invalid arguments."""
    columns = len(names)
    if selector.method not in METHODS:
        raise InputError(f"method must be one of {', '.join(map(repr, METHODS))}, found {selector.method!r}")
    batch_size, steps = check_int("batch_size", selector.batch_size, 1), selector.steps
    steps = default_steps(rows, columns, batch_size) if steps is None else check_int("steps", steps, 1)
    return SelectorSettings(
        keep=count_to_keep(selector.keep, columns),
        method=selector.method,
        steps=steps,
        pretrain=steps // 2 if selector.pretrain is None else check_int("pretrain", selector.pretrain, 0),
        batch_size=batch_size,
        hidden=_check_widths(selector.hidden),
        lr=_check_number("lr", selector.lr, positive=True),
        weight_decay=_check_number("weight_decay", selector.weight_decay, positive=False),
        must_keep=_resolve_columns(selector.must_keep, names),
        seed=int(random_state.randint(2**31 - 1)),
        verbose=check_int("verbose", selector.verbose, 0),
    )


def default_steps(rows: int, columns: int, batch_size: int) -> int:
    """Return the default number of search steps: five passes over the data, within limits.

    At least 1,000 steps from 250 rows on, fewer for smaller tables, at most 10,000; at least 2 per column.

    >>> [default_steps(rows, 20, 256) for rows in (20, 100, 500, 100_000, 10_000_000)]
    [100, 400, 1000, 1953, 10000]
    """
    return max(min(1000, max(100, 4 * rows)), min(10_000, 5 * rows // batch_size), 2 * columns)


def count_to_keep(keep: Any, columns: int) -> int:
    """Return K for ``keep``, a number of columns or a fraction of them.

    >>> count_to_keep(3, 10), count_to_keep(0.25, 10), count_to_keep(0.01, 10)
    (3, 2, 1)
    """
    if isinstance(keep, Real) and not isinstance(keep, Integral):
        if not 0 < float(keep) <= 1:
            raise InputError(f"keep as a fraction must be in (0, 1], found {keep!r}; an integer counts columns")
        return max(1, int(float(keep) * columns))
    count = check_int("keep", keep, 1)
    if count > columns:
        raise InputError(f"keep={count}, but X has only {columns} column(s); keep at most {columns}")
    return count


def _check_number(name: str, value: Any, positive: bool) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise InputError(f"{name} must be a number {'above 0' if positive else '>= 0'}, found {value!r}")
    return number


def _check_widths(hidden: Any) -> tuple[int, ...]:
    if isinstance(hidden, str) or not hasattr(hidden, "__iter__"):
        raise InputError(f"hidden must be a sequence of widths such as (64, 32), found {hidden!r}")
    return tuple(check_int("a width in hidden", width, 1) for width in hidden)


def _resolve_columns(must_keep: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns in ``must_keep``, which are given by name or by number."""
    if isinstance(must_keep, str) or not hasattr(must_keep, "__iter__"):
        raise InputError(f"must_keep must be a list of columns, found {must_keep!r}")
    resolved = []
    for column in must_keep:
        if isinstance(column, Integral) and not isinstance(column, bool) and 0 <= int(column) < len(names):
            resolved.append(names[int(column)])
        elif column in names:
            resolved.append(column)
        else:
            raise FieldError(f"must_keep names {column!r}, but X has no such column; it has {', '.join(names[:20])}")
    return tuple(dict.fromkeys(resolved))


class ColumnEmbeddings(nn.Module):
    """The embeddings of all columns, (B, N, D): numeric ones first, then categorical ones.

    A number v becomes v·w, or m where it is missing; an id becomes its row of a table. All weights are drawn from
    ``generator``, so that the global random state is not changed.
    """

    starts: Tensor

    def __init__(self, numeric: int, sizes: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, DIM, generator=generator) / math.sqrt(DIM))
        self.absent = nn.Parameter(torch.zeros(numeric, DIM))
        self.rows = skip_init(nn.Embedding, max(1, sum(sizes)), DIM)
        nn.init.normal_(self.rows.weight, std=1 / math.sqrt(DIM), generator=generator)
        starts = torch.tensor([0, *sizes[:-1]] if sizes else [], dtype=torch.int64)
        self.register_buffer("starts", starts.cumsum(0))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        """Return (B, N, D) for numbers (B, C), the missing mask (B, C) or (B, 0), and ids (B, M)."""
        parts = numbers[:, :, None] * self.weight  # (B, C, D)
        if missing.shape[1]:
            parts = parts + missing[:, :, None] * self.absent
        return torch.cat([parts, self.rows(ids + self.starts)], dim=1) if ids.shape[1] else parts


class ColumnMLP(nn.Module):
    """Concatenated column embeddings, then an MLP with ReLUs; returns logits (B, outputs)."""

    def __init__(
        self, numeric: int, sizes: Sequence[int], hidden: Sequence[int], outputs: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.columns = ColumnEmbeddings(numeric, sizes, generator)
        widths = [(numeric + len(sizes)) * DIM, *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (_linear(*pair, generator), nn.ReLU())]
        self.top = nn.Sequential(*layers, _linear(widths[-1], outputs, generator))

    def forward(self, numbers: Tensor, missing: Tensor, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.columns(numbers, missing, ids).flatten(1))
        return logits


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs)
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class WeightedRows:
    """Some of the rows, sampled in batches by their weights, and the loss of a batch.

    If there are at most ``batch_size`` rows, every batch is all rows.
    """

    def __init__(
        self, table: EncodedTable, target: Tensor, task: TaskName, weight: Floats, batch_size: int, seed: int
    ) -> None:
        self.table, self.target, self.loss, self.batch_size = table, target, LOSSES[task], batch_size
        self.cumulative, self.rng = np.cumsum(weight), np.random.default_rng(seed)
        # Sampling already accounts for the weights; they enter the loss only if a batch is all rows.
        is_small = len(weight) <= batch_size
        self.weight = torch.from_numpy(weight / weight.mean()).float() if is_small else None

    def next_loss(self, network: ColumnMLP) -> Tensor:
        """Return the mean loss over the next batch."""
        rows = torch.from_numpy(self._sample()) if self.weight is None else torch.arange(len(self.weight))
        logits = network(self.table.numbers[rows], self.table.missing[rows], self.table.ids[rows])
        if self.target.is_floating_point():
            logits = logits.squeeze(1)
        if self.weight is None:
            return self.loss(logits, self.target[rows])
        return (self.loss(logits, self.target[rows], reduction="none") * self.weight).mean()

    def _sample(self) -> NDArray[np.intp]:
        """Return the numbers of random rows (B,); the probability of a row is proportional to its weight."""
        points = self.rng.random(self.batch_size) * self.cumulative[-1]
        rows: NDArray[np.intp] = np.searchsorted(self.cumulative, points, side="right")
        return rows.clip(max=len(self.cumulative) - 1)


def search(
    table: EncodedTable, y: Floats, weight: Floats, task: TaskName, names: Sequence[str], settings: SelectorSettings
) -> Selection:
    """Train the network on all columns, then with gates; return the K kept columns. Other gates are exactly 0."""
    generator = torch.Generator().manual_seed(settings.seed)
    outputs = int(y.max()) + 1 if task == "multiclass" else 1
    network = ColumnMLP(table.numbers.shape[1], table.sizes, settings.hidden, outputs, generator)
    values = torch.from_numpy(standardize(y, weight) if task == "regression" else y)
    target = values.long() if task == "multiclass" else values.float()
    boundary = min(len(y) - 1, max(1, round(len(y) * (1 - GATE_FRACTION))))  # neither part is empty
    weight_rows, gate_rows = (
        WeightedRows(table[part], target[part], task, weight[part], settings.batch_size, settings.seed + number)
        for number, part in enumerate((slice(None, boundary), slice(boundary, None)))
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)

    def train_weights() -> None:
        optimizer.zero_grad()
        weight_rows.next_loss(network).backward()
        optimizer.step()

    for _ in range(settings.pretrain):
        train_weights()
    positions = {column: position for position, column in enumerate(table.order)}
    sites = {name: lpfs.Site(network.columns, index=positions[column]) for column, name in enumerate(names)}
    gates = lpfs.attach(network, sites, steps=settings.steps, gate=settings.method, seed=settings.seed)
    # The symmetric proximal step of the paper: the defaults here were tuned with it.
    control, history = Keep(settings.keep, **CONTROL), list[dict[str, Any]]()
    prox = gates.optimizer(keep=settings.keep, must_keep=settings.must_keep, prox="l1", control=control)
    for step in range(1, settings.steps + 1):
        train_weights()
        loss = gate_rows.next_loss(network)
        (gates.x.grad,) = torch.autograd.grad(loss, [gates.x])
        prox.step()
        gates.step()
        if step % max(1, settings.steps // HISTORY_RECORDS) == 0 or step == settings.steps:
            status, value = gates.status(), float(loss.detach())
            facts = {"alive": status.alive, "penalty": status.penalty, "epsilon": status.epsilon}
            history.append({"step": step, "loss": value, **facts})
            if settings.verbose > 1 or (settings.verbose and len(history) % 10 == 0):
                print(f"loss {value:.4f}, {status}")
    selection = gates.selection(task=task, pretrain=settings.pretrain, batch_size=settings.batch_size)
    return Selection(selection.kept, selection.dropped, selection.gates, {}, history, selection.made)
