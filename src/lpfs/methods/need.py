"""Packages that only some methods need: imported where they are used, with an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from lpfs.errors import MissingPackageError


def of_sklearn(method: str, module: str) -> Any:
    """Return a module of scikit-learn, or say how to get it."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise MissingPackageError(
            f"{method} needs scikit-learn 1.6 or newer; install it with: pip install 'lpfs[sklearn]'"
        ) from error
