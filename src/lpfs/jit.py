"""compiled: a loop that numba turns into machine code. Imported only where numba is there."""

# mypy: disable-error-code="call-overload,import-untyped,no-untyped-call,unused-ignore,untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])
Array = Any  # what numba compiles has shapes and kinds, but no types that mypy knows


def compiled(function: Loop, parallel: bool = False) -> Loop:
    """Compile at first use; kept on disk for the next process, wherever numba finds a folder it can write to."""
    how = {"nogil": True, "error_model": "numpy", "parallel": parallel}
    try:
        return cast(Loop, njit(cache=True, **how)(function))
    except RuntimeError:  # no such folder
        return cast(Loop, njit(**how)(function))
