"""DeepCTR-Torch: its models, through their feature columns.

adapter = DeepCTR(make=lambda linear, dnn: DeepFM(linear, dnn))
gates = adapter.attach(model, steps=20_000)
…
linear, dnn = adapter.columns(model, selection)       # the feature columns that stay

The feature columns of a model of DeepCTR-Torch: where it lists them, and a table of its own for each.

The matrix X that models of DeepCTR-Torch read: a module that it goes through, other values in its columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters.base import FieldLayout, RebuildingAdapter
from lpfs.adapters.need import package
from lpfs.errors import AbsenceError, InputError, SharedTableError
from lpfs.gates.attach import twin
from lpfs.gates.leak import Where, other_values
from lpfs.gates.module import Gates
from lpfs.gates.sites import Site, SiteLike
from lpfs.schema import Selection

# Its models take one float32 matrix; above this, neighbouring whole numbers are one.
LARGEST_ID = 2**24


def index_of(model: Any) -> dict[str, tuple[int, int]]:
    """Return name -> first and last column in X, sequence lengths included."""
    found = getattr(model, "feature_index", None)
    if found is None:
        raise InputError(f"{type(model).__name__} has no feature_index: it is no model of DeepCTR-Torch")
    return dict(found)


def parts_of(model: nn.Module) -> list[tuple[str, list[Any]]]:
    """Return the parts of a model that have feature columns: the path of each, and its columns."""
    parts: list[tuple[str, list[Any]]] = [("", list(getattr(model, "dnn_feature_columns", ())))]
    linear: Any = getattr(model, "linear_model", None)
    if linear is not None:
        lists = (linear.sparse_feature_columns, linear.varlen_sparse_feature_columns, linear.dense_feature_columns)
        parts.append(("linear_model.", [each for several in lists for each in several]))
    return parts


def columns_of(model: nn.Module) -> list[Any]:
    """Return every feature column once."""
    return list({each.name: each for _, columns in parts_of(model) for each in columns}.values())


def has_table(column: Any) -> bool:
    """Whether a column is looked up, one id or several; the others are numbers."""
    return not isinstance(column, package("deepctr_torch.inputs", "deepctr").DenseFeat)


def history_fields(model: Any) -> list[str]:
    """Return the fields that an attention over the history reads: queries, and the sequences themselves."""
    queries = list(getattr(model, "history_feature_list", ()))
    return [*queries, *(f"hist_{name}" for name in queries)]


def check_id_range(model: nn.Module) -> None:
    """Refuse a model with more ids than its input can tell apart."""
    for column in columns_of(model):
        if has_table(column) and column.vocabulary_size > LARGEST_ID:
            raise InputError(
                f"field {column.name!r} has {column.vocabulary_size:,} values, but DeepCTR-Torch passes ids as "
                f"float32, which tells whole numbers apart up to {LARGEST_ID:,} only: hash them to fewer first"
            )


def untie_tables(model: nn.Module, untie: bool) -> None:
    """Give columns with one ``embedding_name`` a module each, in place: the first keeps the one there is."""
    for path, columns in parts_of(model):
        users: dict[str, list[str]] = {}
        for column in filter(has_table, columns):
            users.setdefault(column.embedding_name, []).append(column.name)
        shared = {table: names for table, names in users.items() if len(names) > 1}
        if shared and not untie:
            table, names = next(iter(shared.items()))
            raise SharedTableError(
                f"fields {names} share the table {table!r} in {path + 'embedding_dict'!r}, and so would share one "
                "gate. DeepCTR(untie=True) gives each a module of its own around the same weight, and a copy of "
                "the weight when gates are absorbed"
            )
        owner: Any = model.get_submodule(path.rstrip("."))
        own: dict[str, str] = {}
        for table, names in shared.items():
            head = table if table in names else names[0]
            for name in (each for each in names if each != head):
                own[name] = name
                while own[name] in owner.embedding_dict:
                    own[name] += "_"
                owner.embedding_dict[own[name]] = twin(owner.embedding_dict[table])
        _rename(owner, own)


def _rename(owner: nn.Module, tables: Mapping[str, str]) -> None:
    """Let feature columns, wherever a module lists them, look other tables up, in place."""
    inputs = package("deepctr_torch.inputs", "deepctr")
    kinds = (inputs.SparseFeat, inputs.VarLenSparseFeat)

    def renamed(column: Any) -> Any:
        table = tables.get(column.name) if isinstance(column, kinds) else None
        if table is None:
            return column
        if isinstance(column, inputs.VarLenSparseFeat):
            return column._replace(sparsefeat=column.sparsefeat._replace(embedding_name=table))
        return column._replace(embedding_name=table)

    for key, value in list(vars(owner).items()):
        if tables and isinstance(value, list | tuple) and any(isinstance(each, kinds) for each in value):
            setattr(owner, key, [renamed(each) for each in value])


INPUTS = "lpfs_inputs"


class InputHook:
    """Before the model's forward: X goes through a module, on which gates of its columns can be."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, model: nn.Module, args: Any) -> Any:
        """Return the arguments with X replaced."""
        return (self.module(args[0]), *args[1:])


