"""Builds: an adapter of models that their constructor can make again, with fewer fields.

Adapter: what lpfs has to know of a model that somebody else wrote, and the verbs that use it.

Which numbers of a weight stay when fields leave, told by the shapes of the weight before and after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from lpfs.errors import AbsenceError, InputError
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


@dataclass(frozen=True)
class FieldLayout:
    """How the fields of a model stand beside each other.

    Args:
        widths: field -> how many columns it has in the concatenation (B, W), in the order of the columns.
        tokens: the fields of the stack (B, F, D), in order; [] where there is no such stack.

    >>> layout = Layout({"user": 2, "item": 2, "price": 1}, ("user", "item"))
    >>> layout.columns(["item", "price"])
    tensor([2, 3, 4])
    >>> layout.stays(8, 6, ["item", "price"])  # W = 5 columns and 3 others behind them
    tensor([2, 3, 4, 5, 6, 7])
    >>> layout.stays(6, 3, ["item", "price"])  # 3 numbers a token
    tensor([3, 4, 5])

    """

    widths: dict[str, int]
    tokens: tuple[str, ...]

    def columns(self, kept: Collection[str]) -> Tensor:
        """Return the columns of the concatenation that stay."""
        flags = [name in kept for name, width in self.widths.items() for _ in range(width)]
        return torch.tensor(flags, dtype=torch.bool).nonzero().flatten()

    def positions(self, kept: Collection[str]) -> Tensor:
        """Return the places in the stack that stay."""
        flags = [name in kept for name in self.tokens]
        return torch.tensor(flags, dtype=torch.bool).nonzero().flatten()

    def kept_indices(self, before: int, after: int, kept: Collection[str]) -> Tensor | None:
        """Return which indices of a dimension of ``before`` numbers stay, where ``after`` do; None if not known.

        It is a concatenation, with or without other numbers behind it, or as many numbers for every token.
        """
        columns, width = self.columns(kept), sum(self.widths.values())
        if before >= width and before - after == width - len(columns):
            return torch.cat([columns, torch.arange(width, before)])
        positions, count = self.positions(kept), len(self.tokens)
        if count and before % count == 0 and before // count * len(positions) == after:
            each = before // count
            return (positions[:, None] * each + torch.arange(each)).flatten()
        return None


class RebuildingAdapter(Adapter):
    """An adapter of a library whose models hold their optimizer and end in a sigmoid, one a task.

    The smaller model is made by the library's own constructor, from what describes the fields that stay; which
    numbers of each weight go along is told by the two shapes of it, and proved by comparing the logits.

    Args:
        make: makes a model as yours was made, from the description of fewer fields; ``prune(cut=True)`` needs it.
        untie: where fields share a table, give each a module of its own when gates are put on, and a copy of the
            table when they are absorbed; without it, both are refused.

    """

    own_optimizer: str  # the attribute of a model that holds its optimizer
    example: str  # how make= is written

    def __init__(self, make: Callable[..., nn.Module] | None = None, *, untie: bool = False) -> None:
        self.make = make
        self.untie = untie

    # ------------------------------------------------------------------------- what a library says

    @abstractmethod
    def activations(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules at the end that turn logits into predictions, one a task."""

    def logits(self, activation: nn.Module, given: Tensor) -> Tensor:
        """Return the logits (B, 1), of what an activation is given."""
        return given

    @abstractmethod
    def layout(self, model: nn.Module) -> FieldLayout:
        """Return how the fields stand beside each other."""

    @abstractmethod
    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return a model with other weights, made by ``make`` from the fields that stay."""

    def kept_indices(
        self, model: nn.Module, path: str, dim: int, before: int, after: int, kept: Collection[str]
    ) -> Tensor | None:
        """Return which indices of a dimension of a parameter stay, of so many; None if that is not known."""
        return self.layout(model).kept_indices(before, after, kept)

    def other_loss(self, model: nn.Module) -> str | None:
        """Return why the loss of this model is not the cross entropy of its logits; None if it is."""
        return None

    def finalize(self, smaller: nn.Module) -> None:
        """Let go of what a copied model still holds of the dropped fields, in place."""

    # -------------------------------------------------------------------------------------- logits

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Run the model, and return its logits (B, T): a sigmoid would hide small changes in its rounding."""
        ends = self.activations(model)
        with _record_inputs(ends) as found:
            model(batch)
        if not ends or not all(found):
            raise InputError(
                f"{type(model).__name__} does not run the activation at its end, so that its logits are not "
                f"known: write a {type(self).__name__} of your own whose call(model, batch) returns them"
            )
        given = [self.logits(end, each) for end, several in zip(ends, found, strict=True) for each in several]
        return torch.cat([each.reshape(len(each), -1) for each in given], dim=1)

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean binary cross entropy of logits (B, T) against labels (B,) or (B, T)."""
        wanted = labels[:, None] if labels.ndim == 1 else labels
        if output.shape != wanted.shape:
            raise InputError(f"the model has logits {tuple(output.shape)}, but labels are {tuple(labels.shape)}")
        return super().loss(output, wanted)

    # --------------------------------------------------------------------------------------- verbs

    def search(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Any, Tensor]],
        optimizer: torch.optim.Optimizer,
        **settings: Any,
    ) -> Selection:
        """Train the model and its gates together, in place (see :meth:`Adapter.search`)."""
        reason = self.other_loss(model)
        if reason is not None and type(self).loss is RebuildingAdapter.loss:
            raise InputError(
                f"{type(model).__name__}: {reason}, so that its loss is not the cross entropy of its logits; "
                f"write a {type(self).__name__} of your own with loss(logits, labels)"
            )
        return super().search(model, batches, optimizer, **settings)

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Selection:
        """Move the gates into the weights, in place, all or nothing; the model's own optimizer goes along."""
        given = self._own(model) if optimizer is None else optimizer
        return absorb(model, given, call=self.call, **{"untie": self.untie, **settings})

    def prune(
        self,
        model: nn.Module,
        selection: Selection,
        *,
        batch: Any = None,
        optimizer: Any = None,
        cut: bool = False,
    ) -> Pruned:
        """Return the smaller model with its certificate; its own optimizer is the one carried along.

        Without ``cut`` zeros stand where tables were, and the model reads batches as before. With it the model is
        made again from the fields that stay, and reads ``narrow(model, batch, smaller)``.
        """
        if cut and self.make is None:
            raise InputError(f"cut=True makes the model again: say how, {self.example}")
        given = self._own(model) if optimizer is None else optimizer
        inputs = self.inputs_in_batch(model, batch)
        builder = self if cut else None
        done = prune(
            model, selection, batch=batch, inputs=inputs, optimizer=given, cut=cut, call=self.call, by=builder
        )
        carried = done.optimizer if isinstance(done.optimizer, torch.optim.Optimizer) else None
        if hasattr(done.model, self.own_optimizer) and not (cut and carried is None):
            setattr(done.model, self.own_optimizer, carried)
        self.finalize(done.model)
        return done

    def inputs_in_batch(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return field -> where its raw value is in this batch."""
        return self.inputs_of_fields(model)

    def smaller(
        self, model: nn.Module, kept: Sequence[str], cut: bool
    ) -> tuple[nn.Module, dict[str, dict[int, Tensor]]]:
        """Return the model made again, and what stays of each parameter of the old one."""
        with torch.random.fork_rng(devices=[]):  # the new weights are drawn in vain
            made = self.build_model(model, kept)
        before = dict(model.named_parameters(remove_duplicate=False))
        stays: dict[str, dict[int, Tensor]] = {}
        for path, weight in made.named_parameters(remove_duplicate=False):
            old = before.get(path)
            if old is None or old.ndim != weight.ndim:
                raise AbsenceError(
                    f"columns cannot be cut: made again, the model has a parameter {path!r} that this one has not "
                    f"(shaped {tuple(weight.shape)}); does make= take the same settings?"
                )
            stays[path] = {}
            for dim, (size, fewer) in enumerate(zip(old.shape, weight.shape, strict=True)):
                if size != fewer:
                    index = self.kept_indices(model, path, dim, size, fewer, kept)
                    if index is None:
                        raise AbsenceError(
                            f"columns cannot be cut: it is not known which numbers of {path!r} belong to which "
                            f"field (shaped {tuple(old.shape)}, it would be {tuple(weight.shape)})"
                        )
                    stays[path][dim] = index.to(old.device)
        return made, stays

    def _own(self, model: nn.Module) -> torch.optim.Optimizer | None:
        own = getattr(model, self.own_optimizer, None)
        return own if isinstance(own, torch.optim.Optimizer) else None


@contextmanager
def _record_inputs(modules: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Collect what goes into each of these modules, once or several times, while the block runs."""
    found: list[list[Tensor]] = [[] for _ in modules]

    def collector(number: int) -> Any:
        def collect(module: nn.Module, args: Any) -> None:
            found[number].append(args[0].clone())  # some layers add their bias in place

        return collect

    handles = [each.register_forward_pre_hook(collector(number)) for number, each in enumerate(modules)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
