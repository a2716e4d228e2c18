"""What a search is asked for, checked: how many fields or which λ, and how it is weighted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpfs.errors import FieldError, InputError
from lpfs.gates.control import Keep

# The control of λ cannot steer in fewer steps than this.
FEWEST_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """Either ``keep`` or a fixed ``penalty``; ``weights`` is the factor on λ of every field (N,)."""

    keep: Keep | None
    penalty: float
    weights: Tensor


def make_plan(
    names: Sequence[str],
    steps: int,
    seed: int,
    keep: int | None,
    penalty: float | Sequence[float] | Tensor | None,
    costs: Sequence[float] | Tensor | None,
    must_keep: Sequence[str],
    prox: str,
    control: Keep | None,
) -> Plan:
    """Check what ``gates.optimizer`` was given and return it as a plan."""
    if (keep is None) == (penalty is None):
        raise InputError("say what you want: either keep=K (how many fields) or penalty=λ, not both")
    weights = _weights(names, costs, must_keep)
    if keep is None:
        return _fixed(penalty, weights)
    size, fixed = len(names), int((weights == 0).sum())
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= size:
        raise InputError(f"keep must be between 1 and the {size} fields, found {keep!r}")
    if keep < fixed:
        raise InputError(f"keep={keep} is less than the {fixed} fields that must be kept or cost nothing")
    if keep < size and steps < FEWEST_STEPS:
        raise InputError(
            f"keep={keep} needs a search of at least {FEWEST_STEPS} steps (1,000 or more are better), but "
            f"these gates were attached with steps={steps}"
        )
    if prox == "l0":
        raise InputError("keep=K steers the soft threshold of the l1 prox; with prox='l0' give penalty=λ")
    if control is not None and control.keep != keep:
        raise InputError(f"control is for keep={control.keep}, not for keep={keep}")
    # Exact ties (fields without any gradient) would die in one step: part them by up to 1 %.
    draw = torch.rand(size, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return Plan(control or Keep(keep), 0.0, weights * (1 + 0.01 * draw))


def _fixed(penalty: Any, weights: Tensor) -> Plan:
    level = _numbers("penalty", penalty)
    if level.ndim and level.shape != weights.shape:
        raise InputError(f"penalty must be one number or {len(weights)} of them, found {tuple(level.shape)}")
    if not bool((level >= 0).all()):
        raise InputError(f"penalty must be >= 0, found {penalty!r}")
    if level.ndim == 0:
        return Plan(None, float(level), weights)
    top = float(level.max())
    return Plan(None, top, weights * (level / top if top else level))


def _weights(names: Sequence[str], costs: Any, must_keep: Sequence[str]) -> Tensor:
    """Return the factor on λ of every field: its relative cost, and 0 where it must be kept."""
    size = len(names)
    weights = torch.ones(size, dtype=torch.float32, device="cpu")
    if costs is not None:
        weights = _numbers("costs", costs)
        if weights.shape != (size,):
            raise InputError(f"costs must be {size} numbers, one a field, found {tuple(weights.shape)}")
        if not bool(((weights >= 0) & torch.isfinite(weights)).all()) or not bool(weights.any()):
            raise InputError("costs must be finite numbers >= 0, not all of them 0")
        weights = weights / weights.mean()
    for name in [must_keep] if isinstance(must_keep, str) else must_keep:
        if name not in names:
            raise FieldError(f"must_keep names no gated field: {name!r}; there are {list(names)}")
        weights[list(names).index(name)] = 0.0
    return weights


def _numbers(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be a number or one a field, found {value!r}") from None
