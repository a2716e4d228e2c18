"""Which engine runs: the fastest that the machine has, or the one that is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from lpfs.errors import InputError, MissingPackageError
from lpfs.embeddings import _torch

# name -> the module, which imports a package of the same name. An engine has the functions of ``plain``, takes
# what they take and gives the same numbers; ``ready()``, where there is one, is called once, before the first use.
ENGINES = {"torch": "plain", "numba": "cpu", "triton": "cuda"}

_forced: list[ModuleType] = []


class EngineWarning(UserWarning):
    """A fast engine is installed but does not work; the plain one is used."""


def engine_for(weight: Tensor) -> ModuleType:
    """Return the engine for a weight."""
    if weight.dtype != torch.float32:
        return _torch
    if _forced:
        return _forced[-1]
    if weight.is_cpu:
        return _fastest("numba")
    return _fastest("triton") if weight.is_cuda else _torch


def captures(device: torch.device) -> bool:
    """Return whether tables on this GPU do without the host, so that a step with them can be captured."""
    return engine_for(torch.empty(0, device=device)) is not _torch


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Within this block float32 tables use the engine of this name: ``torch``, ``numba`` or ``triton``."""
    if name not in ENGINES:
        raise InputError(f"there is no engine {name!r}; known are {', '.join(ENGINES)}")
    try:
        engine = _loaded(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"the engine {name!r} needs a package: pip install {name} ({error})") from error
    _forced.append(engine)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _loaded(name: str) -> ModuleType:
    engine = import_module(f"lpfs.tables.engines.{ENGINES[name]}")
    if hasattr(engine, "ready"):
        engine.ready()
    return engine


@cache
def _fastest(name: str) -> ModuleType:
    try:
        return _loaded(name)
    except ModuleNotFoundError:
        return _torch
    except Exception as error:  # a broken installation fails in many ways, and none of them may stop training
        warnings.warn(
            f"{name} is installed but does not work here, so tables use plain torch, which is slower: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            EngineWarning,
            stacklevel=2,
        )
        return _torch
