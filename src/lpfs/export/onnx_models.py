"""Embeddings in ONNX: what ``lpfs.models.inputs.Inputs`` does.

The models in ONNX: what ``outputs`` of each does, a function a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError
from lpfs.export.onnx_graph import Graph, to_array
from lpfs.export.preprocessing import InputColumn
from lpfs.export.preprocessing import NumericColumn as NumberColumn
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.dcnv2 import DCNv2
from lpfs.models.dlrm import DLRM
from lpfs.models.dlrm_cross import DLRMCross
from lpfs.models.fm import FM
from lpfs.models.inputs import Inputs
from lpfs.models.layers import DenseToken, NumericEmbeddings
from lpfs.models.mlp import MLP
from lpfs.models.user_item import UserItem
from lpfs.models.wide_deep import WideDeep


@dataclass(frozen=True)
class EncodedInputs:
    """Raw values as the model reads them, by the names of the results."""

    ids: dict[str, str]  # of each field (B,), or (B, L) of a bag
    dense: str | None  # (B, C)
    missing: str | None  # (B, C), 1.0 or 0.0
    rows: str  # (1,): B


def add_inputs(graph: Graph, columns: Sequence[InputColumn]) -> EncodedInputs:
    """Add all inputs, and what makes ids and numbers of them."""
    ids = {each.field.name: each.encode(graph) for each in columns if not isinstance(each, NumberColumn)}
    numbers = [each for each in columns if isinstance(each, NumberColumn)]
    dense, missing = _numbers(graph, numbers) if numbers else (None, None)
    rows = graph.add("Shape", graph.inputs[0].name, start=0, end=1)
    return EncodedInputs(ids, dense, missing, rows)


def _numbers(graph: Graph, columns: Sequence[NumberColumn]) -> tuple[str, str]:
    """Compress and standardise all numbers side by side; a missing one reads 0.0."""
    kinds = graph.onnx.TensorProto
    raw = columns[0].scale is not None
    kind, dtype = (kinds.DOUBLE, np.float64) if raw else (kinds.FLOAT, np.float32)
    pieces = []
    for each in columns:
        value = graph.add_input(each.input, kind, each.shape, each.takes())
        pieces.append(_tall(graph, value) if each.field.dim == 1 else value)
    wide = graph.add("Concat", *pieces, axis=1)  # (B, C)
    missing = graph.add("Or", graph.add("IsNaN", wide), graph.add("IsInf", wide))
    wide = graph.add("Where", missing, graph.constant(np.array(0, dtype)), wide)
    if raw:
        wide = _scaled(graph, wide, columns)
        wide = graph.add("Where", missing, graph.constant(np.array(0, np.float32)), wide)
    return wide, graph.add("Cast", missing, to=kinds.FLOAT)


def _scaled(graph: Graph, wide: str, columns: Sequence[NumberColumn]) -> str:
    """Return what NumericEncoder makes of numbers: (sign(x)·log1p|x| or x, - mean) / deviation."""
    scales = [each.scale for each in columns if each.scale is not None]
    widths = [each.field.dim for each in columns]
    logarithmic = np.repeat([transform == "log" for transform, _, _ in scales], widths)[None]
    mean = np.concatenate([each for _, each, _ in scales])[None]
    deviation = np.concatenate([each for _, _, each in scales])[None]
    limit = graph.constant(np.array(1e150)), graph.constant(np.array(-1e150))
    plain = graph.add("Clip", wide, limit[1], limit[0])
    if logarithmic.any():
        size = graph.add("Abs", wide)
        log = graph.add("Mul", _log1p(graph, size), graph.add("Sign", wide))
        plain = log if logarithmic.all() else graph.add("Where", graph.constant(logarithmic), log, plain)
    moved = graph.add("Sub", plain, graph.constant(mean))
    scaled = graph.add("Div", moved, graph.constant(deviation))
    scaled = graph.add("Clip", scaled, graph.constant(np.array(-1e38)), graph.constant(np.array(1e38)))
    return graph.add("Cast", scaled, to=graph.onnx.TensorProto.FLOAT)


def _log1p(graph: Graph, size: str) -> str:
    """Return log(1 + x), exact for small x too: with u = 1 + x as it is rounded, log(u)·x / (u - 1)."""
    one = graph.constant(np.array(1.0))
    above = graph.add("Add", size, one)
    there = graph.add("Sub", above, one)
    lost = graph.add("Equal", there, graph.constant(np.array(0.0)))
    log = graph.add("Mul", graph.add("Log", above), size)
    log = graph.add("Div", log, graph.add("Where", lost, one, there))
    return graph.add("Where", lost, size, log)


def add_embeddings(graph: Graph, inputs: Inputs, path: str, given: EncodedInputs) -> str:
    """Return (B, N, D + wide): the parts in the order of ``slots``."""
    pieces = []
    if inputs.table is not None:
        table = graph.constant(to_array(inputs.table.weight), f"{path}.table.weight")
        first = np.cumsum([0, *inputs.table.sizes])
        if inputs.ids:
            names = inputs.names[: inputs.ids]
            ids = graph.add("Concat", *(_tall(graph, given.ids[name]) for name in names), axis=1)  # (B, F)
            rows = graph.add("Add", ids, graph.constant(first[None, : inputs.ids]))
            pieces.append(graph.add("Gather", table, rows, axis=0))
        for name, start in zip(inputs.bags, first[inputs.ids :].tolist(), strict=False):
            pieces.append(_tall(graph, _bag(graph, table, given.ids[name], start, mean=inputs.table.mean)))
    if inputs.numbers is not None:
        pieces.append(_of_numbers(graph, inputs, path, given))
    if not pieces:
        shape = graph.constant(np.array([len(inputs.slots), inputs.width]))
        return graph.add("ConstantOfShape", graph.add("Concat", given.rows, shape, axis=0))
    out = pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)
    return out if inputs.filled is None else place_parts(graph, out, to_array(inputs.filled), len(inputs.slots))


def place_parts(graph: Graph, parts: str, places: AnyArray, slots: int) -> str:
    """Return (B, slots, D) with the parts (B, P, D) in these places and zeros in the others."""
    index = np.full(slots, len(places))
    index[places] = np.arange(len(places))
    if (index == len(places)).any():
        parts = graph.add("Pad", parts, graph.constant(np.array([0, 0, 0, 0, 1, 0])))
    return graph.add("Gather", parts, graph.constant(index), axis=1)


def _bag(graph: Graph, table: str, ids: str, start: int, *, mean: bool) -> str:
    """Return (B, D): the sum or the mean of the rows of a bag; zeros for one without values."""
    there = graph.add("GreaterOrEqual", ids, graph.constant(np.array(0)))  # (B, L)
    row = graph.add("Add", ids, graph.constant(np.array(start)))
    row = graph.add("Where", there, row, graph.constant(np.array(0)))
    rows = graph.add("Gather", table, row, axis=0)  # (B, L, D)
    mask = graph.add("Unsqueeze", there, graph.constant(np.array([2])))
    rows = graph.add("Where", mask, rows, graph.constant(np.array(0, np.float32)))
    axis = graph.constant(np.array([1]))
    total = graph.add("ReduceSum", rows, axis, keepdims=0)
    if not mean:
        return total
    counted = graph.add("Cast", there, to=graph.onnx.TensorProto.FLOAT)
    count = graph.add("ReduceSum", counted, axis, keepdims=1)
    return graph.add("Div", total, graph.add("Max", count, graph.constant(np.array(1, np.float32))))


def _of_numbers(graph: Graph, inputs: Inputs, path: str, given: EncodedInputs) -> str:
    assert given.dense is not None
    assert given.missing is not None
    both = [given.dense, given.missing]
    if inputs.dense_columns is not None:
        columns = graph.constant(to_array(inputs.dense_columns))
        both = [graph.add("Gather", each, columns, axis=1) for each in both]
    numbers: Any = inputs.numbers
    if isinstance(numbers, DenseToken):
        read = graph.add("Concat", *both, axis=1)
        return _tall(graph, layers(graph, numbers.bottom, f"{path}.numbers.bottom", read))
    assert isinstance(numbers, NumericEmbeddings)
    terms = []
    for value, name in zip(both, ("weight", "missing"), strict=True):
        own = graph.constant(to_array(getattr(numbers, name)), f"{path}.numbers.{name}")
        terms.append(graph.add("Mul", graph.add("Unsqueeze", value, graph.constant(np.array([2]))), own))
    out = graph.add("Add", *terms)  # (B, C, D)
    return out if numbers.plain else _summed(graph, numbers, out)


def _summed(graph: Graph, numbers: NumericEmbeddings, out: str) -> str:
    """Add up the columns of each field."""
    out = graph.add("Gather", out, graph.constant(to_array(numbers.grouped)), axis=1)
    sizes = [width * len(fields) for width, fields in numbers.groups.items()]
    pieces = []
    for piece, (width, fields) in zip(graph.split(out, sizes, 1), numbers.groups.items(), strict=True):
        shape = graph.constant(np.array([0, len(fields), width, numbers.dim]))  # 0: as it is
        columns = graph.add("Reshape", piece, shape)
        pieces.append(graph.add("ReduceSum", columns, graph.constant(np.array([2])), keepdims=0))
    joined = graph.add("Concat", *pieces, axis=1)
    return graph.add("Gather", joined, graph.constant(to_array(numbers.order)), axis=1)


def layers(graph: Graph, modules: Any, path: str, value: str) -> str:
    """Add what ``dense_layers`` makes: Linear and ReLU in turn."""
    for number, module in enumerate(modules):
        is_linear = hasattr(module, "weight")
        value = graph.linear(value, module, f"{path}.{number}") if is_linear else graph.add("Relu", value)
    return value


def _tall(graph: Graph, value: str) -> str:
    """Return (B, 1, …) for (B, …)."""
    return graph.add("Unsqueeze", value, graph.constant(np.array([1])))


def logits(graph: Graph, model: Model, given: EncodedInputs) -> str:
    """Return logits (B, 1 + tasks)."""
    name = registered_name(model)
    if name not in BUILDERS:
        raise InputError(
            f"there is no ONNX form of model {name!r}, only of {', '.join(BUILDERS)}; add it to "
            "lpfs.export.onnx_models, or use format='torch'"
        )
    return BUILDERS[name](graph, model, given)


def mlp(graph: Graph, model: MLP, given: EncodedInputs) -> str:
    """Embeddings side by side, then dense layers."""
    return layers(graph, model.top, "top", _flat(graph, add_embeddings(graph, model.inputs, "inputs", given)))


def wide_deep(graph: Graph, model: WideDeep, given: EncodedInputs) -> str:
    """Dense layers, and linear weights beside them."""
    tokens, wide = _wide(graph, model, given)
    return graph.add("Add", layers(graph, model.top, "top", _flat(graph, tokens)), _sum(graph, wide))


def deepfm(graph: Graph, model: WideDeep, given: EncodedInputs) -> str:
    """Wide & Deep, and all pairs."""
    tokens, wide = _wide(graph, model, given)
    deep = graph.add("Add", layers(graph, model.top, "top", _flat(graph, tokens)), _sum(graph, wide))
    return graph.add("Add", deep, _pairwise(graph, tokens))


def fm(graph: Graph, model: FM, given: EncodedInputs) -> str:
    """Linear weights, all pairs and a bias."""
    tokens, wide = _wide(graph, model, given)
    both = graph.add("Add", _sum(graph, wide), _pairwise(graph, tokens))
    return graph.add("Add", both, graph.constant(to_array(model.bias), "linear.bias"))


def dcnv2(graph: Graph, model: DCNv2, given: EncodedInputs) -> str:
    """Cross layers under the dense ones, or beside them."""
    start = crossed = _flat(graph, add_embeddings(graph, model.inputs, "inputs", given))
    for number, layer in enumerate(model.crosses):
        path = f"crosses.{number}"
        if hasattr(layer, "weight"):
            made = graph.linear(crossed, layer, path)
        else:
            made = layers(graph, layer, path, crossed)
        crossed = graph.add("Add", crossed, graph.add("Mul", start, made))
    if model.beside is None:
        return layers(graph, model.top, "top", crossed)
    deep = layers(graph, model.top, "top", start)
    return graph.add("Add", deep, graph.linear(crossed, model.beside, "beside"))


def dlrm(graph: Graph, model: DLRM, given: EncodedInputs) -> str:
    """Concatenation, or the dot products of all pairs with the token of the numbers before them."""
    tokens = add_embeddings(graph, model.inputs, "inputs", given)
    read = _flat(graph, tokens)
    if model.pairs is not None:
        products = graph.add("MatMul", tokens, graph.add("Transpose", tokens, perm=[0, 2, 1]))
        read = graph.add("Gather", _flat(graph, products), graph.constant(to_array(model.pairs)), axis=1)
        if model.has_token:
            last = graph.add("Gather", tokens, graph.constant(np.array(len(model.inputs.slots) - 1)), axis=1)
            read = graph.add("Concat", last, read, axis=1)
    return layers(graph, model.top, "top", read)


def dlrm_cross(graph: Graph, model: DLRMCross, given: EncodedInputs) -> str:
    """Embeddings and products of two, then dense layers."""
    tokens = add_embeddings(graph, model.inputs, "inputs", given)
    return layers(graph, model.top, "top", _flat(graph, _crosses(graph, model.crosses, tokens)))


def user_item(graph: Graph, model: UserItem, given: EncodedInputs) -> str:
    """Products of user and item fields, the others beside them, shared layers, a head a task."""
    pieces = []
    if model.pairs:
        tokens = add_embeddings(graph, model.inputs, "inputs", given)
        pieces.append(_flat(graph, _crosses(graph, model.crosses, tokens)))
    for path in ("others", "numbers"):
        inputs = getattr(model, path)
        if inputs.slots:
            pieces.append(_flat(graph, add_embeddings(graph, inputs, path, given)))
    read = pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)
    shared = layers(graph, model.top, "top", read)
    heads = [layers(graph, head, f"heads.{number}", shared) for number, head in enumerate(model.heads)]
    return heads[0] if len(heads) == 1 else graph.add("Concat", *heads, axis=1)


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


def _flat(graph: Graph, value: str) -> str:
    return graph.add("Flatten", value, axis=1)


def _sum(graph: Graph, value: str) -> str:
    """Return (B, D) for (B, N, D)."""
    return graph.add("ReduceSum", value, graph.constant(np.array([1])), keepdims=0)


def _wide(graph: Graph, model: Model, given: EncodedInputs) -> tuple[str, str]:
    """Return embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
    inputs = model.inputs
    both = add_embeddings(graph, inputs, "inputs", given)
    tokens, wide = graph.split(both, [inputs.dim, inputs.width - inputs.dim], 2)
    return tokens, wide


