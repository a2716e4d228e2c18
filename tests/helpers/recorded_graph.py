"""CUDA graphs imitated on a CPU: the operations of a captured step are recorded and repeated on the same memory.

A value that Python reads or computes while a step is recorded stays what it was, as in a CUDA graph, and reading a
tensor is an error. What only a GPU refuses, such as a copy from the host, is not noticed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lpfs.embeddings import _backends, optim
from lpfs.embeddings.row_grad import RowGrad
from lpfs.methods import training
from lpfs.models.crosses import ReusableBuffer
from lpfs.train import step


class RecordedGraph(TorchDispatchMode):
    """Records operations on entering; :meth:`replay` repeats them."""

    current: RecordedGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.generators: list[int] = []  # their addresses

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator._cdata)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select"):
            raise RuntimeError(f"{name} reads a value while a graph is captured")
        drawn = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Generator)]
        if any(value._cdata not in self.generators for value in drawn):
            raise RuntimeError("a generator is not registered with the graph")
        states = [(value, value.get_state()) for value in drawn]
        result = function(*args, **kwargs)
        for generator, state in states:  # a capture draws no numbers
            generator.set_state(state)
        self.calls.append((function, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, recorded in self.calls:
            inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
            results = tensors_of(function(*args, **kwargs))
            for old, new in zip(tensors_of(recorded), results, strict=True):
                if old.untyped_storage().data_ptr() not in inputs and old.numel():
                    old.copy_(new)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


@contextmanager
def capture(graph, stream=None, capture_error_mode=""):
    """Record a step whose own updates are undone, because a capture runs nothing."""
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    dispatch = RecordedGraph.__torch_dispatch__

    def remember(self, function, types, args=(), kwargs=None):
        for tensor in tensors_of((args, kwargs)):
            storage = tensor.untyped_storage()
            saved.setdefault(storage.data_ptr(), (storage, storage.clone()))
        return dispatch(self, function, types, args, kwargs)

    random_state = torch.get_rng_state()
    RecordedGraph.__torch_dispatch__ = remember
    try:
        with graph:
            yield
    finally:
        RecordedGraph.__torch_dispatch__ = dispatch
    torch.set_rng_state(random_state)
    for storage, value in saved.values():
        storage.copy_(value)


class _Rows:
    """A backend of tables for SGD whose gradient has every row, so that its size does not depend on the ids."""

    __name__ = "rows"

    @staticmethod
    def gather(weight, starts, ids, gate):
        out = weight.detach().index_select(0, (ids + starts[:-1]).reshape(-1)).view(*ids.shape, weight.shape[1])
        return out if gate is None else out * gate[:, None]

    @staticmethod
    def reduce(weight, starts, ids, gate, grad):
        if gate is not None:
            columns = weight.detach().index_select(0, (ids + starts[:-1]).reshape(-1)).view_as(grad)
            gate_grad, grad = (columns * grad).sum((0, 2)), grad * gate[:, None]
        rows = torch.arange(len(weight))
        summed = torch.zeros_like(weight.detach())
        summed.index_add_(0, (ids + starts[:-1]).reshape(-1), grad.reshape(-1, weight.shape[1]))
        return RowGrad(rows, summed), None if gate is None else gate_grad

    @staticmethod
    def sgd(weight, grad, lr):
        weight.detach().sub_(grad.values * lr)


def install(monkeypatch) -> None:
    """Let ``fit(…, graph=True)`` capture the steps of SGD on a CPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(_backends, "_forced", [_Rows])
    monkeypatch.setattr(optim, "rates_on_device", has_tensor_rates)
    monkeypatch.setattr(step.GraphStepper, "_prepare", prepare)
    monkeypatch.setattr(step, "move_rates", make_tensor_rates)
    monkeypatch.setattr(training, "move_rates", make_tensor_rates)
    monkeypatch.setattr(ReusableBuffer, "take", lambda self, like, rows, width: like.new_empty(rows, width))


def has_tensor_rates(optimizer) -> bool:
    return isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def make_tensor_rates(optimizer, device) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))


def prepare(self):
    make_tensor_rates(self.state.optimizer, self.device)
    return torch.cuda.Stream()
