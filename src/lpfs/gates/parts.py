"""Modules that take gates themselves: one kernel for many fields, which multiplies by the gates on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from lpfs.errors import InputError


@dataclass(frozen=True)
class PartWeight:
    """A slice of a weight: multiplying it by g multiplies one part of a module's output by g.

    Args:
        parameter: the weight's name, relative to the module; it may be dotted.
        dim: the dimension that the slice counts along.
        start: where the slice begins.
        stop: where it ends.
        exact: whether the output is then bit-equal (one product a value), or equal to rounding (sums).

    """

    parameter: str
    dim: int
    start: int
    stop: int
    exact: bool


@runtime_checkable
class TakesGates(Protocol):
    """What an ``nn.Module`` offers that multiplies the parts of its output by gates itself.

    ``lpfs.attach`` sets ``gate`` where a ``Site(module, index=part)`` names a part of it; ``forward`` then calls
    it: it returns the gates (parts,) in float32 with their gradient, on the device of the model's first
    parameter, or None while gates are disabled.

    Attributes:
        gate: what to call for the gates; None where there are none.
        parts: how many parts, fields or crosses, its output has.

    """

    gate: Callable[[], Tensor | None] | None
    parts: int

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the weights whose multiplication by g multiplies that part of the output; [] if none do."""
        ...


def takes_gates(module: nn.Module) -> bool:
    """Whether a module multiplies by gates itself."""
    return isinstance(module, TakesGates)


def slices_of(module: nn.Module, part: int) -> list[PartWeight]:
    """Return the weights of a part, after a check that such slices exist; [] where a weight is not a plain one."""
    assert isinstance(module, TakesGates)
    given = list(module.part_weights(part))
    for each in given:
        try:
            weight = module.get_parameter(each.parameter)
        except AttributeError:
            return []  # a parametrization stands between the weight and its use
        inside = 0 <= each.dim < weight.ndim and 0 <= each.start < each.stop <= weight.shape[each.dim]
        if not inside:
            raise InputError(
                f"part_weights({part}) of {type(module).__name__} names [{each.start}:{each.stop}] along dim "
                f"{each.dim} of {each.parameter!r}, which is shaped {tuple(weight.shape)}"
            )
    return given


def overlapping(module: nn.Module, parts: set[int]) -> tuple[int, int, str] | None:
    """Return two parts that claim the same numbers of a weight, one of them in ``parts``, and the weight."""
    assert isinstance(module, TakesGates)
    claims: dict[int, list[tuple[int, PartWeight]]] = {}
    for part in range(module.parts):
        for each in slices_of(module, part):
            weight = module.get_parameter(each.parameter)
            claims.setdefault(id(weight), []).append((part, each))
    for several in claims.values():
        for (one, here), (two, there) in combinations(several, 2):
            apart = here.dim == there.dim and (here.stop <= there.start or there.stop <= here.start)
            if not apart and parts & {one, two}:
                return one, two, here.parameter
    return None
