"""A name that must be one of some names, with the nearest one suggested where it is not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lpfs.errors import FieldError


def known(name: str, names: Sequence[str], where: str) -> None:
    """Refuse a name that is no field, with the nearest one suggested."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names[:10])}"
        raise FieldError(f"{where}: there is no field {name!r}{hint}")
