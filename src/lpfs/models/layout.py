"""Layout: which part of which weight belongs to which field, so that a smaller model knows what to take over."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

# along one dim of a weight, who owns what, in order: an owner (a field, a pair of fields, …) and how much
Segments: TypeAlias = Sequence[tuple[Hashable, int]]
# name of a parameter -> dim -> segments; a parameter that is not named does not depend on fields
Layout: TypeAlias = Mapping[str, Mapping[int, Segments]]


def taken_over(old: Layout, new: Layout) -> dict[str, dict[int, Tensor]]:
    """Return, for every parameter of the new layout, which indices of the old one it takes, along each dim.

    A dim that stays whole is not named, nor is a parameter that does.

    >>> taken_over({"w": {1: [("a", 2), ("b", 1), ("c", 2)]}}, {"w": {1: [("c", 2), ("a", 2)]}})
    {'w': {1: tensor([3, 4, 0, 1])}}
    """
    result: dict[str, dict[int, Tensor]] = {}
    for name, dims in new.items():
        for dim, segments in dims.items():
            if list(segments) != list(old[name][dim]):
                result.setdefault(name, {})[dim] = _indices(old[name][dim], segments)
    return result


def under(prefix: str, layout: Layout) -> Layout:
    """Return the layout of a module as seen from its parent."""
    return {f"{prefix}.{name}": dims for name, dims in layout.items()}


def _indices(old: Segments, new: Segments) -> Tensor:
    places: dict[Hashable, range] = {}
    at = 0
    for owner, width in old:
        places[owner] = range(at, at + width)
        at += width
    return torch.tensor([index for owner, _ in new for index in places[owner]], dtype=torch.long)
