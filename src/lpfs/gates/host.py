"""Steps on a CPU: functions written in torch, compiled by numba from the same source.

The control law, the gate functions and the proximal step are written once, in torch. A step has a few dozen numbers,
for which a call of torch takes longer than the arithmetic. So on a CPU numba compiles the functions themselves: a
vector is then an array, a tensor () a number, and the torch functions in them are those defined here, with the
rounding of torch. What acts on each entry alone is compiled for numbers, in a loop. A Python number is a float64 for
numba: where float32 is meant, it comes from ``torch.full_like``.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dis import get_instructions
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs._imports import compile_loop, has_numba


def active(condition: Any) -> bool:
    """Return whether to compute what has an effect only under a condition: always, unless the host can read it."""
    return True


def is_plain(x: Tensor) -> bool:
    """Return whether x (N,) can be read as an array: float32 on the CPU, and not while torch is tracing."""
    return (
        x.is_cpu
        and x.ndim == 1
        and x.dtype == torch.float32
        and (type(x) is torch.nn.Parameter or type(x) is Tensor)
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
    )


class Arrays:
    """Arrays over the memory of tensors on a CPU; made again when a tensor has other memory."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._addresses: list[int] = []
        self._arrays: list[NDArray[Any]] = []

    def __reduce__(self) -> tuple[type[Arrays], tuple[()]]:
        return Arrays, ()  # a copy has other memory

    def __call__(self, *tensors: Tensor) -> list[NDArray[Any]]:
        """Return the array of each tensor."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses or tensors[0] is not self._first:
            self._first, self._addresses = tensors[0], addresses
            self._arrays = [tensor.detach().numpy() for tensor in tensors]
        return self._arrays


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function, written in torch, for arrays and numbers; None without numba."""
    if not has_numba():
        return None
    _define_torch_functions()
    _define_callees(function)
    loop: Callable[..., Any] = compile_loop(_named_by_source(function))
    return loop


def _named_by_source(function: Any) -> Any:
    """Return the function under a name with a digest of the files whose functions it calls, and of this one.

    Numba finds cached machine code by the name of a function, and notices a change of the file that defines it. The
    definitions in this file and the callees become part of the machine code of functions in other files.
    """
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    files = {__file__, *(callee.__code__.co_filename for callee in _all_callees(function))}
    copy.__qualname__ = f"{function.__qualname__}_{_source_digest(*sorted(files))}"
    copy.__module__ = function.__module__
    return copy


@cache
def _source_digest(*files: str) -> str:
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:12]


@cache
def _callees(function: Any) -> list[Any]:
    """Return the functions that a function calls: those of its module, and of the modules of gates but this one."""
    names = [instruction.argval for instruction in get_instructions(function) if instruction.opname == "LOAD_GLOBAL"]
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    package = __name__.rpartition(".")[0]
    return [
        callee
        for callee in (*map(function.__globals__.get, names), *closure)
        if isinstance(callee, FunctionType)
        and (callee.__module__ == function.__module__ or callee.__module__.rpartition(".")[0] == package)
        and callee.__module__ != __name__
    ]


def _all_callees(function: Any) -> list[Any]:
    """Return the functions that a function calls, and those that they call."""
    return [indirect for callee in _callees(function) for indirect in (callee, *_all_callees(callee))]


@cache
def _define_callees(function: Any) -> None:
    """Let numba compile the functions that a function calls."""
    register_jitable = importlib.import_module("numba.extending").register_jitable
    for callee in _callees(function):
        _define_callees(callee)
        register_jitable(callee)


@cache
def _define_torch_functions() -> None:
    """Define for numba the torch functions that are called by functions for :func:`compiled`."""
    types, extending = importlib.import_module("numba.core.types"), importlib.import_module("numba.extending")
    overload, overload_method, register_jitable = (
        getattr(extending, name) for name in ("overload", "overload_method", "register_jitable")
    )

    def define(torch_function: Any, numpy_function: Any) -> None:
        overload(torch_function)(lambda value: lambda value: numpy_function(value))

    for name in ("abs", "arctan", "count_nonzero", "exp", "floor", "isfinite", "sign", "sqrt", "tanh"):
        define(getattr(torch, name), getattr(np, name))
    overload(torch.minimum)(lambda value, other: lambda value, other: min(value, other))
    overload(torch.maximum)(lambda value, other: lambda value, other: max(value, other))
    overload(active)(lambda condition: lambda condition: condition)

    def entry(value):
        """Return how to read an entry of an array, or of a number that stands for one."""
        return register_jitable((lambda a, n: a[n]) if isinstance(value, types.Array) else (lambda a, n: a))

    @overload(torch.where)
    def where(condition, value, other):
        if not isinstance(condition, types.Array):
            return lambda condition, value, other: value if condition else other
        first, second = entry(value), entry(other)
        dtype = next((kind.dtype for kind in (value, other) if isinstance(kind, types.Array)), types.float64)

        def choose(condition, value, other):
            result = np.empty(len(condition), dtype)
            for n in range(len(condition)):
                result[n] = first(value, n) if condition[n] else second(other, n)
            return result

        return choose

    @overload(torch.clamp)
    def clamp(value, low, high):
        number = value
        return lambda value, low, high: number(low if value < low else high if value > high else value)

    @overload(torch.argsort)
    def argsort(values, stable=False):
        def insert_each(values, stable=False):
            order = np.arange(len(values))
            for n in range(1, len(values)):
                while n > 0 and values[order[n - 1]] > values[order[n]]:
                    order[n - 1], order[n] = order[n], order[n - 1]
                    n -= 1
            return order

        return insert_each

    @overload(torch.full_like)
    def full_like(like, value):
        number = like
        return lambda like, value: number(value)

    def convert(value, like):
        number = like
        return lambda value, like: number(value)

    for kind in (types.Integer, types.Float):
        overload_method(kind, "double")(lambda value: lambda value: np.float64(value))
        overload_method(kind, "to")(convert)
    overload_method(types.Array, "double")(lambda array: lambda array: array.astype(np.float64))

    @overload_method(types.Array, "copy_")
    def copy_(array, values):
        value = entry(values)

        def assign(array, values):
            for n in range(len(array)):
                array[n] = value(values, n)

        return assign
