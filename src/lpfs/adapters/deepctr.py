"""DeepCTR-Torch: its models, through their feature columns.

adapter = DeepCTR(make=lambda linear, dnn: DeepFM(linear, dnn))
gates = adapter.attach(model, steps=20_000)
…
linear, dnn = adapter.columns(model, selection)       # the feature columns that stay
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters.base import Builds
from lpfs.adapters.deepctr_columns import columns_of, has_table, history_of, index_of, parts_of, refuse_large, separate
from lpfs.adapters.deepctr_inputs import INPUTS, OtherColumns, Through
from lpfs.adapters.layout import Layout
from lpfs.adapters.need import package
from lpfs.errors import AbsenceError
from lpfs.gates.leak import Where
from lpfs.gates.module import Gates
from lpfs.gates.sites import Site, SiteLike
from lpfs.schema import Selection


class DeepCTR(Builds):
    """Knows models of DeepCTR-Torch: a field is a feature column, a batch is the matrix X (B, columns).

    A ``SparseFeat`` or ``VarLenSparseFeat`` enters by its table and, where the model has a linear part, by its
    weight there. A ``DenseFeat`` has no module: its columns of X are gated before the model reads them, and its
    gate stays a constant when it is absorbed.

    Args:
        make: makes a model as yours was made, from its linear and its other feature columns; ``prune(cut=True)``
            needs it.
        untie: for columns with the same ``embedding_name`` (DIN's histories): give each a table of its own.

    """

    own_optimizer = "optim"
    example = "DeepCTR(make=lambda linear, dnn: DeepFM(linear, dnn))"

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return feature column -> its table, its weight in the linear part, or its columns of X."""
        found: dict[str, list[SiteLike]] = {}
        at = index_of(model)
        for path, columns in parts_of(model):
            for column in columns:
                name = column.name
                several = found.setdefault(name, [])
                if not has_table(column):
                    if not several:
                        several.append(Site(INPUTS, slice(*at[name])))
                else:
                    several.append(f"{path}embedding_dict.{column.embedding_name}")
        order = [name for name in at if name in found]
        return {name: found[name] for name in order}

    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return feature column -> where it is in X: a column, or what replaces several at once."""
        at = index_of(model)
        lengths = [each.length_name for each in columns_of(model) if getattr(each, "length_name", None)]
        found: dict[str, Where] = {}
        for column in columns_of(model):
            start, stop = at[column.name]
            length = getattr(column, "length_name", None)
            spans = [(start, stop)]
            if length and lengths.count(length) == 1:  # the length of this sequence alone
                spans.append(at[length])
            found[column.name] = start if spans == [(start, start + 1)] else OtherColumns(tuple(spans))
        return found

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every field a module to put its gate on, in place; weights and predictions are as they were.

        Fields that share a table get a module each around the same weight (with ``untie``), under their own name
        in ``embedding_dict``; X goes through a module that returns it, if there are dense columns. ``attach`` does
        so; a fresh model that is to load weights from after ``absorb`` needs it too, before :func:`lpfs.restore`.
        """
        refuse_large(model)
        separate(model, self.untie)
        if not hasattr(model, INPUTS) and any(not has_table(each) for each in columns_of(model)):
            model.add_module(INPUTS, nn.Identity())
            model.register_forward_pre_hook(Through(model.get_submodule(INPUTS)))
        return model

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        """Put gates on all feature columns, or those named, in place; its predictions stay bit-identical."""
        return super().attach(self.prepare(model), fields, **settings)

    def search(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Any, Tensor]],
        optimizer: torch.optim.Optimizer,
        **settings: Any,
    ) -> Selection:
        """Train the model and its gates together, in place, and return which fields it needs.

        DeepCTR-Torch's ``fit`` sums its loss over rows, and the state of the model's own optimizer is on that
        scale: with that optimizer the gradients of the weights are as there. The gates' are those of the mean.
        """
        if optimizer is not getattr(model, self.own_optimizer, None):
            return super().search(model, batches, optimizer, **settings)
        rows = 1

        def counted() -> Iterator[tuple[Any, Tensor]]:
            nonlocal rows
            for batch, labels in batches:
                rows = len(labels)
                yield batch, labels

        def scale(*_: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.mul_(rows)

        handle = optimizer.register_step_pre_hook(scale)
        try:
            return super().search(model, counted(), optimizer, **settings)
        finally:
            handle.remove()

    # ------------------------------------------------------------------------------ a smaller model

    def columns(self, model: nn.Module, selection: Selection) -> tuple[list[Any], list[Any]]:
        """Return the feature columns that stay: those of the linear part, and the others."""
        return self._kept_columns(model, [name for name in self.sites(model) if name not in selection.dropped])

    def _kept_columns(self, model: nn.Module, kept: Collection[str]) -> tuple[list[Any], list[Any]]:
        parts = dict(parts_of(model))
        linear, dnn = (
            [each for each in parts.get(path, []) if each.name in kept] for path in ("linear_model.", "")
        )
        return linear, dnn

    def again(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return a model made from the feature columns that stay."""
        assert self.make is not None
        history = [name for name in history_of(model) if name not in kept]
        if history:
            raise AbsenceError(
                f"columns cannot be cut: the attention over the history reads {history} together with the fields "
                "that stay; a zero is a value like any other for it. prune without cut feeds zeros, which is exact"
            )
        made = self.make(*self._kept_columns(model, kept))
        return self.prepare(made) if hasattr(model, INPUTS) else made

    def narrow(self, model: nn.Module, batch: Any, smaller: Any) -> Any:
        """Return the columns of X that the smaller model reads, in its order."""
        there, here = index_of(model), index_of(smaller)
        return torch.cat([batch[:, slice(*there[name])] for name in here], dim=1)

    def layout(self, model: nn.Module) -> Layout:
        """Return what the dense layers read: tables, sequences, then numbers."""
        columns = dict(parts_of(model))[""]
        inputs = package("deepctr_torch.inputs", "deepctr")
        sparse = [each for each in columns if isinstance(each, inputs.SparseFeat)]
        several = [each for each in columns if isinstance(each, inputs.VarLenSparseFeat)]
        history = history_of(model)  # the attention's result stands behind other sequences
        several.sort(key=lambda each: each.name in history)
        tables = [*sparse, *several]
        widths = {each.name: int(each.embedding_dim) for each in tables}
        widths |= {each.name: int(each.dimension) for each in columns if not has_table(each)}
        return Layout(widths, tuple(each.name for each in tables))

    def stays(
        self, model: nn.Module, path: str, dim: int, before: int, after: int, kept: Collection[str]
    ) -> Tensor | None:
        """Return which indices stay: xDeepFM multiplies maps by tokens, the linear part has a weight a number."""
        layout = self.layout(model)
        if path == "linear_model.weight":
            numbers = [each for each in dict(parts_of(model))["linear_model."] if not has_table(each)]
            layout = Layout({each.name: int(each.dimension) for each in numbers}, ())
        if "conv1ds" not in path or dim != 1:
            return layout.stays(before, after, kept)
        positions, count = layout.positions(kept), len(layout.tokens)
        maps = positions if before == count**2 and after == len(positions) ** 2 else torch.arange(before // count)
        return (maps[:, None] * count + positions).flatten()

    def tidy(self, smaller: nn.Module) -> None:
        """Drop the weights of dropped fields from the list of those that are regularised, in place."""
        held = {id(each) for each in smaller.parameters()}
        listed: Any = getattr(smaller, "regularization_weight", None)
        if listed is not None:
            smaller.regularization_weight = [  # type: ignore[assignment]
                (
                    [each for each in several if id(each[1] if isinstance(each, tuple) else each) in held],
                    *strengths,
                )
                for several, *strengths in listed
            ]

    def penalty(self, model: Any, rows: int) -> Any:
        """Return what DeepCTR-Torch adds to its loss, which is a sum over rows, for a mean over rows."""
        return (model.get_regularization_loss() + model.aux_loss).sum() / rows

    def activations(self, model: nn.Module) -> list[nn.Module]:
        """Return the prediction layers, one a task."""
        end: Any = getattr(model, "out", None)
        return list(end) if isinstance(end, nn.ModuleList) else [] if end is None else [end]

    def other_loss(self, model: nn.Module) -> str | None:
        """Return why the loss is another: a regression, or predictions that are products of others."""
        ends = self.activations(model)
        if any(getattr(each, "task", "binary") != "binary" for each in ends):
            return "not all of its tasks are binary"
        together = len(ends) < int(getattr(model, "num_tasks", 1))
        return "its predictions are made of one another" if together else None

    def logits(self, activation: nn.Module, given: Tensor) -> Tensor:
        """Return what a prediction layer is given, and its bias."""
        bias = getattr(activation, "bias", None)
        return given if bias is None else given + bias