class PerturbColumns:
    """Returns X with other values in some columns, for the leak check."""

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        self.spans = spans

    def __call__(self, batch: Tensor) -> Tensor:
        """Return a changed copy; the batch itself where its columns have one value only."""
        result = batch.clone()
        for start, stop in self.spans:
            others = other_values(batch[:, start:stop], 1)
            if others is not None:
                result[:, start:stop] = others
        return batch if torch.equal(result, batch) else result


class DeepCTR(RebuildingAdapter):
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
            found[column.name] = start if spans == [(start, start + 1)] else PerturbColumns(tuple(spans))
        return found

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every field a module to put its gate on, in place; weights and predictions are as they were.

        Fields that share a table get a module each around the same weight (with ``untie``), under their own name
        in ``embedding_dict``; X goes through a module that returns it, if there are dense columns. ``attach`` does
        so; a fresh model that is to load weights from after ``absorb`` needs it too, before :func:`lpfs.restore`.
        """
        check_id_range(model)
        untie_tables(model, self.untie)
        if not hasattr(model, INPUTS) and any(not has_table(each) for each in columns_of(model)):
            model.add_module(INPUTS, nn.Identity())
            model.register_forward_pre_hook(InputHook(model.get_submodule(INPUTS)))
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

    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        """Return a model made from the feature columns that stay."""
        assert self.make is not None
        history = [name for name in history_fields(model) if name not in kept]
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

    def layout(self, model: nn.Module) -> FieldLayout:
        """Return what the dense layers read: tables, sequences, then numbers."""
        columns = dict(parts_of(model))[""]
        inputs = package("deepctr_torch.inputs", "deepctr")
        sparse = [each for each in columns if isinstance(each, inputs.SparseFeat)]
        several = [each for each in columns if isinstance(each, inputs.VarLenSparseFeat)]
        history = history_fields(model)  # the attention's result stands behind other sequences
        several.sort(key=lambda each: each.name in history)
        tables = [*sparse, *several]
        widths = {each.name: int(each.embedding_dim) for each in tables}
        widths |= {each.name: int(each.dimension) for each in columns if not has_table(each)}
        return FieldLayout(widths, tuple(each.name for each in tables))

    def kept_indices(
        self, model: nn.Module, path: str, dim: int, before: int, after: int, kept: Collection[str]
    ) -> Tensor | None:
        """Return which indices stay: xDeepFM multiplies maps by tokens, the linear part has a weight a number."""
        layout = self.layout(model)
        if path == "linear_model.weight":
            numbers = [each for each in dict(parts_of(model))["linear_model."] if not has_table(each)]
            layout = FieldLayout({each.name: int(each.dimension) for each in numbers}, ())
        if "conv1ds" not in path or dim != 1:
            return layout.kept_indices(before, after, kept)
        positions, count = layout.positions(kept), len(layout.tokens)
        maps = positions if before == count**2 and after == len(positions) ** 2 else torch.arange(before // count)
        return (maps[:, None] * count + positions).flatten()

    def finalize(self, smaller: nn.Module) -> None:
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
