"""Adapter: the description of a family of third-party models that lpfs needs to gate, search and prune them.

``RebuildingAdapter`` serves libraries whose constructors can build the model again with fewer fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from lpfs._validation import check_name
from lpfs.errors import AbsenceError, InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.module import ATTRIBUTE, Gates
from lpfs.gates.prune import Pruned, prune
from lpfs.gates.sites import SiteLike
from lpfs.gates.verification import InputPath
from lpfs.schema import Selection


class Adapter(ABC):
    """Describe one family of models: where fields enter, where their raw values are, how to build a smaller model.

    A subclass defines ``sites`` and ``inputs_of_fields`` and, if it can build a smaller model, the methods
    ``smaller(model, kept, cut)`` and ``narrow(model, batch, smaller)`` of
    :class:`~lpfs.gates.rebuild.Rebuilds`; without them ``prune`` replaces dropped modules by zeros. An adapter
    stores settings only and no model, so that one adapter serves the model before and after pruning.

    Attributes:
        probabilities: whether the model returns probabilities instead of logits.
    """

    probabilities = False

    @abstractmethod
    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return field -> every site where it enters the model, linear and wide parts included."""

    @abstractmethod
    def inputs_of_fields(self, model: nn.Module) -> dict[str, InputPath]:
        """Return field -> where its raw value is in a batch, for the leak check."""

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch: ``model(*batch)`` for a tuple or a list, else ``model(batch)``."""
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean binary cross entropy of the model's output."""
        cross_entropy = binary_cross_entropy if self.probabilities else binary_cross_entropy_with_logits
        return cross_entropy(output.reshape(labels.shape), labels)

    def penalty(self, model: nn.Module, rows: int) -> Tensor | float:
        """Return the regularization that a search adds to the mean loss over ``rows`` rows; 0 by default."""
        return 0.0

    def update_weights(self, model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
        """Take a step of the optimizer, after the backward pass of the mean loss over ``rows`` rows."""
        optimizer.step()

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        """Attach gates to all fields of the model, or to ``fields``, in place; predictions stay bit-identical.

        ``settings`` are keywords of :func:`lpfs.attach`.
        """
        sites = self.sites(model)
        if fields is not None:
            for name in fields:
                check_name(name, sites, "field")
            sites = {name: sites[name] for name in fields}
        return attach(model, {name: at[0] if len(at) == 1 else at for name, at in sites.items()}, **settings)

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
        """Train the model and its gates together, in place, and return the fields to keep.

        Args:
            model: a model with gates, or without: then gates are attached.
            batches: (inputs, labels) per step, at least ``steps`` of them.
            optimizer: optimizer of the model weights; it must not contain gates.
            steps: number of steps.
            keep, penalty, must_keep: the selection target (see :meth:`Gates.optimizer`).
            settings: keywords of :func:`lpfs.attach`, if gates are attached here.
        """
        gates: Gates | None = getattr(model, ATTRIBUTE, None)
        if gates is None:
            gates = self.attach(model, steps=steps, **settings)
        elif settings or gates.steps != steps:
            raise InputError(
                f"the model has gates already, attached for {gates.steps} steps; found steps={steps} and settings "
                f"{sorted(settings)}. Give these to attach, and the same steps here"
            )
        prox = gates.optimizer(keep=keep, penalty=penalty, must_keep=must_keep)
        steps_done = 0
        for batch, labels in islice(batches, steps):
            optimizer.zero_grad()
            prox.zero_grad()
            (self.loss(self.call(model, batch), labels) + self.penalty(model, len(labels))).backward()
            prox.step()  # first, because it checks its gradient
            self.update_weights(model, optimizer, len(labels))
            gates.step()
            steps_done += 1
        if steps_done < steps:
            raise InputError(f"found {steps_done} batches for a search of {steps} steps; give one batch per step")
        return gates.selection(steps=steps)

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Selection:
        """Fold the gates into the weights, in place, all or nothing (see :func:`lpfs.absorb`)."""
        return absorb(model, optimizer, call=self.call, **settings)

    def prune(
        self, model: nn.Module, selection: Selection, *, batch: Any = None, optimizer: Any = None, cut: bool = False
    ) -> Pruned:
        """Return the smaller model with its certificate (see :func:`lpfs.prune`)."""
        inputs, call = self.inputs_of_fields(model), self.call
        return prune(model, selection, batch=batch, inputs=inputs, optimizer=optimizer, cut=cut, call=call, by=self)


@dataclass(frozen=True)
class FieldLayout:
    """The order of the fields in the model's inner tensors: which indices of a weight belong to which field.

    Args:
        widths: field -> number of its columns in the concatenation (B, W), in the order of the columns.
        tokens: the fields of the stack (B, F, D), in order; () if the model has no such stack.

    >>> layout = FieldLayout({"user": 2, "item": 2, "price": 1}, ("user", "item"))
    >>> layout.kept_indices(8, 6, ["item", "price"])  # W = 5 columns, followed by 3 others
    tensor([2, 3, 4, 5, 6, 7])
    >>> layout.kept_indices(6, 3, ["item", "price"])  # 3 entries per token
    tensor([3, 4, 5])
    """

    widths: dict[str, int]
    tokens: tuple[str, ...]

    def positions(self, kept: Collection[str]) -> Tensor:
        """Return the positions of the kept fields in the stack."""
        return _positions(self.tokens, kept)

    def kept_indices(self, before: int, after: int, kept: Collection[str]) -> Tensor | None:
        """Return the kept indices of a dimension that shrinks from ``before`` to ``after``; None if unknown.

        The dimension is the concatenation, possibly followed by other entries, or a multiple of the tokens.
        """
        owners = [name for name, width in self.widths.items() for _ in range(width)]
        columns = _positions(owners, kept)
        if before >= len(owners) and before - after == len(owners) - len(columns):
            return torch.cat([columns, torch.arange(len(owners), before)])
        positions, count = self.positions(kept), len(self.tokens)
        if count and before % count == 0 and before // count * len(positions) == after:
            width = before // count
            return (positions[:, None] * width + torch.arange(width)).flatten()
        return None


def _positions(names: Sequence[str], kept: Collection[str]) -> Tensor:
    return torch.tensor([position for position, name in enumerate(names) if name in kept], dtype=torch.long)


class RebuildingAdapter(Adapter):
    """An adapter of a library whose models own their optimizer and end in a sigmoid per task.

    The library's own constructor builds the smaller model from the description of the kept fields. The two shapes
    of each weight determine which of its entries are copied; the comparison of the logits verifies it.

    Args:
        make: function that builds your model from the description of fewer fields; needed by ``prune(cut=True)``.
        untie: if fields share a table, give each its own module when gates are attached, and its own copy of the
            table when they are absorbed; without it, shared tables raise an error.
    """

    optimizer_attribute: str  # attribute of a model that is its optimizer
    activation_attribute: str  # attribute that is the final activation, or the nn.ModuleList of one per task
    make_example: str  # example of make=, for the error message

    def __init__(self, make: Callable[..., nn.Module] | None = None, *, untie: bool = False) -> None:
        self.make, self.untie = make, untie

    def activations(self, model: nn.Module) -> list[nn.Module]:
        """Return the final modules that turn logits into predictions, one per task."""
        activation = getattr(model, self.activation_attribute, None)
        if isinstance(activation, nn.ModuleList):
            return list(activation)
        return [] if activation is None else [activation]

    def logits(self, activation: nn.Module, value: Tensor) -> Tensor:
        """Return the logits (B, 1) for the input of a final activation."""
        return value

    @abstractmethod
    def layout(self, model: nn.Module) -> FieldLayout:
        """Return the order of the fields in the model's inner tensors."""

    @abstractmethod
    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return an uninitialized model, built by ``make`` from the kept fields."""

    def kept_indices(
        self, model: nn.Module, path: str, dim: int, before: int, after: int, kept: Collection[str]
    ) -> Tensor | None:
        """Return the kept indices of one dimension of a parameter; None if unknown."""
        return self.layout(model).kept_indices(before, after, kept)

    def loss_mismatch(self, model: nn.Module) -> str | None:
        """Return why the loss of this model is not the cross entropy of its logits; None if it is."""
        return None

    def finalize(self, smaller: nn.Module) -> None:
        """Remove references of a copied model to dropped fields, in place."""

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Run the model and return its logits (B, T): after a sigmoid, rounding would hide small changes."""
        activations = self.activations(model)
        recorded: dict[nn.Module, list[Tensor]] = {activation: [] for activation in activations}

        def record(activation: nn.Module, args: Any) -> None:
            recorded[activation].append(args[0].clone())  # some layers add their bias in place

        handles = [activation.register_forward_pre_hook(record) for activation in recorded]
        try:
            model(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not activations or not all(recorded.values()):
            raise InputError(
                f"{type(model).__name__} does not run a final activation, so its logits are unknown; write a "
                f"subclass of {type(self).__name__} whose call(model, batch) returns them"
            )
        logits = [self.logits(activation, value) for activation in activations for value in recorded[activation]]
        return torch.cat([value.reshape(len(value), -1) for value in logits], dim=1)

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean binary cross entropy of logits (B, T) against labels (B,) or (B, T)."""
        target = labels[:, None] if labels.ndim == 1 else labels
        if output.shape != target.shape:
            raise InputError(
                f"the model's logits have shape {tuple(output.shape)}, the labels {tuple(labels.shape)}; give one "
                "label per task"
            )
        return super().loss(output, target)

    def search(
        self, model: nn.Module, batches: Iterable[tuple[Any, Tensor]], optimizer: torch.optim.Optimizer, **settings: Any
    ) -> Selection:
        reason = self.loss_mismatch(model)
        if reason is not None and type(self).loss is RebuildingAdapter.loss:
            raise InputError(
                f"{type(model).__name__}: {reason}, so its loss is not the cross entropy of its logits; write a "
                f"subclass of {type(self).__name__} with loss(logits, labels)"
            )
        return super().search(model, batches, optimizer, **settings)

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Selection:
        """Fold the gates into the weights and the model's own optimizer, in place, all or nothing."""
        optimizer = self._model_optimizer(model) if optimizer is None else optimizer
        return super().absorb(model, optimizer, **{"untie": self.untie, **settings})

    def prune(
        self, model: nn.Module, selection: Selection, *, batch: Any = None, optimizer: Any = None, cut: bool = False
    ) -> Pruned:
        """Return the smaller model with its certificate; the model's own optimizer is transferred.

        Without ``cut``, dropped tables are replaced by zeros, and the model takes the same batches. With it, the
        model is built again from the kept fields, and takes ``narrow(model, batch, smaller)``.
        """
        if cut and self.make is None:
            raise InputError(f"cut=True builds the model again; give make=, as in {self.make_example}")
        optimizer = self._model_optimizer(model) if optimizer is None else optimizer
        inputs, call, by = self.inputs_in_batch(model, batch), self.call, self if cut else None
        pruned = prune(model, selection, batch=batch, inputs=inputs, optimizer=optimizer, cut=cut, call=call, by=by)
        transferred = pruned.optimizer if isinstance(pruned.optimizer, torch.optim.Optimizer) else None
        if hasattr(pruned.model, self.optimizer_attribute) and not (cut and transferred is None):
            setattr(pruned.model, self.optimizer_attribute, transferred)
        self.finalize(pruned.model)
        return pruned

    def inputs_in_batch(self, model: nn.Module, batch: Any) -> Mapping[str, InputPath]:
        """Return field -> where its raw value is in this batch."""
        return self.inputs_of_fields(model)

    def smaller(
        self, model: nn.Module, kept: Sequence[str], cut: bool
    ) -> tuple[nn.Module, dict[str, dict[int, Tensor]]]:
        """Return the model built again, and the kept indices of each parameter of the old one."""
        with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
            smaller = self.build_model(model, kept)
        before = dict(model.named_parameters(remove_duplicate=False))
        indices: dict[str, dict[int, Tensor]] = {}
        for path, weight in smaller.named_parameters(remove_duplicate=False):
            old = before.get(path)
            if old is None or old.ndim != weight.ndim:
                raise AbsenceError(
                    f"columns cannot be removed: built again, the model has a parameter {path!r} of shape "
                    f"{tuple(weight.shape)} that this one has not; check that make= uses the same settings"
                )
            indices[path] = {}
            for dim, (size, new_size) in enumerate(zip(old.shape, weight.shape, strict=True)):
                if size == new_size:
                    continue
                index = self.kept_indices(model, path, dim, size, new_size, kept)
                if index is None:
                    raise AbsenceError(
                        f"columns cannot be removed: it is not known which numbers of {path!r} belong to "
                        f"which field (shape {tuple(old.shape)}, after pruning {tuple(weight.shape)})"
                    )
                indices[path][dim] = index.to(old.device)
        return smaller, indices

    def _model_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        optimizer = getattr(model, self.optimizer_attribute, None)
        return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
