"""Which engine runs: the fastest that the machine has, or the one that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor

from lpfs.errors import InputError
from lpfs.tables.engines import plain

_forced: list[ModuleType] = []


def engine_for(weight: Tensor) -> ModuleType:
    """Return the engine for a weight."""
    return _forced[-1] if _forced else plain


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Within this block every table uses the engine of this name."""
    engines = {"torch": plain}
    if name not in engines:
        raise InputError(f"there is no engine {name!r}; known are {', '.join(engines)}")
    _forced.append(engines[name])
    try:
        yield
    finally:
        _forced.pop()
