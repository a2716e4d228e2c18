"""Graph: nodes and weights of an ONNX graph, as they are added."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lpfs.data.store.format import AnyArray
from lpfs.errors import InputError, MissingPackageError

OPSET, ML_OPSET, IR = 18, 4, 9  # ai.onnx.ml 4: LabelEncoder with float64 keys
MAX_FILE_BYTES = (1 << 31) - (1 << 20)  # bytes of one file: protobuf stops at 2 GiB
EXTERNAL_DATA_BYTES = 1 << 30  # bytes of all weights from which on large ones go to a file of their own
LEAST, ALIGNED = 1 << 20, 4096  # bytes of a large one, and of a page


class Graph:
    """An ONNX graph that grows; every method that computes returns the name of its result.

    Names of inputs and outputs hold no / and no dot, names of all else hold one: they never meet.

    Args:
        large: a file that large weights are written to, beside the one that the graph is written to.

    """

    def __init__(self, large: Path | None = None) -> None:
        self.large = large
        self.onnx = need_onnx()
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._small: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._bytes = 0

    def add(self, op: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one result."""
        name = f"/{op}_{len(self.nodes)}"
        result = out or f"{name}/out"
        node = self.onnx.helper.make_node(op, list(inputs), [result], name=name, domain=domain, **attributes)
        self.nodes.append(node)
        return result

    def split(self, value: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Cut a value along one axis."""
        name = f"/Split_{len(self.nodes)}"
        results = [f"{name}/out_{number}" for number in range(len(sizes))]
        inputs = [value, self.constant(np.array(sizes, np.int64))]
        self.nodes.append(self.onnx.helper.make_node("Split", inputs, results, name=name, axis=axis))
        return results

    def constant(self, values: AnyArray, name: str | None = None) -> str:
        """Add a weight under its name, or a constant, which is there once however often it is asked for."""
        key = (values.dtype.str, values.shape, values.tobytes() if name is None else b"")
        if name is None and key in self._small:
            return self._small[key]
        found = name or f"/constant_{len(self.constants)}"
        if name is not None and self.large is not None and values.nbytes >= LEAST:
            self.constants[found] = self._apart(np.asarray(values, order="C"), found, self.large)
        else:
            self.room(values.nbytes)
            self.constants[found] = self.onnx.numpy_helper.from_array(np.asarray(values, order="C"), found)
        if name is None:
            self._small[key] = found
        return found

    def _apart(self, values: AnyArray, name: str, large: Path) -> Any:
        """Write a weight to the file of large ones, and say where it is."""
        with large.open("ab") as file:
            file.write(b"\0" * (-file.tell() % ALIGNED))
            start = file.tell()
            values.tofile(file)
        helper = self.onnx.helper
        tensor = self.onnx.TensorProto(name=name, dims=values.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor.data_location = self.onnx.TensorProto.EXTERNAL
        for key, value in (("location", large.name), ("offset", start), ("length", values.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def room(self, size: int) -> None:
        """Count bytes, and refuse what no file can hold."""
        self._bytes += size
        if self._bytes > MAX_FILE_BYTES:
            raise InputError(
                f"an ONNX file holds at most 2 GiB, and vocabularies and small weights take {self._bytes:,} "
                "bytes and more; cap vocabularies or hash fields, or keep the model's own folder"
            )

    def add_input(self, name: str, kind: Any, shape: Sequence[int | str], about: str) -> str:
        """Add an input."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, kind, list(shape), about))
        return name

    def add_output(self, name: str, shape: Sequence[int | str], about: str) -> None:
        """Say that a float result of this name is an output."""
        kind = self.onnx.TensorProto.FLOAT
        self.outputs.append(self.onnx.helper.make_tensor_value_info(name, kind, list(shape), about))

    def linear(self, value: str, module: Any, path: str) -> str:
        """Add an ``nn.Linear``: x Wᵀ + b."""
        weights = [self.constant(to_array(module.weight), f"{path}.weight")]
        if module.bias is not None:
            weights.append(self.constant(to_array(module.bias), f"{path}.bias"))
        return self.add("Gemm", value, *weights, transB=1)

    def part(self, wanted: str, kind: Any) -> Any:
        """Return a model of those nodes that one result depends on; its input is what they read."""
        made = {result: node for node in self.nodes for result in node.output}
        nodes: dict[str, Any] = {}
        waiting, leaves = [wanted], set()
        while waiting:
            name = waiting.pop()
            if name not in made:
                leaves.add(name)
            elif made[name].name not in nodes:
                nodes[made[name].name] = made[name]
                waiting += made[name].input
        helper = self.onnx.helper
        graph = helper.make_graph(
            [node for node in self.nodes if node.name in nodes],
            "part",
            [each for each in self.inputs if each.name in leaves],
            [helper.make_tensor_value_info(wanted, kind, None)],
            [each for name, each in self.constants.items() if name in leaves],
        )
        return self._model(graph)

    def model(self, about: str) -> Any:
        """Return the whole graph as a model."""
        constants = list(self.constants.values())
        graph = self.onnx.helper.make_graph(
            self.nodes, "lpfs", self.inputs, self.outputs, constants, doc_string=about
        )
        return self._model(graph)

    def _model(self, graph: Any) -> Any:
        helper = self.onnx.helper
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="lpfs")


def external_data_file(model: Any, out: Path) -> str | None:
    """Return the name of the file of large weights; None if all of them fit into one file.

    It holds a digest of the weights: an older file at ``out`` never reads weights that are not its own.
    """
    weights = [to_array(each) for each in model.parameters()]
    if sum(each.nbytes for each in weights) < EXTERNAL_DATA_BYTES:
        return None
    digest = hashlib.sha256()
    for each in weights:
        digest.update(np.asarray(each, order="C").data)
    return f"{out.name}.{digest.hexdigest()[:12]}.data"


def old_external_files(out: Path) -> list[Path]:
    """Return the files of large weights that belong to what was written to ``out``."""
    name = re.compile(re.escape(out.name) + r"\.[0-9a-f]{12}\.data")
    return [each for each in out.parent.iterdir() if name.fullmatch(each.name)]


def to_array(tensor: Any) -> AnyArray:
    """Return a parameter or a buffer as an array."""
    return np.asarray(tensor.detach().cpu().numpy())


def need_onnx() -> Any:
    """Return the package ``onnx``, or say what to install."""
    try:
        onnx = import_module("onnx")
    except ImportError as error:
        raise MissingPackageError(
            f"format='onnx' needs the package onnx ({error}); install: pip install 'lpfs[onnx]'"
        ) from None
    for part in ("helper", "numpy_helper", "reference"):
        import_module(f"onnx.{part}")
    return onnx
