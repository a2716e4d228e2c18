"""The models as ONNX graphs: encoded inputs, embeddings (``lpfs.models.inputs.Inputs``), one builder per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError
from lpfs.export.onnx_graph import Graph, to_array
from lpfs.export.preprocessing import InputColumn, NumericColumn
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.dcnv2 import DCNv2
from lpfs.models.dlrm import DLRM, DLRMCross
from lpfs.models.inputs import Inputs
from lpfs.models.layers import DenseToken, NumericEmbeddings
from lpfs.models.mlp import FM, MLP, WideDeep
from lpfs.models.user_item import UserItem

# ----------------------------------------------------------------------------------- inputs of the model


@dataclass(frozen=True)
class EncodedInputs:
    """Names of the results that hold the inputs of the model."""

    ids: dict[str, str]  # field -> ids (B,), or (B, L) for a bag
    dense: str | None  # (B, C)
    missing: str | None  # (B, C), 1.0 or 0.0
    rows: str  # (1,): B


def add_inputs(graph: Graph, columns: Sequence[InputColumn]) -> EncodedInputs:
    """Add all inputs and the nodes that turn raw values into ids and standardised numbers."""
    ids = {column.field.name: column.encode(graph) for column in columns if not isinstance(column, NumericColumn)}
    numeric = [column for column in columns if isinstance(column, NumericColumn)]
    dense, missing = _standardised(graph, numeric) if numeric else (None, None)
    rows = graph.add("Shape", graph.inputs[0].name, start=0, end=1)
    return EncodedInputs(ids, dense, missing, rows)


def _standardised(graph: Graph, columns: Sequence[NumericColumn]) -> tuple[str, str]:
    """Return all numeric columns (B, C), transformed and standardised, 0.0 where missing; and the missing mask."""
    types = graph.onnx.TensorProto
    raw = columns[0].scale is not None
    onnx_type, dtype = (types.DOUBLE, np.float64) if raw else (types.FLOAT, np.float32)
    pieces = []
    for column in columns:
        value = graph.add_input(column.input, onnx_type, column.shape, column.description())
        pieces.append(_unsqueeze(graph, value) if column.field.dim == 1 else value)
    values = graph.add("Concat", *pieces, axis=1)  # (B, C)
    missing = graph.add("Or", graph.add("IsNaN", values), graph.add("IsInf", values))
    values = graph.add("Where", missing, graph.constant(np.array(0, dtype)), values)
    if raw:
        values = _scaled(graph, values, columns)
        values = graph.add("Where", missing, graph.constant(np.array(0, np.float32)), values)
    return values, graph.add("Cast", missing, to=types.FLOAT)


def _scaled(graph: Graph, values: str, columns: Sequence[NumericColumn]) -> str:
    """Return what NumericEncoder computes: (sign(x)·log1p|x| or x, - mean) / deviation."""
    scales = [column.scale for column in columns if column.scale is not None]
    widths = [column.field.dim for column in columns]
    logarithmic = np.repeat([transform == "log" for transform, _, _ in scales], widths)[None]
    means = np.concatenate([mean for _, mean, _ in scales])[None]
    deviations = np.concatenate([deviation for _, _, deviation in scales])[None]
    result = graph.add("Clip", values, graph.constant(np.array(-1e150)), graph.constant(np.array(1e150)))
    if logarithmic.any():
        log = graph.add("Mul", _log1p(graph, graph.add("Abs", values)), graph.add("Sign", values))
        result = log if logarithmic.all() else graph.add("Where", graph.constant(logarithmic), log, result)
    centred = graph.add("Sub", result, graph.constant(means))
    scaled = graph.add("Div", centred, graph.constant(deviations))
    scaled = graph.add("Clip", scaled, graph.constant(np.array(-1e38)), graph.constant(np.array(1e38)))
    return graph.add("Cast", scaled, to=graph.onnx.TensorProto.FLOAT)


def _log1p(graph: Graph, value: str) -> str:
    """Return log(1 + x), accurate for small x: with u = 1 + x as rounded, log(u)·x / (u - 1), or x if u = 1."""
    one = graph.constant(np.array(1.0))
    u = graph.add("Add", value, one)
    rounded = graph.add("Sub", u, one)
    is_zero = graph.add("Equal", rounded, graph.constant(np.array(0.0)))
    log = graph.add("Mul", graph.add("Log", u), value)
    log = graph.add("Div", log, graph.add("Where", is_zero, one, rounded))
    return graph.add("Where", is_zero, value, log)


# ------------------------------------------------------------------------------------------- embeddings


def add_embeddings(graph: Graph, inputs: Inputs, path: str, encoded: EncodedInputs) -> str:
    """Return the embeddings (B, N, D + wide), in the order of ``inputs.slots``."""
    pieces = []
    if inputs.table is not None:
        table = graph.constant(to_array(inputs.table.weight), f"{path}.table.weight")
        starts = np.cumsum([0, *inputs.table.sizes])
        if inputs.ids:
            names = inputs.names[: inputs.ids]
            ids = graph.add("Concat", *(_unsqueeze(graph, encoded.ids[name]) for name in names), axis=1)  # (B, F)
            rows = graph.add("Add", ids, graph.constant(starts[None, : inputs.ids]))
            pieces.append(graph.add("Gather", table, rows, axis=0))
        for name, start in zip(inputs.bags, starts[inputs.ids :].tolist(), strict=False):
            pooled = _pooled_bag(graph, table, encoded.ids[name], start, mean=inputs.table.mean)
            pieces.append(_unsqueeze(graph, pooled))
    if inputs.numbers is not None:
        pieces.append(_numeric_embeddings(graph, inputs, path, encoded))
    if not pieces:
        shape = graph.constant(np.array([len(inputs.slots), inputs.width]))
        return graph.add("ConstantOfShape", graph.add("Concat", encoded.rows, shape, axis=0))
    parts = _concat(graph, pieces)
    return parts if inputs.filled is None else place_parts(graph, parts, to_array(inputs.filled), len(inputs.slots))


def place_parts(graph: Graph, parts: str, positions: AnyArray, slots: int) -> str:
    """Return (B, slots, D) with the parts (B, P, D) at these positions and zeros at the others."""
    index = np.full(slots, len(positions))
    index[positions] = np.arange(len(positions))
    if (index == len(positions)).any():
        parts = graph.add("Pad", parts, graph.constant(np.array([0, 0, 0, 0, 1, 0])))
    return graph.add("Gather", parts, graph.constant(index), axis=1)


def _pooled_bag(graph: Graph, table: str, ids: str, start: int, *, mean: bool) -> str:
    """Return (B, D): the sum or the mean of the rows of a bag; zeros for an empty bag."""
    valid = graph.add("GreaterOrEqual", ids, graph.constant(np.array(0)))  # (B, L)
    index = graph.add("Add", ids, graph.constant(np.array(start)))
    index = graph.add("Where", valid, index, graph.constant(np.array(0)))
    rows = graph.add("Gather", table, index, axis=0)  # (B, L, D)
    mask = graph.add("Unsqueeze", valid, graph.constant(np.array([2])))
    rows = graph.add("Where", mask, rows, graph.constant(np.array(0, np.float32)))
    axis = graph.constant(np.array([1]))
    total = graph.add("ReduceSum", rows, axis, keepdims=0)
    if not mean:
        return total
    count = graph.add("ReduceSum", graph.add("Cast", valid, to=graph.onnx.TensorProto.FLOAT), axis, keepdims=1)
    return graph.add("Div", total, graph.add("Max", count, graph.constant(np.array(1, np.float32))))


def _numeric_embeddings(graph: Graph, inputs: Inputs, path: str, encoded: EncodedInputs) -> str:
    assert encoded.dense is not None
    assert encoded.missing is not None
    values = [encoded.dense, encoded.missing]
    if inputs.dense_columns is not None:
        columns = graph.constant(to_array(inputs.dense_columns))
        values = [graph.add("Gather", value, columns, axis=1) for value in values]
    numbers: Any = inputs.numbers
    if isinstance(numbers, DenseToken):
        concatenated = graph.add("Concat", *values, axis=1)
        return _unsqueeze(graph, add_layers(graph, numbers.bottom, f"{path}.numbers.bottom", concatenated))
    assert isinstance(numbers, NumericEmbeddings)
    terms = []
    for value, name in zip(values, ("weight", "missing"), strict=True):
        weight = graph.constant(to_array(getattr(numbers, name)), f"{path}.numbers.{name}")
        terms.append(graph.add("Mul", graph.add("Unsqueeze", value, graph.constant(np.array([2]))), weight))
    columns = graph.add("Add", *terms)  # (B, C, D)
    return columns if numbers.plain else _sum_by_field(graph, numbers, columns)


def _sum_by_field(graph: Graph, numbers: NumericEmbeddings, columns: str) -> str:
    """Sum the columns (B, C, D) of each field."""
    columns = graph.add("Gather", columns, graph.constant(to_array(numbers.grouped)), axis=1)
    sizes = [width * len(fields) for width, fields in numbers.groups.items()]
    sums = []
    for piece, (width, fields) in zip(graph.split(columns, sizes, 1), numbers.groups.items(), strict=True):
        shape = graph.constant(np.array([0, len(fields), width, numbers.dim]))  # 0: unchanged
        grouped = graph.add("Reshape", piece, shape)
        sums.append(graph.add("ReduceSum", grouped, graph.constant(np.array([2])), keepdims=0))
    joined = graph.add("Concat", *sums, axis=1)
    return graph.add("Gather", joined, graph.constant(to_array(numbers.order)), axis=1)


# ---------------------------------------------------------------------------------------------- models


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
    return add_layers(graph, model.top, "top", _flatten(graph, add_embeddings(graph, model.inputs, "inputs", encoded)))


def wide_deep(graph: Graph, model: WideDeep, encoded: EncodedInputs) -> str:
    """Dense layers plus linear weights."""
    tokens, wide = _deep_and_wide(graph, model, encoded)
    return graph.add("Add", add_layers(graph, model.top, "top", _flatten(graph, tokens)), _sum(graph, wide))


def deepfm(graph: Graph, model: WideDeep, encoded: EncodedInputs) -> str:
    """Wide & Deep plus the products of all pairs."""
    tokens, wide = _deep_and_wide(graph, model, encoded)
    deep = graph.add("Add", add_layers(graph, model.top, "top", _flatten(graph, tokens)), _sum(graph, wide))
    return graph.add("Add", deep, _pairwise(graph, tokens))


def fm(graph: Graph, model: FM, encoded: EncodedInputs) -> str:
    """Linear weights, the products of all pairs and a bias."""
    tokens, wide = _deep_and_wide(graph, model, encoded)
    total = graph.add("Add", _sum(graph, wide), _pairwise(graph, tokens))
    return graph.add("Add", total, graph.constant(to_array(model.bias), "linear.bias"))


def dcnv2(graph: Graph, model: DCNv2, encoded: EncodedInputs) -> str:
    """Cross layers, followed by the dense layers or parallel to them."""
    start = crossed = _flatten(graph, add_embeddings(graph, model.inputs, "inputs", encoded))
    for number, layer in enumerate(model.crosses):
        path = f"crosses.{number}"
        is_linear = hasattr(layer, "weight")
        projected = graph.linear(crossed, layer, path) if is_linear else add_layers(graph, layer, path, crossed)
        crossed = graph.add("Add", crossed, graph.add("Mul", start, projected))
    if model.beside is None:
        return add_layers(graph, model.top, "top", crossed)
    deep = add_layers(graph, model.top, "top", start)
    return graph.add("Add", deep, graph.linear(crossed, model.beside, "beside"))


def dlrm(graph: Graph, model: DLRM, encoded: EncodedInputs) -> str:
    """Concatenation, or the dense token followed by the dot products of all pairs."""
    tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
    top_input = _flatten(graph, tokens)
    if model.pairs is not None:
        products = graph.add("MatMul", tokens, graph.add("Transpose", tokens, perm=[0, 2, 1]))
        top_input = graph.add("Gather", _flatten(graph, products), graph.constant(to_array(model.pairs)), axis=1)
        if model.has_token:
            last = graph.add("Gather", tokens, graph.constant(np.array(len(model.inputs.slots) - 1)), axis=1)
            top_input = graph.add("Concat", last, top_input, axis=1)
    return add_layers(graph, model.top, "top", top_input)


def dlrm_cross(graph: Graph, model: DLRMCross, encoded: EncodedInputs) -> str:
    """Embeddings and their pairwise products, then dense layers."""
    tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
    return add_layers(graph, model.top, "top", _flatten(graph, _crosses(graph, model.crosses, tokens)))


def user_item(graph: Graph, model: UserItem, encoded: EncodedInputs) -> str:
    """Products of user and item fields, the other fields, shared layers, one head per task."""
    pieces = []
    if model.pairs:
        tokens = add_embeddings(graph, model.inputs, "inputs", encoded)
        pieces.append(_flatten(graph, _crosses(graph, model.crosses, tokens)))
    for path in ("others", "numbers"):
        inputs = getattr(model, path)
        if inputs.slots:
            pieces.append(_flatten(graph, add_embeddings(graph, inputs, path, encoded)))
    shared = add_layers(graph, model.top, "top", _concat(graph, pieces))
    heads = [add_layers(graph, head, f"heads.{number}", shared) for number, head in enumerate(model.heads)]
    return _concat(graph, heads)


BUILDERS: dict[str, Callable[[Graph, Any, EncodedInputs], str]] = {
    "mlp": mlp,
    "wide_deep": wide_deep,
    "fm": fm,
    "deepfm": deepfm,
    "dcnv2": dcnv2,
    "dlrm": dlrm,
    "dlrm_cross": dlrm_cross,
    "user_item": user_item,
}


# ---------------------------------------------------------------------------------------------- pieces


def add_layers(graph: Graph, modules: Any, path: str, value: str) -> str:
    """Add the layers of ``dense_layers``: alternating Linear and ReLU."""
    for number, module in enumerate(modules):
        is_linear = hasattr(module, "weight")
        value = graph.linear(value, module, f"{path}.{number}") if is_linear else graph.add("Relu", value)
    return value


def _unsqueeze(graph: Graph, value: str) -> str:
    """Return (B, 1, …) for (B, …)."""
    return graph.add("Unsqueeze", value, graph.constant(np.array([1])))


def _flatten(graph: Graph, value: str) -> str:
    return graph.add("Flatten", value, axis=1)


def _concat(graph: Graph, pieces: Sequence[str]) -> str:
    return pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)


def _sum(graph: Graph, value: str) -> str:
    """Return (B, D) for (B, N, D)."""
    return graph.add("ReduceSum", value, graph.constant(np.array([1])), keepdims=0)


def _deep_and_wide(graph: Graph, model: Model, encoded: EncodedInputs) -> tuple[str, str]:
    """Return embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
    inputs = model.inputs
    both = add_embeddings(graph, inputs, "inputs", encoded)
    tokens, wide = graph.split(both, [inputs.dim, inputs.width - inputs.dim], 2)
    return tokens, wide


