"""lpfs as a scikit-learn transformer: ``PolarizingSelector``; needs ``pip install 'lpfs[sklearn]'``."""

from __future__ import annotations

from lpfs.errors import MissingPackageError

try:
    import sklearn as _sklearn  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise MissingPackageError(
        "lpfs.sklearn needs scikit-learn 1.6 or newer; install it with: pip install 'lpfs[sklearn]'"
    ) from error

from lpfs.sklearn.selector import PolarizingSelector

__all__ = ["PolarizingSelector"]
