"""lpfs as a scikit-learn transformer: ``PolarizingSelector``; needs ``pip install 'lpfs[sklearn]'``."""

from __future__ import annotations

from lpfs._imports import import_optional

import_optional("sklearn", "sklearn", "lpfs.sklearn")

from lpfs.sklearn.selector import PolarizingSelector  # noqa: E402

__all__ = ["PolarizingSelector"]
