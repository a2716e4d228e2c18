"""search: train a model and its gates together, and return the fields that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs._validation import check_int
from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.gates.module import ATTRIBUTE as GATES
from lpfs.methods.base import Method, SearchTask, restore_position
from lpfs.methods.registry import make_method
from lpfs.methods.target import Costs, SelectionTarget
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.checkpoint import Resumable
from lpfs.train.config import Training
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import broadcast_model
from lpfs.train.step import make_optimizer

MIN_STEPS = 1000  # steps of a search that gives no number of steps, at least


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
    holdout: Iterable[Batch] | None = None,
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
        model: one of ``lpfs.models``, or your own model with gates on it (``lpfs.attach``).
        stream: batches (``lpfs.Batch``) of the search rows; repeated until the steps are done.
        method: a name from ``lpfs methods``.
        keep, penalty, budget, max_auc_loss: the target, at most one; see :class:`SelectionTarget`.
        must_keep: fields that are always kept.
        costs: cost of each field.
        valid: validation batches, for ``max_auc_loss`` and for methods that choose on them.
        holdout: batches of rows that are not in ``stream``: gates are trained on these only. For a table whose
            rows repeat, which the weights memorize.
        optimizer: the model's optimizer with its state, if the model was trained before; or a name.
        steps: number of steps; by default one pass over the stream, at least 1,000.
        seed: seed of everything random.
        folder: directory of logs and checkpoints.
        resume: continue from the newest checkpoint there.
        config: settings of the training loop.
        options: options of the method.
    """
    chosen = make_method(method, options)
    stream = _check_batches("stream", stream)
    valid = None if valid is None else _check_batches("valid", valid)
    holdout = None if holdout is None else _check_batches("holdout", holdout)
    if costs is not None and not isinstance(costs, Costs):
        costs = Costs(dict(costs))
    target = SelectionTarget(keep, penalty, budget, max_auc_loss, tuple(must_keep), costs)
    gates = getattr(model, GATES, None)
    if isinstance(model, Model):
        target = target.for_model(model)
    if steps is None:
        steps = max(MIN_STEPS, len(stream) if isinstance(stream, Sized) else 0) if gates is None else gates.steps
    steps = check_int("steps", steps, 1)
    config = config or Training()
    if not isinstance(optimizer, torch.optim.Optimizer):
        config = config if optimizer is None else replace(config, optimizer=optimizer)  # type: ignore[arg-type]
        parameters = model.parameters() if gates is None else gates.model_parameters()
        optimizer = make_optimizer(config, parameters)
    path = None if folder is None else Path(folder)
    task = SearchTask(model, optimizer, stream, valid, target, steps, seed, path, resume, config, holdout)
    return run_search(chosen, task)


def _check_batches(name: str, stream: Iterable[Batch]) -> Iterable[Batch]:
    """Return the stream with all its batches; raise InputError if the first one is no Batch."""
    if isinstance(stream, Stream):
        return stream
    with torch.random.fork_rng(devices=[]), restore_position(stream):  # a DataLoader draws a seed
        iterator = iter(stream)
        first = list(islice(iterator, 1))
    if first and not isinstance(first[0], Batch):
        raise InputError(
            f"{name}: lpfs.search needs batches of type lpfs.Batch, found {type(first[0]).__name__}. For batches of "
            "your own, attach gates and train with `with gates.search(optimizer, keep=…) as step:`, or, if they are "
            "(inputs, labels), call lpfs.adapters.plain.Plain(…).search(model, batches, optimizer, steps=…, keep=…)"
        )
    return chain(first, iterator) if iterator is stream and not isinstance(stream, Resumable) else stream


def run_search(method: Method, task: SearchTask) -> Selection:
    """Run a method; return its selection.

    With several processes, a method that is not ``distributed`` (it ranks a sample, or draws random numbers in
    every step) searches on rank 0 alone, and the other ranks receive the model and the selection.
    """
    ranks = current_group()
    if not ranks.is_distributed or method.distributed:
        return method.search(task)
    values = ranks.run_on_leader(lambda: method.search(task).to_json(), f"searching with {method.name}")
    broadcast_model(task.model, task.optimizer)
    return Selection.from_json(values)
