"""Packages that only one adapter needs: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any

from lpfs.errors import MissingPackageError


def package(module: str, extra: str, advice: str = "") -> Any:
    """Return a module of somebody else's package, or say how to get it."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AttributeError) as error:  # the last: torchrec without fbgemm's operators
        more = f" {advice}" if advice else ""
        raise MissingPackageError(
            f"this adapter needs {module.partition('.')[0]} ({error}); install it with: "
            f"pip install 'lpfs[{extra}]'{more}"
        ) from error
