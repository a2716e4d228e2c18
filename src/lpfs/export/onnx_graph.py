"""Graph: an ONNX graph under construction, and the separate file of large weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from lpfs._imports import import_optional
from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError

OPSET, ML_OPSET, IR_VERSION = 18, 4, 9  # ai.onnx.ml 4 is the first with float64 keys in LabelEncoder
MAX_FILE_BYTES = (1 << 31) - (1 << 20)  # protobuf limit of one file: 2 GiB, minus a margin
EXTERNAL_DATA_BYTES = 1 << 30  # total bytes of weights from which on large weights go to a separate file
MIN_EXTERNAL_BYTES = 1 << 20  # bytes from which on a weight counts as large
PAGE_BYTES = 4096  # alignment of weights in the separate file


class Graph:
    """An ONNX graph that grows node by node; every method that adds a computation returns the result's name.

    Names of inputs and outputs contain neither / nor a dot, all other names contain one: they never collide.

    Args:
        external_file: file that large weights are written to, in the directory of the model file.
    """

    def __init__(self, external_file: Path | None = None) -> None:
        self.external_file = external_file
        self.onnx = import_onnx()
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._unnamed: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._bytes = 0

    def add(self, op: str, *inputs: npt.ArrayLike, out: str | None = None, **attributes: Any) -> str:
        """Add a node with one result; every input is the name of a result, or the values of a constant."""
        return self._add_node(op, inputs, [out or f"/{op}_{len(self.nodes)}/out"], attributes)[0]

    def split(self, value: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Split a value along one axis."""
        results = [f"/Split_{len(self.nodes)}/out_{number}" for number in range(len(sizes))]
        return self._add_node("Split", [value, sizes], results, {"axis": axis})

    def _add_node(self, op: str, inputs: Sequence[Any], results: list[str], attributes: dict[str, Any]) -> list[str]:
        name = f"/{op}_{len(self.nodes)}"
        names = [value if isinstance(value, str) else self._constant(np.asarray(value)) for value in inputs]
        self.nodes.append(self.onnx.helper.make_node(op, names, results, name=name, **attributes))
        return results

    def _constant(self, values: AnyArray) -> str:
        """Return the name of an unnamed constant; equal ones are stored once."""
        key = (values.dtype.str, values.shape, values.tobytes())
        if key not in self._unnamed:
            self._unnamed[key] = self._store(values, f"/constant_{len(self.constants)}")
        return self._unnamed[key]

    def weight(self, tensor: Tensor, name: str) -> str:
        """Add a parameter under its name."""
        values = to_array(tensor)
        if self.external_file is None or values.nbytes < MIN_EXTERNAL_BYTES:
            return self._store(values, name)
        self.constants[name] = self._write_external(np.asarray(values, order="C"), name, self.external_file)
        return name

    def _store(self, values: AnyArray, name: str) -> str:
        self.count_bytes(values.nbytes)
        self.constants[name] = self.onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def _write_external(self, values: AnyArray, name: str, path: Path) -> Any:
        """Append a weight to the file of large weights, and return a tensor that refers to it."""
        with path.open("ab") as file:
            file.write(b"\0" * (-file.tell() % PAGE_BYTES))
            start = file.tell()
            values.tofile(file)
        tensor = self.onnx.TensorProto(name=name, dims=values.shape)
        tensor.data_type = self.onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor.data_location = self.onnx.TensorProto.EXTERNAL
        for key, value in (("location", path.name), ("offset", start), ("length", values.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def count_bytes(self, size: int) -> None:
        """Add to the size of the file; raise InputError if it exceeds the limit."""
        self._bytes += size
        if self._bytes > MAX_FILE_BYTES:
            raise InputError(
                f"an ONNX file holds at most 2 GiB, but vocabularies and small weights take at least "
                f"{self._bytes:,} bytes; limit vocabularies or hash fields, or serve the saved model directory"
            )

    def add_input(self, name: str, dtype: Any, shape: Sequence[int | str], description: str) -> str:
        """Add an input and return its name."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, dtype, list(shape), description))
        return name

    def add_output(self, name: str, shape: Sequence[int | str], description: str) -> None:
        """Declare the float result of this name as an output."""
        dtype = self.onnx.TensorProto.FLOAT
        self.outputs.append(self.onnx.helper.make_tensor_value_info(name, dtype, list(shape), description))

    def linear(self, value: str, module: nn.Module, path: str) -> str:
        """Add an ``nn.Linear``: x Wᵀ + b."""
        weights = [self.weight(weight, f"{path}.{name}") for name, weight in module.named_parameters()]
        return self.add("Gemm", value, *weights, transB=1)

    def subgraph(self, result: str, dtype: Any) -> Any:
        """Return a model of the nodes that one result depends on, with only the inputs that they use."""
        producers = {output: node for node in self.nodes for output in node.output}
        used, leaves, pending = set(), set(), [result]
        while pending:
            name = pending.pop()
            if name not in producers:
                leaves.add(name)
            elif producers[name].name not in used:
                used.add(producers[name].name)
                pending += producers[name].input
        helper = self.onnx.helper
        graph = helper.make_graph(
            [node for node in self.nodes if node.name in used],
            "part",
            [value for value in self.inputs if value.name in leaves],
            [helper.make_tensor_value_info(result, dtype, None)],
            [tensor for name, tensor in self.constants.items() if name in leaves],
        )
        return self._make_model(graph)

    def to_model(self, description: str) -> Any:
        """Return the whole graph as a model."""
        parts = (self.nodes, "lpfs", self.inputs, self.outputs, list(self.constants.values()))
        return self._make_model(self.onnx.helper.make_graph(*parts, doc_string=description))

    def _make_model(self, graph: Any) -> Any:
        helper = self.onnx.helper
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lpfs")


def external_data_file(model: nn.Module, file_name: str) -> str | None:
    """Return the name of the file of large weights; None if all weights fit into the model file.

    The name contains a digest of the weights, so that an older model file never refers to newer weights.
    """
    weights = [to_array(parameter) for parameter in model.parameters()]
    if sum(weight.nbytes for weight in weights) < EXTERNAL_DATA_BYTES:
        return None
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(np.asarray(weight, order="C").data)
    return f"{file_name}.{digest.hexdigest()[:12]}.data"


def old_external_files(out: Path) -> list[Path]:
    """Return all files of large weights that were written for ``out``."""
    name = re.compile(re.escape(out.name) + r"\.[0-9a-f]{12}\.data")
    return [path for path in out.parent.iterdir() if name.fullmatch(path.name)]


def to_array(tensor: Tensor) -> AnyArray:
    """Return a parameter or a buffer as an array."""
    return np.asarray(tensor.detach().cpu().numpy())


def import_onnx() -> Any:
    """Return the package ``onnx`` with its submodules; raise MissingPackageError if it is not installed."""
    onnx = import_optional("onnx", "onnx", "format='onnx'")
    for submodule in ("helper", "numpy_helper", "reference"):
        import_module(f"onnx.{submodule}")
    return onnx
