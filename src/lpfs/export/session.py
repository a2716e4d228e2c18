"""A model in ONNX Runtime: the graph of ``lpfs.export`` with ids as one matrix, and weights shared, not copied.

For few rows it takes a third of the time of the torch model (``benchmarks/serve_load.py throughput``). The graph is
built from a model in memory that was checked before: no ONNX file is read. Weights are inputs of the graph, which are
used where they are; ONNX Runtime copies every initializer. So models that differ only in their weights share a session,
whose creation would hold the GIL for more than a millisecond; so do models with the fields of one of the last models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError, MissingPackageError
from lpfs.export.onnx_graph import Graph, to_array
from lpfs.export.onnx_models import EncodedInputs, add_logits
from lpfs.export.parity import padded
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs, fields_by_kind
from lpfs.schema import Schema

RUNTIME = "onnxruntime"
Predict = Callable[[Batch], Tensor]


class SharedGraph(Graph):
    """A graph whose weights are inputs, and their values in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, AnyArray] = {}

    def weight(self, tensor: Tensor, name: str) -> str:
        if name not in self.shared:
            values = np.ascontiguousarray(to_array(tensor))
            self.add_input(name, self.onnx.helper.np_dtype_to_tensor_dtype(values.dtype), values.shape, "a weight")
            self.shared[name] = values
        return name


@dataclass(frozen=True)
class SessionGraph:
    """What ONNX Runtime runs: the graph, the weights, which are its inputs, and the fields that it reads."""

    graph: bytes
    weights: Mapping[str, AnyArray]
    schema: Schema


def build_session_graph(model: Model) -> SessionGraph | None:
    """Return the graph of a model; None if the packages are missing or the model has no such graph."""
    if sum(isinstance(module, Inputs) for module in model.modules()) != 1:
        return None  # each of several would need its own part of the matrix
    try:
        import_module(RUNTIME)
        graph = SharedGraph()
        ids, bags, dense = fields_by_kind(model.reads)
        types = graph.onnx.TensorProto
        matrix = graph.add_input("ids", types.INT64, ["B", len(ids)], "ids") if ids else None
        names = {field.name: f"bag_{number}" for number, field in enumerate(bags)}
        for name in names.values():
            graph.add_input(name, types.INT64, ["B", f"{name}_length"], "ids of a bag, -1 is padding")
        numbers = [("dense", "numbers"), ("missing", "1.0 where a number is missing")] if dense else []
        for name, text in numbers:
            graph.add_input(name, types.FLOAT, ["B", sum(field.dim for field in dense)], text)
        rows = graph.add("Shape", graph.inputs[0].name, start=0, end=1)
        encoded = EncodedInputs(names, "dense" if dense else None, "missing" if dense else None, rows, matrix)
        logits = add_logits(graph, model, encoded)
        outputs = 1 + len(model.schema.tasks)
        graph.add("Identity", logits, out="logit") if outputs > 1 else graph.add(
            "Gather", logits, 0, axis=1, out="logit"
        )
        graph.add_output("logit", ["B", outputs] if outputs > 1 else ["B"], "logits")
        return SessionGraph(graph.to_model("").SerializeToString(), graph.shared, model.reads)
    except (ImportError, MissingPackageError, InputError, KeyError):
        return None  # torch answers


class RuntimeModel:
    """A model in ONNX Runtime: a function from batches to logits.

    Args:
        source: graph and weights.
        threads: threads of one prediction.
    """

    def __init__(self, source: SessionGraph, *, threads: int = 1) -> None:
        self.source = source
        self._columns = fields_by_kind(source.schema)
        self._session: Any = make_session(source.graph, threads)

    def __call__(self, batch: Batch) -> Tensor:
        """Return logits (B,), or (B, 1 + tasks)."""
        (ids, bags, dense), feeds = self._columns, dict(self.source.weights)
        if ids:
            feeds["ids"] = batch.ids.numpy().astype(np.int64)
        for number, field in enumerate(bags):
            feeds[f"bag_{number}"] = padded(*batch.bags[field.name])
        if dense:
            feeds["dense"] = batch.dense.numpy()
            absent: Any = np.zeros_like(feeds["dense"]) if batch.missing is None else batch.missing.numpy()
            feeds["missing"] = absent.astype(np.float32)
        [logits] = self._session.run(["logit"], feeds)
        return torch.from_numpy(logits)


@lru_cache(maxsize=4)  # a session holds the memory of its largest request, no weights; several threads may use it
def make_session(graph: bytes, threads: int) -> Any:
    """Return a session of ONNX Runtime; the latest ones are kept."""
    runtime = import_module(RUNTIME)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # more only takes longer
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
