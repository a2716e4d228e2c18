"""The models as ONNX graphs: encoded inputs, embeddings (``lpfs.models.inputs.Inputs``), one builder per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError
from lpfs.export.onnx_graph import Graph, to_array
from lpfs.export.preprocessing import InputColumn, NumericColumn
from lpfs.models import DLRM, FM, MLP, DCNv2, DeepFM, DLRMCross, Inputs, Model, UserItem, WideDeep, registered_name
from lpfs.models.crosses import Crosses
from lpfs.models.layers import DenseToken, NumericEmbeddings


@dataclass(frozen=True)
class EncodedInputs:
    """Names of the results that hold the inputs of the model."""

    ids: dict[str, str]  # field -> ids (B,), or (B, L) for a bag
    dense: str | None  # (B, C)
    missing: str | None  # (B, C), 1.0 or 0.0
    rows: str  # (1,): B
    matrix: str | None = None  # (B, F): the ids of all fields with one id, if they are one input


def add_inputs(graph: Graph, columns: Sequence[InputColumn]) -> EncodedInputs:
    """Add all inputs and the nodes that turn raw values into ids and standardised numbers."""
    ids = {column.field.name: column.encode(graph) for column in columns if not isinstance(column, NumericColumn)}
    numeric = [column for column in columns if isinstance(column, NumericColumn)]
    dense, missing = _standardised(graph, numeric) if numeric else (None, None)
    return EncodedInputs(ids, dense, missing, graph.add("Shape", graph.inputs[0].name, start=0, end=1))


def _standardised(graph: Graph, columns: Sequence[NumericColumn]) -> tuple[str, str]:
    """Return all numeric columns (B, C), transformed and standardised, 0.0 where missing; and the missing mask."""
    types = graph.onnx.TensorProto
    raw = columns[0].scale is not None
    pieces = []
    for column in columns:
        value = graph.add_input(column.input, types.DOUBLE if raw else types.FLOAT, column.shape, column.description())
        pieces.append(graph.add("Unsqueeze", value, [1]) if column.field.dim == 1 else value)
    values = graph.add("Concat", *pieces, axis=1)  # (B, C)
    missing = graph.add("Or", graph.add("IsNaN", values), graph.add("IsInf", values))
    values = graph.add("Where", missing, 0.0 if raw else np.float32(0), values)
    if raw:
        values = graph.add("Where", missing, np.float32(0), _scaled(graph, values, columns))
    return values, graph.add("Cast", missing, to=types.FLOAT)


def _scaled(graph: Graph, values: str, columns: Sequence[NumericColumn]) -> str:
    """Return what NumericEncoder computes: (sign(x)·log1p|x| or x, - mean) / deviation."""
    transforms, means, deviations = zip(*(column.scale for column in columns if column.scale is not None), strict=True)
    widths = [column.field.dim for column in columns]
    logarithmic = np.repeat([transform == "log" for transform in transforms], widths)[None]
    result = graph.add("Clip", values, -1e150, 1e150)
    if logarithmic.any():
        log = graph.add("Mul", _log1p(graph, graph.add("Abs", values)), graph.add("Sign", values))
        result = log if logarithmic.all() else graph.add("Where", logarithmic, log, result)
    centred = graph.add("Sub", result, np.concatenate(means)[None])
    scaled = graph.add("Div", centred, np.concatenate(deviations)[None])
    return graph.add("Cast", graph.add("Clip", scaled, -1e38, 1e38), to=graph.onnx.TensorProto.FLOAT)


def _log1p(graph: Graph, value: str) -> str:
    """Return log(1 + x), accurate for small x: with u = 1 + x as rounded, log(u)·x / (u - 1), or x if u = 1."""
    u = graph.add("Add", value, 1.0)
    rounded = graph.add("Sub", u, 1.0)
    is_zero = graph.add("Equal", rounded, 0.0)
    log = graph.add("Mul", graph.add("Log", u), value)
    return graph.add("Where", is_zero, value, graph.add("Div", log, graph.add("Where", is_zero, 1.0, rounded)))


def add_embeddings(graph: Graph, inputs: Inputs, path: str, encoded: EncodedInputs) -> str:
    """Return the embeddings (B, N, D + wide), in the order of ``inputs.slots``."""
    pieces = []
    if inputs.table is not None:
        table = graph.weight(inputs.table.weight, f"{path}.table.weight")
        starts = np.cumsum([0, *inputs.table.sizes])
        if inputs.ids:
            matrix = encoded.matrix
            if matrix is None:
                columns = [graph.add("Unsqueeze", encoded.ids[name], [1]) for name in inputs.names[: inputs.ids]]
                matrix = graph.add("Concat", *columns, axis=1)
            rows = graph.add("Add", matrix, starts[None, : inputs.ids])  # (B, F)
            pieces.append(graph.add("Gather", table, rows, axis=0))
        for name, start in zip(inputs.bags, starts[inputs.ids :].tolist(), strict=False):
            pooled = _pooled_bag(graph, table, encoded.ids[name], start, mean=inputs.table.mean)
            pieces.append(graph.add("Unsqueeze", pooled, [1]))
    if inputs.numbers is not None:
        pieces.append(_numeric_embeddings(graph, inputs, path, encoded))
    if not pieces:
        shape = graph.add("Concat", encoded.rows, [len(inputs.slots), inputs.width], axis=0)
        return graph.add("ConstantOfShape", shape)
    parts = _concat(graph, pieces)
    return parts if inputs.filled is None else _place_parts(graph, parts, to_array(inputs.filled), len(inputs.slots))


def _place_parts(graph: Graph, parts: str, positions: AnyArray, slots: int) -> str:
    """Return (B, slots, D) with the parts (B, P, D) at these positions and zeros at the others."""
    index = np.full(slots, len(positions))
    index[positions] = np.arange(len(positions))
    if (index == len(positions)).any():
        parts = graph.add("Pad", parts, [0, 0, 0, 0, 1, 0])
    return graph.add("Gather", parts, index, axis=1)


def _pooled_bag(graph: Graph, table: str, ids: str, start: int, *, mean: bool) -> str:
    """Return (B, D): the sum or the mean of the rows of a bag; zeros for an empty bag."""
    valid = graph.add("GreaterOrEqual", ids, 0)  # (B, L)
    index = graph.add("Where", valid, graph.add("Add", ids, start), 0)
    rows = graph.add("Gather", table, index, axis=0)  # (B, L, D)
    total = _sum(graph, graph.add("Where", graph.add("Unsqueeze", valid, [2]), rows, np.float32(0)))
    if not mean:
        return total
    count = graph.add("ReduceSum", graph.add("Cast", valid, to=graph.onnx.TensorProto.FLOAT), [1], keepdims=1)
    return graph.add("Div", total, graph.add("Max", count, np.float32(1)))


def _numeric_embeddings(graph: Graph, inputs: Inputs, path: str, encoded: EncodedInputs) -> str:
    values: list[Any] = [encoded.dense, encoded.missing]
    if inputs.dense_columns is not None:
        values = [graph.add("Gather", value, to_array(inputs.dense_columns), axis=1) for value in values]
    numbers: Any = inputs.numbers
    if isinstance(numbers, DenseToken):
        both = graph.add("Concat", *values, axis=1)
        return graph.add("Unsqueeze", add_layers(graph, numbers.bottom, f"{path}.numbers.bottom", both), [1])
    assert isinstance(numbers, NumericEmbeddings)
    terms = []
    for value, name in zip(values, ("weight", "missing"), strict=True):
        weight = graph.weight(getattr(numbers, name), f"{path}.numbers.{name}")
        terms.append(graph.add("Mul", graph.add("Unsqueeze", value, [2]), weight))
    columns = graph.add("Add", *terms)  # (B, C, D)
    return columns if numbers.plain else _sum_by_field(graph, numbers, columns)


def _sum_by_field(graph: Graph, numbers: NumericEmbeddings, columns: str) -> str:
    """Sum the columns (B, C, D) of each field."""
    columns = graph.add("Gather", columns, to_array(numbers.grouped), axis=1)
    sizes = [width * len(fields) for width, fields in numbers.groups.items()]
    sums = []
    for piece, (width, fields) in zip(graph.split(columns, sizes, 1), numbers.groups.items(), strict=True):
        grouped = graph.add("Reshape", piece, [0, len(fields), width, numbers.dim])  # 0: unchanged
        sums.append(graph.add("ReduceSum", grouped, [2], keepdims=0))
    return graph.add("Gather", graph.add("Concat", *sums, axis=1), to_array(numbers.order), axis=1)


def add_logits(graph: Graph, model: Model, encoded: EncodedInputs) -> str:
    """Return the logits (B, 1 + tasks)."""
    name = registered_name(model)
    if name not in BUILDERS:
        raise InputError(
            f"model {name!r} has no ONNX builder, only {', '.join(BUILDERS)}; add one to "
            "lpfs.export.onnx_models.BUILDERS, or use format='torch'"
        )
    return BUILDERS[name](graph, model, encoded)


def mlp(graph: Graph, model: MLP, encoded: EncodedInputs) -> str:
    """Concatenated embeddings, then dense layers."""
    return _top(graph, model, add_embeddings(graph, model.inputs, "inputs", encoded))


def wide_deep(graph: Graph, model: WideDeep, encoded: EncodedInputs) -> str:
    """Dense layers plus linear weights; in DeepFM plus the products of all pairs."""
    tokens, wide = _deep_and_wide(graph, model, encoded)
    logits = graph.add("Add", _top(graph, model, tokens), _sum(graph, wide))
    return graph.add("Add", logits, _pairwise(graph, tokens)) if isinstance(model, DeepFM) else logits


def fm(graph: Graph, model: FM, encoded: EncodedInputs) -> str:
    """Linear weights, the products of all pairs and a bias."""
    tokens, wide = _deep_and_wide(graph, model, encoded)
    total = graph.add("Add", _sum(graph, wide), _pairwise(graph, tokens))
    return graph.add("Add", total, graph.weight(model.bias, "linear.bias"))


def dcnv2(graph: Graph, model: DCNv2, encoded: EncodedInputs) -> str:
    """Cross layers, followed by the dense layers or parallel to them."""
    start = crossed = graph.add("Flatten", add_embeddings(graph, model.inputs, "inputs", encoded), axis=1)
    for number, layer in enumerate(model.crosses):
        projected = add_layers(graph, layer, f"crosses.{number}", crossed)
        crossed = graph.add("Add", crossed, graph.add("Mul", start, projected))
    if model.beside is None:
        return add_layers(graph, model.top, "top", crossed)
    deep = add_layers(graph, model.top, "top", start)
    return graph.add("Add", deep, graph.linear(crossed, model.beside, "beside"))


def dlrm(graph: Graph, model: DLRM, encoded: EncodedInputs) -> str:
    """Concatenation, or the dense token followed by the dot products of all pairs."""
    tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
    if model.pairs is None:
        return _top(graph, model, tokens)
    products = graph.add("MatMul", tokens, graph.add("Transpose", tokens, perm=[0, 2, 1]))
    top_input = graph.add("Gather", graph.add("Flatten", products, axis=1), to_array(model.pairs), axis=1)
    if model.has_token:
        last = graph.add("Gather", tokens, len(model.inputs.slots) - 1, axis=1)
        top_input = graph.add("Concat", last, top_input, axis=1)
    return add_layers(graph, model.top, "top", top_input)


def dlrm_cross(graph: Graph, model: DLRMCross, encoded: EncodedInputs) -> str:
    """Embeddings and their pairwise products, then dense layers."""
    tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
    return _top(graph, model, _crosses(graph, model.crosses, tokens))


def user_item(graph: Graph, model: UserItem, encoded: EncodedInputs) -> str:
    """Products of user and item fields, the other fields, shared layers, one head per task."""
    pieces = []
    if model.pairs:
        tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
        pieces.append(graph.add("Flatten", _crosses(graph, model.crosses, tokens), axis=1))
    for path in ("others", "numbers"):
        inputs = getattr(model, path)
        if inputs.slots:
            pieces.append(graph.add("Flatten", add_embeddings(graph, inputs, path, encoded), axis=1))
    shared = add_layers(graph, model.top, "top", _concat(graph, pieces))
    return _concat(
        graph, [add_layers(graph, head, f"heads.{number}", shared) for number, head in enumerate(model.heads)]
    )


BUILDERS: dict[str, Callable[[Graph, Any, EncodedInputs], str]] = {
    **{"mlp": mlp, "wide_deep": wide_deep, "fm": fm, "deepfm": wide_deep, "dcnv2": dcnv2},
    **{"dlrm": dlrm, "dlrm_cross": dlrm_cross, "user_item": user_item},
}


def add_layers(graph: Graph, module: nn.Module, path: str, value: str) -> str:
    """Add a Linear layer, a ReLU, or a sequence of them."""
    if isinstance(module, nn.Linear):
        return graph.linear(value, module, path)
    if isinstance(module, nn.ReLU):
        return graph.add("Relu", value)
    for name, layer in module.named_children():
        value = add_layers(graph, layer, f"{path}.{name}", value)
    return value


def _top(graph: Graph, model: Any, tokens: str) -> str:
    return add_layers(graph, model.top, "top", graph.add("Flatten", tokens, axis=1))


def _concat(graph: Graph, pieces: Sequence[str]) -> str:
    return pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)


def _sum(graph: Graph, value: str) -> str:
    return graph.add("ReduceSum", value, [1], keepdims=0)


def _deep_and_wide(graph: Graph, model: FM | WideDeep, encoded: EncodedInputs) -> list[str]:
    """Return embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
    inputs = model.inputs
    both = add_embeddings(graph, inputs, "inputs", encoded)
    return graph.split(both, [inputs.dim, inputs.width - inputs.dim], 2)


