"""Names of inputs: fields have any text as a name, inputs of a graph only letters, digits and _."""

from __future__ import annotations

import re
from collections.abc import Sequence

OUTPUTS = ("probability", "logit", "corrected_probability")
VALID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def input_names(fields: Sequence[str], taken: Sequence[str] = OUTPUTS) -> dict[str, str]:
    """Return a name for the input of each field: its own where that is valid and free, else the nearest that is.

    >>> input_names(["a.b", "a_b", "logit", "7"])
    {'a.b': 'a_b_2', 'a_b': 'a_b', 'logit': 'logit_2', '7': '_7'}
    """
    used = set(taken)
    names = {name: name for name in fields if VALID.fullmatch(name) and name not in used}
    used.update(names)
    for name in fields:
        if name in names:
            continue
        base = re.sub(r"[^A-Za-z0-9_]", "_", name)
        base = "_" + base if base[0].isdigit() else base
        number, found = 2, base
        while found in used:
            number, found = number + 1, f"{base}_{number}"
        names[name] = found
        used.add(found)
    return {name: names[name] for name in fields}
