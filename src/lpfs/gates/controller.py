"""The control law of λ: how ``keep=K`` ends with exactly K gates alive, and all others exactly zero.

A gate is *dead* while x is exactly 0 and *alive* otherwise; *frozen* means that dead gates can no longer revive.

A gate stays alive where the gradient of the loss balances λ; the gate with the weakest gradient becomes zero
first. So K is reached by moving λ, never by cutting a ranking. With u = step / steps:

- λ starts at a value with which a gate without gradient moves from 1 to 0 within ``travel`` times the search. At
  first all gates decrease together and the logits shrink, so that each gate receives the gradient of its field; the
  gates are in order by the time the first of them become zero.
- From ``begin`` to ``end`` a target number of alive gates decreases quadratically from N to K. While more gates are
  alive than the target, λ grows in proportion to the excess, slowly at first (``least``) and faster later
  (``most``): a gate needs time to become zero, and a λ that grows in the meantime would zero other gates too.
  Therefore the law does not count the gates that are alive now, but predicts their number ``ahead`` of now: Σ|g|
  / max|g|, extrapolated by its change since ``lag`` ago. Towards ``end`` the prediction is replaced by the number
  of alive gates.
- If a step would leave fewer than K gates alive, the gates that it zeroed are restored, their momentum is reset,
  and λ is reduced, but not below its first value: a smaller λ would let noise revive dead gates. From ``hurry`` on
  only as many gates are restored as are missing, those with the largest |x| first.
- From ``freeze`` on, as soon as exactly K gates are alive and |g| >= ``clear`` for all of them, the dead gates are
  frozen and λ becomes zero, so that the alive gates converge while ε reaches its floor; |x| of an alive gate does
  not fall below the point where the gate function rises. From ``hurry`` on λ grows faster while too many gates
  are alive, and the freeze no longer waits for ``clear``.

Everything that depends only on the step number is a row of a table (:class:`TableRow`), computed in advance; the
rest is :func:`restore_gates` and :func:`update_penalty`. They are written once, in torch, so that they need no host
synchronization on a GPU and can be captured in a CUDA graph; :mod:`~lpfs.gates.host` compiles them for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpfs.errors import FieldError, InputError
from lpfs.gates.host import active
from lpfs.gates.schedule import Schedule

Time = TypeVar("Time", float, NDArray[np.float64])  # u, a number or an array

# Changes of Keep for short searches and for those that pass K on their way: λ starts high, grows fast from the
# beginning, and only alive gates are counted.
FAST_DESCENT = {"travel": 0.4, "begin": 0.2, "least": 4.0, "ahead": 0.0}
# The control of λ needs at least this many steps.
MIN_STEPS = 50
# Resolution of effective_count, that of float32: with a coarser one the last bit of a gate would change λ.
RESOLUTION = 1 << 24
# Divides as zero does, without overflow.
_TINY = 1e-300


@dataclass(frozen=True)
class Keep:
    """Constants of the control law; docs/method.md says how the defaults were chosen. Times are in units of u."""

    keep: int  # K, the number of gates that are alive at the end
    travel: float = 1.0  # first λ = 1 / (travel · Ση)
    begin: float = 0.1  # time when the target starts to decrease, and λ to grow
    end: float = 0.5  # time when the target reaches K
    freeze: float = 0.75  # time from which the dead gates are frozen once K clear gates are alive
    hurry: float = 0.85  # time from which reaching K has priority
    gain: float = 10.0  # growth of log λ per unit of u, times min(max_growth, excess / excess_scale)
    width: float = 0.2  # excess_scale relative to the target
    least: float = 1.0  # max_growth at ``begin``
    most: float = 4.0  # max_growth at ``end``
    cut: float = 0.7  # factor on λ in a step that would leave fewer than K gates alive
    clear: float = 0.2  # |g| from which a gate counts as clear of zero
    ahead: float = 0.2  # how far the number of alive gates is predicted; 0 counts the alive gates only
    lag: float = 0.05  # time constant of the moving average that the prediction extrapolates from
    ahead_power: float = 4.0  # the weight of the alive gates against the prediction rises as elapsed^ahead_power
    hurry_growth: float = 100.0  # max_growth rises from 1 to 1 + hurry_growth between ``hurry`` and 1
    tie_spread: float = 0.01  # weights of λ differ by up to this share, against ties

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise InputError(f"least must be > 0 and <= most, found least={self.least} and most={self.most}")
        if self.ahead < 0 or self.lag <= 0:
            raise InputError(f"ahead must be >= 0 and lag > 0, found ahead={self.ahead} and lag={self.lag}")

    def first_penalty(self, total_lr: float) -> float:
        """Return the λ at the start of a search."""
        return 1 / (self.travel * total_lr)

    def remaining(self, u: Time) -> Time:
        """Return the share of the time from ``begin`` to ``end`` that is still to come."""
        return np.clip((self.end - u) / (self.end - self.begin), 0.0, 1.0)  # type: ignore[no-any-return]

    def target(self, u: Time, total: int) -> Time:
        """Return the number of ``total`` gates that should be alive at time u in [0, 1].

        >>> [float(Keep(15).target(u, 60)) for u in (0.0, 0.1, 0.5, 1.0)]
        [60.0, 60.0, 15.0, 15.0]
        """
        remaining = self.remaining(u)
        return self.keep + (total - self.keep) * remaining * remaining

    def max_growth(self, u: Time) -> Time:
        """Return the largest growth, relative to ``gain``: 0 before ``begin``, then slow, then faster.

        >>> [float(Keep(15).max_growth(u)) for u in (0.0, 0.1, 0.5)]
        [0.0, 1.0, 4.0]
        """
        elapsed = 1 - self.remaining(u)
        growth = self.least + (self.most - self.least) * elapsed * elapsed
        hurried = 1 + self.hurry_growth * (u - self.hurry) / max(1 - self.hurry, _TINY)
        return np.where(u < self.begin, 0.0, np.where(u >= self.hurry, hurried, growth))  # type: ignore[return-value]

    def excess_scale(self, u: Time, total: int) -> Time:
        """Return the excess at which the growth is ``gain``; from ``hurry`` on any excess gives max_growth."""
        scale = np.maximum(1.0, self.width * np.minimum(self.target(u, total), total - self.keep))
        return np.where(u >= self.hurry, _TINY, scale)  # type: ignore[return-value]

    def growth_rate(self, u: float, total: int, alive: float) -> float:
        """Return d(log λ)/du for this number of gates that are, or will be, alive: 0 without an excess."""
        excess = max(0.0, alive - self.target(u, total))
        return float(self.gain * min(excess / self.excess_scale(u, total), self.max_growth(u)))

    def alive_weight(self, u: Time) -> Time:
        """Return the weight of the number of alive gates; the prediction has the rest."""
        weight = (1 - self.remaining(u)) ** self.ahead_power
        return np.where((self.ahead == 0) | (u >= self.hurry), 1.0, weight)  # type: ignore[return-value]


class TableRow(NamedTuple):
    """What depends only on the step number: the columns of the table, in float64."""

    epsilon: Any  # ε
    lr: Any  # η
    scale: Any  # g(1) at the ε of the last update of the rescale
    refresh: Any  # 1 where the RMS rescale is updated
    target: Any  # Keep.target
    excess_scale: Any  # Keep.excess_scale
    max_growth: Any  # Keep.max_growth
    alive_weight: Any  # Keep.alive_weight
    freeze: Any  # 1 from Keep.freeze on
    hurry: Any  # 1 from Keep.hurry on


COLUMN = TableRow(*range(len(TableRow._fields)))  # number of each column


def control_table(schedule: Schedule, keep: Keep | None, total: int, steps: int, refresh_until: float) -> Tensor:
    """Return the table (steps + 1, len(TableRow)) in float64; later steps use the last row. ``scale`` is all 1."""
    step = np.arange(steps + 1)
    u = step / steps
    columns: dict[str, NDArray[Any]] = dict.fromkeys(TableRow._fields, np.zeros(steps + 1))
    columns["epsilon"], columns["lr"] = schedule.epsilon(step), schedule.lr(step)
    columns["scale"] = np.ones(steps + 1)
    columns["refresh"] = (step % schedule.refresh == 0) & (step <= refresh_until)
    if keep is not None:
        columns["target"], columns["excess_scale"] = keep.target(u, total), keep.excess_scale(u, total)
        columns["max_growth"], columns["alive_weight"] = keep.max_growth(u), keep.alive_weight(u)
        columns["freeze"], columns["hurry"] = u >= keep.freeze, u >= keep.hurry
    return torch.from_numpy(np.stack([columns[name] for name in TableRow._fields], axis=1).astype(np.float64))


class Constants(NamedTuple):
    """Numbers of the control law that do not change during a search."""

    keep: float
    gain: float
    cut: float
    clear: float
    ahead_per_lag: float
    lag_steps: float  # the time constant of the moving average, in steps
    base_penalty: float
    steps: float


CONSTANT = Constants(*range(len(Constants._fields)))  # number of each constant


@dataclass(frozen=True)
class PenaltyController:
    """The control law with its constants; it holds no tensors.

    Args:
        keep: the constants.
        steps: length of the search.
        base_penalty: λ is not reduced below this value before the freeze.
    """

    keep: Keep
    steps: int
    base_penalty: float

    @cached_property
    def constants(self) -> Constants:
        """The numbers of the law."""
        keep = self.keep
        ahead_per_lag, lag_steps = keep.ahead / keep.lag, max(1.0, keep.lag * self.steps)
        own = float(keep.keep), keep.gain, keep.cut, keep.clear
        return Constants(*own, ahead_per_lag, lag_steps, self.base_penalty, float(self.steps))

    @cached_property
    def constant_array(self) -> NDArray[np.float64]:
        """The numbers of the law for the compiled form."""
        return np.array(self.constants)


# The law. Nothing branches on a value but through ``active``, which omits what has no effect if the host can read
# the condition without waiting. See lpfs.gates.host for how numba compiles it.


def restore_gates(x: Tensor, previous_x: Tensor, momentum: Tensor, hurry: Any, keep: float) -> Any:
    """Restore gates, in place, if too few are alive; return the number alive, and whether too few were."""
    alive = torch.count_nonzero(x).double()
    too_few = alive < keep
    if active(too_few):
        limit = torch.where(hurry != 0, keep - alive, math.inf)
        revived = revived_mask(x, previous_x, limit) & too_few
        x.copy_(torch.where(revived, previous_x, x))
        momentum.copy_(torch.where(revived, 0.0, momentum))
        alive = torch.count_nonzero(x).double()
    return alive, too_few


def update_penalty(
    x: Tensor,
    previous_x: Tensor,
    dead: Tensor,
    control: Tensor,
    penalty_now: Tensor,
    value: Tensor,
    alive: Tensor,
    too_few: Tensor,
    epsilon: Tensor,
    square: bool,
    row: Any,
    law: Any,
) -> None:
    """Update, in place, λ and x after ``restore_gates``; freeze the dead gates.

    Args:
        x: (N,).
        previous_x: (N,) x after the previous step.
        dead: (N,) the frozen dead gates; all False before the freeze.
        control: (3,) float64: λ, whether frozen, moving average of the effective count.
        penalty_now: (N,) float64: λ of every gate; infinite where a dead gate is frozen.
        value: (N,) the gate values.
        alive, too_few: what ``restore_gates`` returned.
        epsilon: ().
        square: whether ε is on the scale of x².
        row: (columns,) a row of the table.
        law: (constants,) the constants.
    """
    penalty, frozen, average = control[0], control[1], control[2]
    is_frozen, size = frozen != 0, torch.abs(value)
    predicts = (row[COLUMN.alive_weight] < 1) & (frozen == 0)
    count = alive
    if active(predicts):
        wide = effective_count(size)
        moved = torch.where(average != 0, average + (wide - average) / law[CONSTANT.lag_steps], wide)
        average = torch.where(predicts, moved, average)
        predicted = wide + law[CONSTANT.ahead_per_lag] * (wide - average)
        count = row[COLUMN.alive_weight] * alive + (1 - row[COLUMN.alive_weight]) * predicted
    excess = torch.clamp(count - row[COLUMN.target], 0.0, math.inf)
    growth = law[CONSTANT.gain] * torch.minimum(excess / row[COLUMN.excess_scale], row[COLUMN.max_growth])
    reduced = torch.maximum(penalty * law[CONSTANT.cut], torch.clamp(penalty, 0.0, law[CONSTANT.base_penalty]))
    next_penalty = torch.where(too_few, reduced, penalty * torch.exp(growth / law[CONSTANT.steps]))
    next_penalty = torch.where(is_frozen, 0.0, next_penalty)

    may_freeze = (row[COLUMN.freeze] != 0) & (alive == law[CONSTANT.keep]) & (frozen == 0)
    if active(may_freeze):
        smallest = torch.where(x == 0, math.inf, size).min().double()
        freezes = may_freeze & ((smallest >= law[CONSTANT.clear]) | (row[COLUMN.hurry] != 0))
        dead.copy_(dead | ((x == 0) & freezes))
        frozen = torch.where(freezes, 1.0, frozen)
    if active(is_frozen):
        rise = torch.sqrt(epsilon.double()).to(epsilon) if square else epsilon  # the x at which the gate function rises
        x.copy_(torch.where((x != 0) & (torch.abs(x) < rise) & is_frozen, torch.sign(x) * rise, x))
    previous_x.copy_(x)
    control[1], control[2], control[0] = frozen, average, next_penalty
    penalty_now.copy_(torch.where(dead, math.inf, next_penalty))


def effective_count(size: Tensor) -> Any:
    """Return Σ|g| / max|g|, each term rounded down to a multiple of 2⁻²⁴: the sum does not depend on the order.

    >>> effective_count(torch.tensor([0.0, 0.8, 0.4, 0.2])).item()
    1.75
    """
    shares = size / torch.clamp(size.max(), 1e-30, math.inf)
    return torch.floor(shares * RESOLUTION).double().sum() / RESOLUTION


def revived_mask(x: Tensor, previous_x: Tensor, limit: Any) -> Any:
    """Return the gates (N,) to restore: zeroed in this step, at most ``limit`` of them, the largest |x| first.

    >>> x, previous_x = torch.tensor([0.0, 0.0, 0.5, 0.0]), torch.tensor([0.1, -0.2, 0.4, 0.0])
    >>> revived_mask(x, previous_x, 1)
    tensor([False,  True, False, False])
    """
    zeroed = (x == 0) & (previous_x != 0)
    order = torch.argsort(torch.where(zeroed, -torch.abs(previous_x), 1.0), stable=True)
    return zeroed & (torch.argsort(order) < limit)


@dataclass(frozen=True)
class PenaltySpec:
    """Either ``keep`` or a fixed ``penalty``; ``weights`` (N,) is the factor on λ of every field."""

    keep: Keep | None
    penalty: float
    weights: Tensor

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        steps: int,
        seed: int,
        keep: int | None,
        penalty: float | Sequence[float] | Tensor | None,
        costs: Sequence[float] | Tensor | None,
        must_keep: Sequence[str],
        prox: str,
        control: Keep | None,
    ) -> PenaltySpec:
        """Return the arguments of ``Gates.optimizer`` as a spec, after checking them."""
        if (keep is None) == (penalty is None):
            raise InputError("give either keep=K, the number of fields to keep, or penalty=λ, not both")
        weights = _field_weights(names, costs, must_keep)
        if keep is None:
            return cls._fixed(penalty, weights)
        size, free = len(names), int((weights == 0).sum())
        if isinstance(keep, bool) or not isinstance(keep, Integral) or not 1 <= keep <= size:
            raise InputError(f"keep must be an integer between 1 and the {size} fields, found {keep!r}")
        keep = int(keep)
        if keep < free:
            raise InputError(f"keep={keep} is less than the {free} fields that must be kept or have no cost")
        if keep < size and steps < MIN_STEPS:
            raise InputError(
                f"keep={keep} needs a search of at least {MIN_STEPS} steps (1,000 or more are better), but "
                f"these gates were attached with steps={steps}"
            )
        if prox == "l0":
            raise InputError("keep=K controls the threshold of the l1 prox; with prox='l0' give penalty=λ")
        if control is not None and control.keep != keep:
            raise InputError(f"control is for keep={control.keep}, not for keep={keep}")
        constants = control or Keep(keep)
        # Fields without any gradient would all become zero in the same step.
        noise = torch.rand(size, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return cls(constants, 0.0, weights * (1 + constants.tie_spread * noise))

    @classmethod
    def _fixed(cls, penalty: Any, weights: Tensor) -> PenaltySpec:
        levels = _float_tensor("penalty", penalty)
        if levels.ndim and levels.shape != weights.shape:
            raise InputError(f"penalty must be one number or {len(weights)}, found shape {tuple(levels.shape)}")
        if not bool((levels >= 0).all()):
            raise InputError(f"penalty must be >= 0, found {penalty!r}")
        if levels.ndim == 0:
            return cls(None, float(levels), weights)
        top = float(levels.max())
        return cls(None, top, weights * (levels / top if top else levels))


def _field_weights(names: Sequence[str], costs: Any, must_keep: Sequence[str]) -> Tensor:
    """Return the factor on λ of every field (N,): its relative cost, and 0 where it must be kept."""
    size = len(names)
    weights = torch.ones(size, dtype=torch.float32, device="cpu")
    if costs is not None:
        weights = _float_tensor("costs", costs)
        if weights.shape != (size,):
            raise InputError(f"costs must be {size} numbers, one per field, found shape {tuple(weights.shape)}")
        if not bool(((weights >= 0) & torch.isfinite(weights)).all()) or not bool(weights.any()):
            raise InputError("costs must be finite numbers >= 0, and at least one of them > 0")
        weights = weights / weights.mean()
    for name in [must_keep] if isinstance(must_keep, str) else must_keep:
        if name not in names:
            raise FieldError(f"must_keep names {name!r}, which is not a gated field; the fields are {list(names)}")
        weights[list(names).index(name)] = 0.0
    return weights


def _float_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be a number or one per field, found {value!r}") from None
