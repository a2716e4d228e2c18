"""Embeddings in ONNX: what ``lpfs.models.inputs.Inputs`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.data.store.format import AnyArray
from lpfs.export.preprocessing import Column
from lpfs.export.onnx_graph import Graph, weight
from lpfs.export.number_columns import Numbers as NumberColumn
from lpfs.models.dense_token import DenseToken
from lpfs.models.inputs import Inputs
from lpfs.models.layers import Numbers


@dataclass(frozen=True)
class Encoded:
    """Raw values as the model reads them, by the names of the results."""

    ids: dict[str, str]  # of each field (B,), or (B, L) of a bag
    dense: str | None  # (B, C)
    missing: str | None  # (B, C), 1.0 or 0.0
    rows: str  # (1,): B


def encoded(graph: Graph, columns: Sequence[Column]) -> Encoded:
    """Add all inputs, and what makes ids and numbers of them."""
    ids = {each.field.name: each.encode(graph) for each in columns if not isinstance(each, NumberColumn)}
    numbers = [each for each in columns if isinstance(each, NumberColumn)]
    dense, missing = _numbers(graph, numbers) if numbers else (None, None)
    rows = graph.add("Shape", graph.inputs[0].name, start=0, end=1)
    return Encoded(ids, dense, missing, rows)


def _numbers(graph: Graph, columns: Sequence[NumberColumn]) -> tuple[str, str]:
    """Compress and standardise all numbers side by side; a missing one reads 0.0."""
    kinds = graph.onnx.TensorProto
    raw = columns[0].scale is not None
    kind, dtype = (kinds.DOUBLE, np.float64) if raw else (kinds.FLOAT, np.float32)
    pieces = []
    for each in columns:
        value = graph.take_in(each.input, kind, each.shape, each.takes())
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


def embedded(graph: Graph, inputs: Inputs, path: str, given: Encoded) -> str:
    """Return (B, N, D + wide): the parts in the order of ``slots``."""
    pieces = []
    if inputs.table is not None:
        table = graph.constant(weight(inputs.table.weight), f"{path}.table.weight")
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
    return out if inputs.filled is None else placed(graph, out, weight(inputs.filled), len(inputs.slots))


def placed(graph: Graph, parts: str, places: AnyArray, slots: int) -> str:
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


def _of_numbers(graph: Graph, inputs: Inputs, path: str, given: Encoded) -> str:
    assert given.dense is not None
    assert given.missing is not None
    both = [given.dense, given.missing]
    if inputs.dense_columns is not None:
        columns = graph.constant(weight(inputs.dense_columns))
        both = [graph.add("Gather", each, columns, axis=1) for each in both]
    numbers: Any = inputs.numbers
    if isinstance(numbers, DenseToken):
        read = graph.add("Concat", *both, axis=1)
        return _tall(graph, layers(graph, numbers.bottom, f"{path}.numbers.bottom", read))
    assert isinstance(numbers, Numbers)
    terms = []
    for value, name in zip(both, ("weight", "missing"), strict=True):
        own = graph.constant(weight(getattr(numbers, name)), f"{path}.numbers.{name}")
        terms.append(graph.add("Mul", graph.add("Unsqueeze", value, graph.constant(np.array([2]))), own))
    out = graph.add("Add", *terms)  # (B, C, D)
    return out if numbers.plain else _summed(graph, numbers, out)


def _summed(graph: Graph, numbers: Numbers, out: str) -> str:
    """Add up the columns of each field."""
    out = graph.add("Gather", out, graph.constant(weight(numbers.grouped)), axis=1)
    sizes = [width * len(fields) for width, fields in numbers.groups.items()]
    pieces = []
    for piece, (width, fields) in zip(graph.split(out, sizes, 1), numbers.groups.items(), strict=True):
        shape = graph.constant(np.array([0, len(fields), width, numbers.dim]))  # 0: as it is
        columns = graph.add("Reshape", piece, shape)
        pieces.append(graph.add("ReduceSum", columns, graph.constant(np.array([2])), keepdims=0))
    joined = graph.add("Concat", *pieces, axis=1)
    return graph.add("Gather", joined, graph.constant(weight(numbers.order)), axis=1)


def layers(graph: Graph, modules: Any, path: str, value: str) -> str:
    """Add what ``dense_layers`` makes: Linear and ReLU in turn."""
    for number, module in enumerate(modules):
        is_linear = hasattr(module, "weight")
        value = graph.linear(value, module, f"{path}.{number}") if is_linear else graph.add("Relu", value)
    return value


def _tall(graph: Graph, value: str) -> str:
    """Return (B, 1, …) for (B, …)."""
    return graph.add("Unsqueeze", value, graph.constant(np.array([1])))
