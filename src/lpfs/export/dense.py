"""The models in ONNX: what ``outputs`` of each does, a function a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lpfs.errors import InputError
from lpfs.export.onnx_graph import Graph, weight
from lpfs.export.onnx_models import Encoded, embedded, layers, placed
from lpfs.models.crosses import Crosses
from lpfs.models.dcnv2 import DCNv2
from lpfs.models.dlrm import DLRM
from lpfs.models.dlrm_cross import DLRMCross
from lpfs.models.fm import FM
from lpfs.models.mlp import MLP
from lpfs.models.base import Model
from lpfs.models.registry import name_of
from lpfs.models.user_item import UserItem
from lpfs.models.wide_deep import WideDeep


def logits(graph: Graph, model: Model, given: Encoded) -> str:
    """Return logits (B, 1 + tasks)."""
    name = name_of(model)
    if name not in BUILDERS:
        raise InputError(
            f"there is no ONNX form of model {name!r}, only of {', '.join(BUILDERS)}; add it to "
            "lpfs.export.dense, or use format='torch'"
        )
    return BUILDERS[name](graph, model, given)


def mlp(graph: Graph, model: MLP, given: Encoded) -> str:
    """Embeddings side by side, then dense layers."""
    return layers(graph, model.top, "top", _flat(graph, embedded(graph, model.inputs, "inputs", given)))


def wide_deep(graph: Graph, model: WideDeep, given: Encoded) -> str:
    """Dense layers, and linear weights beside them."""
    tokens, wide = _wide(graph, model, given)
    return graph.add("Add", layers(graph, model.top, "top", _flat(graph, tokens)), _sum(graph, wide))


def deepfm(graph: Graph, model: WideDeep, given: Encoded) -> str:
    """Wide & Deep, and all pairs."""
    tokens, wide = _wide(graph, model, given)
    deep = graph.add("Add", layers(graph, model.top, "top", _flat(graph, tokens)), _sum(graph, wide))
    return graph.add("Add", deep, _all_pairs(graph, tokens))


def fm(graph: Graph, model: FM, given: Encoded) -> str:
    """Linear weights, all pairs and a bias."""
    tokens, wide = _wide(graph, model, given)
    both = graph.add("Add", _sum(graph, wide), _all_pairs(graph, tokens))
    return graph.add("Add", both, graph.constant(weight(model.bias), "linear.bias"))


def dcnv2(graph: Graph, model: DCNv2, given: Encoded) -> str:
    """Cross layers under the dense ones, or beside them."""
    start = crossed = _flat(graph, embedded(graph, model.inputs, "inputs", given))
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


def dlrm(graph: Graph, model: DLRM, given: Encoded) -> str:
    """Concatenation, or the dot products of all pairs with the token of the numbers before them."""
    tokens = embedded(graph, model.inputs, "inputs", given)
    read = _flat(graph, tokens)
    if model.pairs is not None:
        products = graph.add("MatMul", tokens, graph.add("Transpose", tokens, perm=[0, 2, 1]))
        read = graph.add("Gather", _flat(graph, products), graph.constant(weight(model.pairs)), axis=1)
        if model.has_token:
            last = graph.add("Gather", tokens, graph.constant(np.array(len(model.inputs.slots) - 1)), axis=1)
            read = graph.add("Concat", last, read, axis=1)
    return layers(graph, model.top, "top", read)


def dlrm_cross(graph: Graph, model: DLRMCross, given: Encoded) -> str:
    """Embeddings and products of two, then dense layers."""
    tokens = embedded(graph, model.inputs, "inputs", given)
    return layers(graph, model.top, "top", _flat(graph, _crosses(graph, model.crosses, tokens)))


def user_item(graph: Graph, model: UserItem, given: Encoded) -> str:
    """Products of user and item fields, the others beside them, shared layers, a head a task."""
    pieces = []
    if model.pairs:
        tokens = embedded(graph, model.inputs, "inputs", given)
        pieces.append(_flat(graph, _crosses(graph, model.crosses, tokens)))
    for path in ("others", "numbers"):
        inputs = getattr(model, path)
        if inputs.slots:
            pieces.append(_flat(graph, embedded(graph, inputs, path, given)))
    read = pieces[0] if len(pieces) == 1 else graph.add("Concat", *pieces, axis=1)
    shared = layers(graph, model.top, "top", read)
    heads = [layers(graph, head, f"heads.{number}", shared) for number, head in enumerate(model.heads)]
    return heads[0] if len(heads) == 1 else graph.add("Concat", *heads, axis=1)


BUILDERS: dict[str, Callable[[Graph, Any, Encoded], str]] = {
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


def _wide(graph: Graph, model: Model, given: Encoded) -> tuple[str, str]:
    """Return embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
    inputs = model.inputs
    both = embedded(graph, inputs, "inputs", given)
    tokens, wide = graph.split(both, [inputs.dim, inputs.width - inputs.dim], 2)
    return tokens, wide


def _all_pairs(graph: Graph, tokens: str) -> str:
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
    return placed(graph, parts, places, plan.slots)
