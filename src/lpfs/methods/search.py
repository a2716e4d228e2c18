"""search: train a model and its gates together, and say which fields it needs.

selection = lpfs.search(model, days.stream(512), keep=20)
selection = lpfs.absorb(model)                     # the gates go into the weights
smaller = lpfs.prune(model, selection, batch=batch)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.gates.module import NAME as GATES
from lpfs.methods.costs import Costs
from lpfs.methods.registry import entry_of, method_named
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import broadcast_model
from lpfs.train.step import make_optimizer


def search(
    model: nn.Module,
    stream: Iterable[Batch],
    method: str = "lpfs++",
    *,
    keep: int | None = None,
    penalty: float | None = None,
    budget: float | None = None,
    max_auc_loss: float | None = None,
    must_keep: Sequence[str] = (),
    costs: Costs | Mapping[str, float] | None = None,
    valid: Iterable[Batch] | None = None,
    held: Iterable[Batch] | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    steps: int | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    config: Training | None = None,
    **options: Any,
) -> Selection:
    """Search for the fields that a model needs; model and gates are trained together, in place.

    The gates stay on the model: ``absorb`` and ``prune`` come next.

    Args:
        model: one of ``lpfs.models``, or a model of yours with gates on it (``lpfs.attach``).
        stream: batches of the search period; gone through again and again until the steps are done.
        method: a name out of ``lpfs methods``.
        keep, penalty, budget, max_auc_loss: what you want, in one way; see :class:`Wish`.
        must_keep: fields that stay in any case.
        costs: what each field costs.
        valid: held-out batches, for ``max_auc_loss`` and for methods that choose on them.
        held: batches of rows that are not in ``stream``: gates learn from these alone. For a table that is gone
            through again and again, whose rows the weights learn by heart.
        optimizer: the model's, with its state, where it was trained before; or a name.
        steps: how long; by default once through the stream, 1,000 steps at least.
        seed: of what is drawn.
        folder: where logs and checkpoints go.
        resume: go on from the newest checkpoint in it.
        config: settings of the loop.
        options: settings of the method.

    """
    if costs is not None and not isinstance(costs, Costs):
        costs = Costs(dict(costs))
    if costs is not None and isinstance(model, Model):
        fields = model.fields_of_parts()
        costs = costs.of_parts({name: fields[name] for name in model.names})
    wish = Wish(keep, penalty, budget, max_auc_loss, tuple(must_keep), costs)
    if steps is None:
        own = getattr(model, GATES, None)
        steps = own.steps if own is not None else max(1000, len(stream) if isinstance(stream, Sized) else 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be a whole number >= 1, found {steps!r}")
    config = config or Training()
    if not isinstance(optimizer, torch.optim.Optimizer):
        config = config if optimizer is None else replace(config, optimizer=optimizer)  # type: ignore[arg-type]
        gates = getattr(model, GATES, None)
        parameters = model.parameters() if gates is None else gates.model_parameters()
        optimizer = make_optimizer(config, parameters)
    place = None if folder is None else Path(folder)
    task = Task(model, optimizer, stream, valid, wish, steps, seed, place, resume, config, options, held)
    ranks = current_group()
    if not ranks.is_distributed or entry_of(method).shared:
        return method_named(method)(task)
    # methods that rank a sample, or draw in every step, search as they do in one process: on rank 0
    found = ranks.run_on_leader(lambda: method_named(method)(task).to_json(), f"searching with {method}")
    broadcast_model(model, optimizer)
    return Selection.from_json(found)
