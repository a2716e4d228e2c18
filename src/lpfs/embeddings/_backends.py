"""The choice of the backend of embedding tables: the fastest that works on the machine, or the one requested.

A backend is a module with the functions of ``_torch``, the reference: same arguments, same numbers. A backend is
imported at its first use, so that numba and triton stay optional; its ``check_works``, if any, is called then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from lpfs._validation import check_name
from lpfs.errors import MissingPackageError

BACKENDS = ("torch", "numba", "triton")  # each has the name of the package that it needs

_forced: list[ModuleType] = []


class BackendWarning(UserWarning):
    """A fast backend is missing or does not work; embedding tables use plain torch."""


def backend_for(weight: Tensor) -> ModuleType:
    """Return the backend for a weight."""
    if weight.dtype != torch.float32:
        return _load("torch")
    if _forced:
        return _forced[-1]
    return _load_or_torch("numba" if weight.is_cpu else "triton" if weight.is_cuda else "torch")


def supports_cuda_graph(device: torch.device) -> bool:
    """Return whether tables on this GPU work without host synchronization, so that a step can be captured."""
    return backend_for(torch.empty(0, device=device)) is not _load("torch")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use this backend for float32 tables while the block runs: ``torch``, ``numba`` or ``triton``."""
    check_name(name, BACKENDS, "backend")
    try:
        backend = _load(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"the backend {name!r} needs a package: pip install {name} ({error})") from error
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _load(name: str) -> ModuleType:
    backend = import_module(f"lpfs.embeddings._{name}")
    if hasattr(backend, "check_works"):
        backend.check_works()
    return backend


@cache
def _load_or_torch(name: str) -> ModuleType:
    """Return the backend, or warn once and return the torch backend if it cannot be used."""
    try:
        return _load(name)
    except ModuleNotFoundError:
        reason = f"is not installed (pip install {name})"
    except Exception as error:  # a broken installation raises many kinds of errors; none of them may stop training
        text = next(iter(str(error).strip().splitlines()), "")
        reason = f"is installed but does not work: {type(error).__name__}: {text}"
    warnings.warn(f"embedding tables use plain torch, which is slower: {name} {reason}", BackendWarning, stacklevel=3)
    return _load("torch")
