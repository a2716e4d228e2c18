"""A model in ONNX Runtime: the graph of ``lpfs.export`` with ids as one matrix, and the weights shared, not copied.

For few rows it takes a third of the time of the torch model (``benchmarks/serve_load.py throughput``). The graph is
built from a model in memory that was checked before: no ONNX file is read.
"""

from __future__ import annotations

from collections.abc import Callable
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

SHARED_BYTES = 1 << 10  # smaller weights are part of the graph
Predict = Callable[[Batch], Tensor]


class SharedGraph(Graph):
    """A graph that refers to the weights in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, AnyArray] = {}

    def weight(self, tensor: Tensor, name: str) -> str:
        values = np.ascontiguousarray(to_array(tensor))
        if values.nbytes < SHARED_BYTES:
            return self._store(values, name)
        proto = self.onnx.TensorProto(name=name, dims=values.shape)
        proto.data_type = self.onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        proto.data_location = self.onnx.TensorProto.EXTERNAL
        for key, value in (("location", "memory"), ("offset", 0), ("length", values.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self.constants[name], self.shared[name] = proto, values
        return name


def make_session(model: Model, threads: int = 1) -> Predict | None:
    """Return a function from batches to logits; None if the packages are missing or the model has no such graph."""
    if sum(isinstance(module, Inputs) for module in model.modules()) != 1:
        return None  # each of several would need its own part of the matrix
    try:
        runtime = import_module("onnxruntime")
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
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        shared = [runtime.OrtValue.ortvalue_from_numpy(values) for values in graph.shared.values()]
        options.add_external_initializers(list(graph.shared), shared)
        data = graph.to_model("").SerializeToString()
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except (ImportError, MissingPackageError, InputError, KeyError):
        return None  # torch answers

    def predict(batch: Batch) -> Tensor:
        feeds: dict[str, AnyArray] = {}
        if ids:
            feeds["ids"] = batch.ids.numpy().astype(np.int64)
        for name, place in names.items():
            feeds[place] = padded(*batch.bags[name])
        if dense:
            feeds["dense"] = batch.dense.numpy()
            absent: Any = np.zeros_like(feeds["dense"]) if batch.missing is None else batch.missing.numpy()
            feeds["missing"] = absent.astype(np.float32)
        [logits] = session.run(["logit"], feeds)
        return torch.from_numpy(logits)

    predict.shared = graph.shared  # type: ignore[attr-defined]  # the session refers to this memory
    return predict
