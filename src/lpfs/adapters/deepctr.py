"""Adapter for DeepCTR-Torch: fields are the feature columns of a model, a batch is its input matrix X."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._imports import import_optional
from lpfs.adapters.base import FieldLayout, RebuildingAdapter
from lpfs.errors import AbsenceError, InputError, SharedTableError
from lpfs.gates.attach import share_parameters
from lpfs.gates.module import Gates
from lpfs.gates.sites import Site, SiteLike
from lpfs.gates.verification import InputPath, permuted_values
from lpfs.schema import Selection

MAX_ID = 2**24  # X is float32, which represents integers exactly up to here
INPUTS = "lpfs_inputs"  # name of the module that X passes through, if X has dense columns


def _inputs_package() -> Any:
    return import_optional("deepctr_torch.inputs", "deepctr", "the adapter DeepCTR")


def column_ranges(model: Any) -> dict[str, tuple[int, int]]:
    """Return name -> first column in X and the column after its last, sequence lengths included."""
    ranges = getattr(model, "feature_index", None)
    if ranges is None:
        raise InputError(f"{type(model).__name__} has no feature_index; give a model of DeepCTR-Torch")
    return dict(ranges)


def model_parts(model: nn.Module) -> dict[str, list[Any]]:
    """Return path prefix -> feature columns of each part of a model: the network, and the linear part."""
    parts = {"": list(getattr(model, "dnn_feature_columns", ()))}
    linear: Any = getattr(model, "linear_model", None)
    if linear is not None:
        lists = (linear.sparse_feature_columns, linear.varlen_sparse_feature_columns, linear.dense_feature_columns)
        parts["linear_model."] = [column for columns in lists for column in columns]
    return parts


def feature_columns(model: nn.Module) -> list[Any]:
    """Return every feature column once."""
    return list({column.name: column for columns in model_parts(model).values() for column in columns}.values())


def has_table(column: Any) -> bool:
    """Return whether a column is looked up in a table; other columns are numbers."""
    return not isinstance(column, _inputs_package().DenseFeat)


def history_fields(model: Any) -> list[str]:
    """Return the fields of the attention over the history: queries and sequences."""
    queries = list(getattr(model, "history_feature_list", ()))
    return [*queries, *(f"hist_{name}" for name in queries)]


def untie_tables(model: nn.Module, untie: bool) -> None:
    """Give columns that share an ``embedding_name`` separate modules, in place; the first keeps the old one."""
    for path, columns in model_parts(model).items():
        users: dict[str, list[str]] = {}
        for column in filter(has_table, columns):
            users.setdefault(column.embedding_name, []).append(column.name)
        owner: Any = model.get_submodule(path.rstrip("."))
        new_tables: dict[str, str] = {}
        for table, names in users.items():
            if len(names) > 1 and not untie:
                raise SharedTableError(
                    f"fields {names} share the table {table!r} in {path + 'embedding_dict'!r}, so they would share "
                    "one gate. DeepCTR(untie=True) gives each its own module around the same weight, and its own copy "
                    "of the weight when gates are absorbed"
                )
            names.remove(table if table in names else names[0])
            for name in names:
                new_table = name
                while new_table in owner.embedding_dict:
                    new_table += "_"
                new_tables[name] = new_table
                owner.embedding_dict[new_table] = share_parameters(owner.embedding_dict[table])
        _rename_tables(owner, new_tables)


def _rename_tables(owner: nn.Module, tables: Mapping[str, str]) -> None:
    """Set the tables of feature columns in every list of a module, in place."""
    inputs = _inputs_package()
    kinds = (inputs.SparseFeat, inputs.VarLenSparseFeat)

    def renamed(column: Any) -> Any:
        if not isinstance(column, kinds) or column.name not in tables:
            return column
        if isinstance(column, inputs.VarLenSparseFeat):
            return column._replace(sparsefeat=column.sparsefeat._replace(embedding_name=tables[column.name]))
        return column._replace(embedding_name=tables[column.name])

    for key, value in list(vars(owner).items()):
        if tables and isinstance(value, list | tuple) and any(isinstance(column, kinds) for column in value):
            setattr(owner, key, [renamed(column) for column in value])


def pass_through_module(model: nn.Module, args: Any) -> Any:
    """Pass X through the module to which gates of its columns can be attached; a forward pre-hook."""
    return (model.get_submodule(INPUTS)(args[0]), *args[1:])


def perturb_columns(batch: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return X with other values in some columns, for the leak check; X itself if these columns are constant."""
    result = batch.clone()
    for start, stop in spans:
        values = permuted_values(batch[:, start:stop], 1)
        if values is not None:
            result[:, start:stop] = values
    return batch if torch.equal(result, batch) else result


