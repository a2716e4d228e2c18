"""Every method by name; adding one is a file here and a line in METHODS."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpfs.errors import InputError
from lpfs.methods.task import Task
from lpfs.schema import Selection


@dataclass(frozen=True)
class Entry:
    """Where a method is, what it does in a line, and who proposed it; ``preset`` are options it starts from."""

    module: str
    summary: str
    reference: str
    preset: tuple[tuple[str, Any], ...] = ()


PAPER = "Guo et al., LPFS: Learnable Polarizing Feature Selection for Click-Through Rate Prediction, 2022"
METHODS: dict[str, Entry] = {
    "lpfs++": Entry(
        "lpfs.methods.lpfs", "gates x²/(x²+ε) with an odd term, so that a dead field can come back", PAPER
    ),
    "lpfs": Entry("lpfs.methods.lpfs", "gates x²/(x²+ε)", PAPER, (("gate", "lpfs"),)),
}


def method_named(name: str) -> Callable[[Task], Selection]:
    """Return the search of a method."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"there is no method {name!r}{hint}; known are {', '.join(METHODS)}")
    entry = METHODS[name]

    def search(task: Task) -> Selection:
        task.options = {**dict(entry.preset), **task.options}
        found: Selection = importlib.import_module(entry.module).search(task)
        return found

    return search
