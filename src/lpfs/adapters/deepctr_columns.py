"""The feature columns of a model of DeepCTR-Torch: where it lists them, and a table of its own for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lpfs.adapters.need import package
from lpfs.errors import InputError, SharedTableError
from lpfs.gates.attach import twin

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


def history_of(model: Any) -> list[str]:
    """Return the fields that an attention over the history reads: queries, and the sequences themselves."""
    queries = list(getattr(model, "history_feature_list", ()))
    return [*queries, *(f"hist_{name}" for name in queries)]


def refuse_large(model: nn.Module) -> None:
    """Refuse a model with more ids than its input can tell apart."""
    for column in columns_of(model):
        if has_table(column) and column.vocabulary_size > LARGEST_ID:
            raise InputError(
                f"field {column.name!r} has {column.vocabulary_size:,} values, but DeepCTR-Torch passes ids as "
                f"float32, which tells whole numbers apart up to {LARGEST_ID:,} only: hash them to fewer first"
            )


def separate(model: nn.Module, untie: bool) -> None:
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