def _pairwise(graph: Graph, tokens: str) -> str:
    """Return the sum over all pairs of ⟨e_i, e_j⟩ as (B, 1)."""
    total = _sum(graph, tokens)
    squares = _sum(graph, graph.add("Mul", tokens, tokens))
    both = graph.add("Sub", graph.add("Mul", total, total), squares)
    summed = graph.add("ReduceSum", both, graph.constant(np.array([1])), keepdims=1)
    return graph.add("Mul", summed, graph.constant(np.array(0.5, np.float32)))


def _crosses(graph: Graph, crosses: Crosses, tokens: str) -> str:
    """Return (B, slots, D): embeddings and products of two in their places."""
    plan = crosses.plan
    alone = [number for number, part in enumerate(plan.parts) if len(part) == 1]
    pairs = [number for number, part in enumerate(plan.parts) if len(part) == 2]

    def pick(numbers: list[int], factor: int) -> str:
        index = np.array([plan.parts[number][factor] for number in numbers])
        return graph.add("Gather", tokens, graph.constant(index), axis=1)

    pieces = [pick(alone, 0)] if alone else []
    if pairs:
        pieces.append(graph.add("Mul", pick(pairs, 0), pick(pairs, 1)))
    parts = pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)
    places = np.array(plan.places)[[*alone, *pairs]]
    if places.tolist() == list(range(plan.slots)):
        return parts
    return place_parts(graph, parts, places, plan.slots)
