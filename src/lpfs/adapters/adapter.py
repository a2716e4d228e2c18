"""Adapter: what lpfs has to know of a model that somebody else wrote, and the verbs that use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.leak import Where
from lpfs.gates.module import NAME, Gates
from lpfs.gates.prune import Pruned, prune
from lpfs.gates.sites import SiteLike
from lpfs.schema import Selection


class Adapter(ABC):
    """Knows one family of models: where fields enter, where their raw values are, what a smaller model is.

    A subclass has ``sites`` and ``inputs_of_fields``, and, where it can build a smaller model, the methods
    ``smaller(model, kept, cut)`` and ``narrow(model, batch, smaller)`` of
    :class:`~lpfs.gates.rebuild.Rebuilds`; without them ``prune`` puts zeros where dropped modules were. It holds
    settings alone and no model: one adapter serves the model before and after.

    Attributes:
        probabilities: whether the model returns probabilities and not logits.

    """

    probabilities = False

    @abstractmethod
    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return field -> every place where it enters the model, linear and wide parts included."""

    @abstractmethod
    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return field -> where its raw value is in a batch, for the leak check."""

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch: ``model(*batch)`` for a tuple or a list, else ``model(batch)``."""
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean binary cross entropy of what the model gives against labels."""
        if self.probabilities:
            return binary_cross_entropy(output.reshape(labels.shape), labels)
        return binary_cross_entropy_with_logits(output.reshape(labels.shape), labels)

    def penalty(self, model: nn.Module, rows: int) -> Tensor | float:
        """Return what a search adds to the mean loss over so many rows: nothing, unless a library does so."""
        return 0.0

    # ---------------------------------------------------------------------------------------- verbs

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        """Put gates on all fields of the model, or those named, in place; its predictions stay bit-identical.

        ``settings`` are those of :func:`lpfs.attach`.
        """
        found = self.sites(model)
        if fields is not None:
            unknown = [name for name in fields if name not in found]
            if unknown:
                raise InputError(f"the model has no field {unknown[0]!r}; its fields are {list(found)}")
            found = {name: found[name] for name in fields}
        return attach(model, {name: at[0] if len(at) == 1 else at for name, at in found.items()}, **settings)

    def search(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Any, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        keep: int | None = None,
        penalty: float | None = None,
        must_keep: Sequence[str] = (),
        **settings: Any,
    ) -> Selection:
        """Train the model and its gates together, in place, and return which fields it needs.

        Args:
            model: with gates on it, or without: then they are put on.
            batches: (inputs, labels), one a step, ``steps`` of them at least.
            optimizer: the model's own; gates are never in it.
            steps: how long.
            keep, penalty, must_keep: what is wished for (see :meth:`Gates.optimizer`).
            settings: of :func:`lpfs.attach`, where gates are put on here.

        """
        gates = getattr(model, NAME, None)
        if gates is None:
            gates = self.attach(model, steps=steps, **settings)
        elif settings or gates.steps != steps:
            raise InputError(
                f"the model has gates for a search of {gates.steps} steps already, with settings of their own; "
                f"found steps={steps} and {sorted(settings)}. Give these to attach, and the same steps here"
            )
        prox = gates.optimizer(keep=keep, penalty=penalty, must_keep=must_keep)
        taken = 0
        for batch, labels in islice(batches, steps):
            optimizer.zero_grad()
            prox.zero_grad()
            (self.loss(self.call(model, batch), labels) + self.penalty(model, len(labels))).backward()
            optimizer.step()
            prox.step()
            gates.step()
            taken += 1
        if taken < steps:
            raise InputError(f"there were {taken} batches for a search of {steps} steps; give as many as steps")
        found: Selection = gates.selection(steps=steps)
        return found

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Selection:
        """Move the gates into the weights, in place, all or nothing (see :func:`lpfs.absorb`)."""
        return absorb(model, optimizer, call=self.call, **settings)

    def prune(
        self,
        model: nn.Module,
        selection: Selection,
        *,
        batch: Any = None,
        optimizer: Any = None,
        cut: bool = False,
    ) -> Pruned:
        """Return the physically smaller model with its certificate (see :func:`lpfs.prune`)."""
        known = self.inputs_of_fields(model)
        return prune(
            model, selection, batch=batch, inputs=known, optimizer=optimizer, cut=cut, call=self.call, by=self
        )
