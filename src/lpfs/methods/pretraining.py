"""Pretraining of a network of a method's own: rows and steps of the shared model, at the learning rate of the search.

On small tables that rate is three times the usual one. FairFS, for example, selects worse fields at the usual rate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lpfs.methods.base import SearchCost, SearchTask, require_model
from lpfs.models.base import Model
from lpfs.train.callbacks import Callback
from lpfs.train.evaluate import device_of
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

EVALUATIONS = 20  # of a pretraining, whose best state is kept


def new_model(task: SearchTask, method: str) -> Model:
    """Return an untrained model like that of a task, with the weights that belong to its seed."""
    model = require_model(task.model, method)
    torch.manual_seed(task.seed)
    return model.untrained().to(device_of(model))


def pretrain(task: SearchTask, net: nn.Module, name: str, cost: SearchCost, *callbacks: Callback) -> Any:
    """Train a network on the rows of pretraining, in place, and return its optimizer.

    The state with the best validation AUC is kept; the cost is that of the search. ``name`` is the folder of the
    checkpoints in that of the search.
    """
    assert task.early is not None
    rate = max(group["lr"] for group in task.optimizer.param_groups)
    optimizer = make_optimizer(replace(task.training, lr=float(rate)), net.parameters())
    steps = max(1, task.early_steps)
    keep: dict[str, Any] = (
        {} if task.valid is None else {"keep": "best", "evaluate_every": max(1, steps // EVALUATIONS)}
    )
    config = replace(task.training, steps=steps, epochs=None, keep_optimizer="last", **keep)
    folder = None if task.folder is None else task.folder / name
    fit(
        net,
        task.early,
        optimizer,
        valid=task.valid,
        folder=folder,
        resume=task.resume,
        callbacks=[cost, *callbacks],
        config=config,
    )
    return optimizer
