"""Captured: the parts of a model as its rest reads them, and the gradient of each row's own loss by them.

A part is taken where its gate would sit: what a field adds past the dense layers (a wide weight) counts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.gates.sites import Place, find_places
from lpfs.methods.task import Task
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.train.evaluate import device_of, eval_mode, on_device, predict_batch
from lpfs.train.step import bce_loss

Stacks: TypeAlias = dict[str, Tensor]  # path of a module -> something of all its parts (B, slots, D)


class Captured:
    """Catches the parts of a model in every forward pass, as leaves: no gradient goes on to the tables.

    Args:
        model: to look at; it is in evaluation mode within :meth:`watching`, and afterwards as it was.

    """

    def __init__(self, model: Model) -> None:
        self.model = model
        places = find_places(model, dict(model.sites()))
        self.slots = {name: _slot(model, places[name][0]) for name in model.names}
        self.caught: Stacks = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this block the parts are caught; then no hook is left."""
        paths = dict.fromkeys(path for path, _ in self.slots.values())
        hooks = [self.model.get_submodule(path).register_forward_hook(_Catch(self, path)) for path in paths]
        try:
            with eval_mode(self.model):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.caught.clear()

    def values(self, batch: Batch) -> Stacks:
        """Return the parts of a batch, wide weights and all."""
        with torch.no_grad():
            self.model(on_device(batch, device_of(self.model)))
        return self._stacked(self.caught)

    def gradients(self, task: Task, batch: Batch) -> tuple[Stacks, Stacks]:
        """Return the parts of a batch, and the gradient of each row's own loss by them."""
        batch = on_device(batch, device_of(self.model))
        logits, labels = predict_batch(self.model, batch)
        total = bce_loss(logits, labels, task.training.task_weights) * len(batch)  # a sum: rows stay apart
        slopes = torch.autograd.grad(total, list(self.caught.values()))
        values = {path: each.detach() for path, each in self.caught.items()}
        return self._stacked(values), self._stacked(dict(zip(self.caught, slopes, strict=True)))

    def _stacked(self, outputs: Stacks) -> Stacks:
        """Return outputs as (B, slots, D): crosses come side by side, and others behind them."""
        found = {}
        for path, each in outputs.items():
            module = self.model.get_submodule(path)
            if isinstance(module, Crosses):
                each = each[:, : module.slots * module.dim].unflatten(1, (module.slots, module.dim))
            found[path] = each
        return found

    def by_name(self, found: Stacks) -> dict[str, float]:
        """Return of one number for every slot, (slots,) for each module, that of every part."""
        listed = {path: each.tolist() for path, each in found.items()}
        return {name: listed[path][slot] for name, (path, slot) in self.slots.items()}


class _Catch:
    """Puts a leaf with the same values in place of a module's output, and remembers it."""

    def __init__(self, owner: Captured, path: str) -> None:
        self.owner, self.path = owner, path

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.owner.caught[self.path] = leaf = output.detach().requires_grad_(torch.is_grad_enabled())
        return leaf


def _slot(model: Model, place: Place) -> tuple[str, int]:
    """Return the module that a part comes from, and its number in what that gives."""
    module = model.get_submodule(place.module)
    assert place.start is not None  # our models number their parts
    if isinstance(module, Crosses):
        return place.module, module.plan.places[place.start]
    filled = getattr(module, "filled", None)
    return place.module, place.start if filled is None else int(filled[place.start])
