"""Optional packages, lazy exports, callable packages, and loops compiled by numba; imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, TypeVar, cast

from lpfs.errors import MissingPackageError

Loop = TypeVar("Loop", bound=Callable[..., Any])
Array = Any  # argument of a compiled loop: numba knows its type, mypy does not


def import_optional(module: str, extra: str, purpose: str, advice: str = "") -> Any:
    """Return an optional module, or raise MissingPackageError with the command that installs it.

    The message is ``purpose`` ("the method gbdt") needs the package; the command installs the ``extra`` of lpfs.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AttributeError) as error:  # broken installations raise the last two
        raise MissingPackageError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}); "
            f"install it with: pip install 'lpfs[{extra}]'{advice and ' '}{advice}"
        ) from error


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    ``modules`` has the module of each name, relative to the package (``"base"``) or absolute (``"lpfs.schema"``).
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = modules[name]
        return getattr(importlib.import_module(path if path.startswith("lpfs.") else f"{package}.{path}"), name)

    def list_names() -> list[str]:
        return sorted({*modules, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get_attribute, list_names


def callable_package(package: str, function: str) -> None:
    """Make a package callable: ``lpfs.compare(…)`` calls the function at ``"lpfs.compare.compare:compare"``."""
    path, _, name = function.partition(":")

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            return getattr(importlib.import_module(path), name)(*args, **keywords)

    sys.modules[package].__class__ = CallablePackage


@cache
def has_numba() -> bool:
    """Return whether numba can be imported; the first call without it warns, in one line, that loops are slow."""
    try:
        importlib.import_module("numba")
    except Exception as error:  # a broken installation fails in many ways; none of them may stop the program
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"numba cannot be imported ({reason}), so plain torch is used, which is slower; "
            "install it with: pip install numba",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@cache
def fused_kernels_enabled() -> bool:
    """Return whether fused kernels are used where they are supported, on a GPU with triton.

    They round differently from torch: LPFS_FUSED_KERNELS=0 switches them off, to compare with an older run or to
    see whether a difference comes from them.
    """
    return os.environ.get("LPFS_FUSED_KERNELS", "1") != "0"


def compile_loop(function: Loop, parallel: bool = False) -> Loop:
    """Return the function compiled by numba at its first call, or the function itself without numba.

    The machine code is cached on disk if numba finds a writable directory. Check :func:`has_numba` first where
    an implementation in plain torch is faster than the interpreted loop.
    """
    if not has_numba():
        return function
    njit = importlib.import_module("numba").njit
    settings = {"nogil": True, "error_model": "numpy", "parallel": parallel}
    try:
        return cast(Loop, njit(cache=True, **settings)(function))
    except RuntimeError:  # no writable directory
        return cast(Loop, njit(**settings)(function))