def _pairwise(graph: Graph, tokens: str) -> str:
    """Return the sum over all pairs of ⟨e_i, e_j⟩ as (B, 1)."""
    total = _sum(graph, tokens)
    squares = _sum(graph, graph.add("Mul", tokens, tokens))
    difference = graph.add("Sub", graph.add("Mul", total, total), squares)
    summed = graph.add("ReduceSum", difference, graph.constant(np.array([1])), keepdims=1)
    return graph.add("Mul", summed, graph.constant(np.array(0.5, np.float32)))


def _crosses(graph: Graph, crosses: Crosses, tokens: str) -> str:
    """Return (B, slots, D): embeddings and products of two, each in its slot."""
    plan = crosses.plan
    singles = [number for number, part in enumerate(plan.parts) if len(part) == 1]
    pairs = [number for number, part in enumerate(plan.parts) if len(part) == 2]

    def factors(numbers: list[int], position: int) -> str:
        index = np.array([plan.parts[number][position] for number in numbers])
        return graph.add("Gather", tokens, graph.constant(index), axis=1)

    pieces = [factors(singles, 0)] if singles else []
    if pairs:
        pieces.append(graph.add("Mul", factors(pairs, 0), factors(pairs, 1)))
    parts = _concat(graph, pieces)
    slots = np.array(plan.places)[[*singles, *pairs]]
    return parts if slots.tolist() == list(range(plan.slots)) else place_parts(graph, parts, slots, plan.slots)