class DeepCTR(RebuildingAdapter):
    """Adapter for models of DeepCTR-Torch: a field is a feature column, a batch is the matrix X (B, columns).

    A ``SparseFeat`` or ``VarLenSparseFeat`` enters through its table and, if the model has a linear part, through
    its weight there. A ``DenseFeat`` has no module: its columns of X are gated before the model, and its gate
    stays a constant when it is absorbed.

    Args:
        make: function that builds your model from its linear and its other feature columns; needed by
            ``prune(cut=True)``.
        untie: for columns with the same ``embedding_name`` (histories of DIN): give each its own table.
    """

    optimizer_attribute, activation_attribute = "optim", "out"
    make_example = "DeepCTR(make=lambda linear, dnn: DeepFM(linear, dnn))"

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return feature column -> its table, its weight in the linear part, or its columns of X."""
        ranges = column_ranges(model)
        sites: dict[str, list[SiteLike]] = {}
        for path, columns in model_parts(model).items():
            for column in columns:
                if has_table(column):
                    sites.setdefault(column.name, []).append(f"{path}embedding_dict.{column.embedding_name}")
                else:
                    sites[column.name] = [Site(INPUTS, slice(*ranges[column.name]))]
        return {name: sites[name] for name in ranges if name in sites}

    def inputs_of_fields(self, model: nn.Module) -> dict[str, InputPath]:
        ranges, columns = column_ranges(model), feature_columns(model)
        lengths = [getattr(column, "length_name", None) for column in columns]
        inputs: dict[str, InputPath] = {}
        for column, length in zip(columns, lengths, strict=True):
            start, stop = ranges[column.name]
            spans = [(start, stop)]
            if length and lengths.count(length) == 1:  # not shared with another sequence
                spans.append(ranges[length])
            inputs[column.name] = start if spans == [(start, start + 1)] else partial(perturb_columns, spans=spans)
        return inputs

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every field a module for its gate, in place; weights and predictions do not change.

        Fields that share a table get separate modules around the same weight (with ``untie``), under their own names
        in ``embedding_dict``; if there are dense columns, X passes through an identity module. ``attach`` calls this
        method. A new model that loads weights saved after ``absorb`` needs it too, before :func:`lpfs.restore`.
        """
        columns = feature_columns(model)
        for column in filter(has_table, columns):
            if column.vocabulary_size > MAX_ID:
                raise InputError(
                    f"field {column.name!r} has {column.vocabulary_size:,} values, but DeepCTR-Torch passes ids as "
                    f"float32, which represents integers exactly only up to {MAX_ID:,}; hash them to fewer first"
                )
        untie_tables(model, self.untie)
        if not hasattr(model, INPUTS) and not all(map(has_table, columns)):
            model.add_module(INPUTS, nn.Identity())
            model.register_forward_pre_hook(pass_through_module)
        return model

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        return super().attach(self.prepare(model), fields, **settings)

    def update_weights(self, model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
        """Take a step of the optimizer; for the model's own, the gradients are multiplied by the number of rows.

        ``fit`` of DeepCTR-Torch sums its loss over the rows, and the state of the model's own optimizer has that
        scale. The gates use the mean loss.
        """
        if optimizer is self._model_optimizer(model):
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(rows)
        super().update_weights(model, optimizer, rows)

    def columns(self, model: nn.Module, selection: Selection) -> tuple[list[Any], list[Any]]:
        """Return the kept feature columns: those of the linear part, and the others."""
        return self._kept_columns(model, [name for name in self.sites(model) if name not in selection.dropped])

    def _kept_columns(self, model: nn.Module, kept: Collection[str]) -> tuple[list[Any], list[Any]]:
        parts = model_parts(model)
        linear, dnn = parts.get("linear_model.", []), parts[""]
        return [column for column in linear if column.name in kept], [column for column in dnn if column.name in kept]

    def build_model(self, model: nn.Module, kept: Sequence[str]) -> nn.Module:
        assert self.make is not None
        history = [name for name in history_fields(model) if name not in kept]
        if history:
            raise AbsenceError(
                f"columns cannot be removed: the attention over the history combines {history} with the kept "
                "fields, and a zero is an ordinary value for it; prune without cut, which feeds zeros and is exact"
            )
        smaller = self.make(*self._kept_columns(model, kept))
        return self.prepare(smaller) if hasattr(model, INPUTS) else smaller

    def narrow(self, model: nn.Module, batch: Any, smaller: Any) -> Any:
        """Return the columns of X that the smaller model takes, in its order."""
        ranges = column_ranges(model)
        return torch.cat([batch[:, slice(*ranges[name])] for name in column_ranges(smaller)], dim=1)

    def layout(self, model: nn.Module) -> FieldLayout:
        """Return the input of the dense layers: tables, sequences, then numbers."""
        columns, inputs = model_parts(model)[""], _inputs_package()
        single = [column for column in columns if isinstance(column, inputs.SparseFeat)]
        sequences = [column for column in columns if isinstance(column, inputs.VarLenSparseFeat)]
        history = history_fields(model)  # the result of the attention follows other sequences
        tables = [*single, *sorted(sequences, key=lambda column: column.name in history)]
        widths = {column.name: int(column.embedding_dim) for column in tables}
        widths |= {column.name: int(column.dimension) for column in columns if not has_table(column)}
        return FieldLayout(widths, tuple(column.name for column in tables))

    def kept_indices(
        self, model: nn.Module, path: str, dim: int, before: int, after: int, kept: Collection[str]
    ) -> Tensor | None:
        """Return the kept indices; xDeepFM multiplies maps by tokens, the linear part has a weight per number."""
        layout = self.layout(model)
        if path == "linear_model.weight":
            numeric = [column for column in model_parts(model)["linear_model."] if not has_table(column)]
            layout = FieldLayout({column.name: int(column.dimension) for column in numeric}, ())
        if "conv1ds" not in path or dim != 1:
            return layout.kept_indices(before, after, kept)
        positions, count = layout.positions(kept), len(layout.tokens)
        maps = positions if before == count**2 and after == len(positions) ** 2 else torch.arange(before // count)
        return (maps[:, None] * count + positions).flatten()

    def finalize(self, smaller: nn.Module) -> None:
        """Remove the weights of dropped fields from the list of regularized weights, in place."""
        parameters = {id(parameter) for parameter in smaller.parameters()}

        def is_kept(entry: Any) -> bool:  # a parameter, or (name, parameter)
            return id(entry[1] if isinstance(entry, tuple) else entry) in parameters

        groups: Any = getattr(smaller, "regularization_weight", None)
        if groups is not None:
            groups = [(list(filter(is_kept, weights)), *strengths) for weights, *strengths in groups]
            smaller.regularization_weight = groups

    def penalty(self, model: Any, rows: int) -> Any:
        """Return DeepCTR-Torch's regularization, which is added to a sum over rows, for the mean over rows."""
        return (model.get_regularization_loss() + model.aux_loss).sum() / rows

    def loss_mismatch(self, model: nn.Module) -> str | None:
        activations = self.activations(model)
        if any(getattr(activation, "task", "binary") != "binary" for activation in activations):
            return "not all of its tasks are binary"
        combined = len(activations) < int(getattr(model, "num_tasks", 1))
        return "its predictions are combined from each other" if combined else None

    def logits(self, activation: nn.Module, value: Tensor) -> Tensor:
        bias = getattr(activation, "bias", None)
        return value if bias is None else value + bias