def _pairwise(graph: Graph, tokens: str) -> str:
    """Return the sum over all pairs of ⟨e_i, e_j⟩ as (B, 1)."""
    total = _sum(graph, tokens)
    squares = _sum(graph, graph.add("Mul", tokens, tokens))
    difference = graph.add("Sub", graph.add("Mul", total, total), squares)
    return graph.add("Mul", graph.add("ReduceSum", difference, [1], keepdims=1), np.float32(0.5))


def _crosses(graph: Graph, crosses: Crosses, tokens: str) -> str:
    """Return (B, slots, D): embeddings and products of two, each in its slot."""
    plan = crosses.plan
    singles, pairs = (np.array([part for part in plan.parts if len(part) == size]) for size in (1, 2))
    pieces = [graph.add("Gather", tokens, singles[:, 0], axis=1)] if len(singles) else []
    if len(pairs):
        factors = [graph.add("Gather", tokens, pairs[:, factor], axis=1) for factor in (0, 1)]
        pieces.append(graph.add("Mul", *factors))
    parts = _concat(graph, pieces)
    slots = np.array(plan.places)[np.argsort([len(part) for part in plan.parts], kind="stable")]
    return parts if slots.tolist() == list(range(plan.slots)) else _place_parts(graph, parts, slots, plan.slots)
