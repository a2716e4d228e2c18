"""Gates: the learnable vector x, one entry a field, and everything that moves with it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lpfs.errors import AllGatesZeroError, FieldError, InputError, SearchError, StateError
from lpfs.gates.control import Keep
from lpfs.gates.functions import GateFunction
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule, make_schedule
from lpfs.schema import Selection

Rescale = Literal["epsilon", "rms", "off"]

NAME = "lpfs_gates"
# The RMS rescale is refreshed up to this part of a search, then it stays.
RESCALE_UNTIL = 0.95
# The control of λ cannot steer in fewer steps than this.
FEWEST_STEPS = 50
# Fading noise is gone after this part of a search.
NOISE_UNTIL = 0.7

# Every Gates there is, copies included: an optimizer of the model must not hold their x.
ALL_GATES: weakref.WeakSet[Gates] = weakref.WeakSet()

_Self = TypeVar("_Self", bound="Gates")


@dataclass(frozen=True)
class Status:
    """Where a search stands; ``print`` it for one readable line."""

    step: int
    steps: int
    alive: int
    total: int
    smallest: float
    epsilon: float
    lr: float
    penalty: float
    frozen: bool

    def __str__(self) -> str:
        settled = ", settled" if self.frozen else ""
        return (
            f"step {self.step:,} of {self.steps:,}: {self.alive} of {self.total} gates alive{settled}, "
            f"smallest |g| {self.smallest:.3g}, ε {self.epsilon:.2g}, η {self.lr:.2g}, λ {self.penalty:.3g}"
        )


class Gates(nn.Module):
    """One learnable gate a field: g(x), divided by its value at the start, so that it is exactly 1.0 there.

    ``lpfs.attach`` makes it and registers it on the model as ``lpfs_gates``. Calling it gives the gate values
    (N,) with their gradient. x, ε, the rescale, the control of λ and the step count are all in its state dict.

    Args:
        names: the fields, in order.
        function: the gate function.
        steps: how long the search is meant to be; schedules are scaled to it.
        schedule: ``scaled``, ``terabyte``, ``industrial`` or a :class:`Schedule`.
        rescale: an overall factor, without gradient: ``epsilon`` divides by the gate of x = 1 at the ε of the
            moment, so that survivors end near 1; ``rms``, the paper's, by the root mean square of the gates
            alive; ``off`` by nothing.
        seed: for the noise of noisy gates, and for parting ties.

    """

    x: nn.Parameter
    norm: Tensor
    epsilon: Tensor
    scale: Tensor
    noise: Tensor
    steps_done: Tensor
    control: Tensor
    dead: Tensor
    before: Tensor

    def __init__(
        self,
        names: Sequence[str],
        function: GateFunction,
        steps: int = 20_000,
        schedule: Preset | Schedule = "scaled",
        rescale: Rescale = "epsilon",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not names:
            raise FieldError("gates need at least one field")
        if rescale not in ("epsilon", "rms", "off"):
            raise InputError(f"rescale must be 'epsilon', 'rms' or 'off', found {rescale!r}")
        self.names = tuple(names)
        self.function = function
        self.steps = steps
        self.schedule = make_schedule(schedule, function, steps)
        self._preset = schedule
        self.rescale = rescale
        self.seed = seed
        self.places: dict[str, tuple[Any, ...]] = {}
        self.keep: Keep | None = None
        self._prox: weakref.ref[ProxSGD] | None = None
        self._weights: Tensor | None = None
        self._owner: list[nn.Module] = []  # in a list, so that it is not taken for a submodule
        self._disabled = False
        self.live: tuple[Tensor, tuple[Tensor, ...]] | None = None
        size = len(self.names)
        self.x = nn.Parameter(torch.ones(size))
        self.register_buffer("norm", torch.ones(size), persistent=False)
        self.register_buffer("epsilon", torch.tensor(self.schedule.epsilon(0)))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("noise", torch.zeros(size))
        self.register_buffer("steps_done", torch.tensor(0))
        # λ, caution, whether the dead set is frozen; then the dead set; then x and its momentum a step ago
        self.register_buffer("control", torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
        self.register_buffer("dead", torch.zeros(size, dtype=torch.bool))
        self.register_buffer("before", torch.stack([torch.ones(size), torch.zeros(size)]))
        self._normalise()
        ALL_GATES.add(self)

    # ------------------------------------------------------------------ values

    def forward(self) -> Tensor:
        """Return the gate values (N,): g(x) / (g at the start · scale)."""
        x = self.x + self.noise if self.training and self.function.noise else self.x
        return self.function.value(x, self.epsilon) / (self.norm * self.scale)

    @property
    def values(self) -> Tensor:
        """The gate values (N,), without noise and without gradient."""
        with torch.no_grad():
            return self.function.value(self.x, self.epsilon) / (self.norm * self.scale)

    @property
    def kept(self) -> list[str]:
        """Names of the fields whose gate is not zero."""
        return [name for name, alive in zip(self.names, self._alive(), strict=True) if alive]

    @property
    def dropped(self) -> list[str]:
        """Names of the fields whose gate is exactly zero."""
        return [name for name, alive in zip(self.names, self._alive(), strict=True) if not alive]

    def selection(self, **made: Any) -> Selection:
        """Return the answer as it stands: kept, dropped, gate values, where the fields enter."""
        values = dict(zip(self.names, self.values.tolist(), strict=True))
        how = {
            "gate": self.function.name,
            "alpha": self.function.alpha,
            "tau": self.function.tau,
            "keep": None if self.keep is None else self.keep.keep,
            "penalty": float(self.control[0]),
            "step": int(self.steps_done),
            "steps": self.steps,
            "seed": self.seed,
        }
        sites = {name: [each.to_json() for each in places] for name, places in self.places.items()}
        return Selection(tuple(self.kept), tuple(self.dropped), values, sites, (), {**how, **made})

    def status(self) -> Status:
        """Return where the search stands."""
        values = self.values.abs()
        alive = values[values > 0]
        step = int(self.steps_done)
        return Status(
            step=step,
            steps=self.steps,
            alive=alive.numel(),
            total=len(self.names),
            smallest=float(alive.min()) if alive.numel() else 0.0,
            epsilon=float(self.epsilon),
            lr=self.schedule.lr(step),
            penalty=float(self.control[0]),
            frozen=bool(self.control[2]),
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this block the model runs as if it had no gates."""
        was, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = was

    def model_parameters(self) -> list[nn.Parameter]:
        """Return every parameter of the model except x, for the model's own optimizer."""
        if not self._owner:
            raise StateError("these gates are not attached to a model (any more)")
        return [each for each in self._owner[0].parameters() if each is not self.x]

    # --------------------------------------------------------------- optimizer

    def optimizer(
        self,
        keep: int | None = None,
        *,
        penalty: float | Sequence[float] | Tensor | None = None,
        lr: float | None = None,
        momentum: float = 0.9,
        costs: Sequence[float] | Tensor | None = None,
        must_keep: Sequence[str] = (),
        prox: Prox = "l1",
        threshold: Threshold = "paper",
        control: Keep | None = None,
    ) -> ProxSGD:
        """Return the optimizer of the gates; ``gates.step()`` then moves its learning rate and λ.

        Args:
            keep: end with exactly this many fields, by control of λ.
            penalty: instead, the paper's fixed λ, one number or one a field.
            lr: the learning rate at the start, instead of the schedule's.
            momentum: β.
            costs: λ is weighted by cost / mean cost, so that a dear field has to earn its place.
            must_keep: fields that are not penalised; they count within ``keep``.
            prox: ``l1``, or ``l0`` for the ablation.
            threshold: see :class:`ProxSGD`.
            control: settings of the control of λ, for those who want to change them.

        """
        size = len(self.names)
        if (keep is None) == (penalty is None):
            raise InputError("say what you want: either keep=K (how many fields) or penalty=λ, not both")
        weights = self._check_weights(costs, must_keep)
        free = size - int((weights == 0).sum())
        if keep is not None:
            if not 1 <= keep <= size:
                raise InputError(f"keep must be between 1 and the {size} fields, found {keep!r}")
            if keep < size and self.steps < FEWEST_STEPS:
                raise InputError(
                    f"keep={keep} needs a search of at least {FEWEST_STEPS} steps (1,000 or more are better), but "
                    f"these gates were attached with steps={self.steps}"
                )
            if keep < size - free:
                raise InputError(
                    f"keep={keep} is less than the {size - free} fields that must be kept or cost nothing"
                )
        schedule = make_schedule(self._preset, self.function, self.steps, lr)
        if keep is not None:
            keeper = control or Keep(keep)
            if keeper.keep != keep:
                raise InputError(f"control is for keep={keeper.keep}, not for keep={keep}")
            # Exact ties (fields without any gradient) would die in one step: part them by up to 1 %.
            generator = torch.Generator().manual_seed(self.seed)
            weights = weights * (1 + 0.01 * torch.rand(size, generator=generator))
            first = keeper.first_penalty(schedule.total_lr(self.steps)) if keep < size else 0.0
        else:
            keeper = None
            level = torch.as_tensor(penalty, dtype=torch.float32)
            if level.ndim and level.shape != (size,):
                raise InputError(f"penalty must be one number or {size} of them, found {tuple(level.shape)}")
            if not bool((level >= 0).all()):
                raise InputError(f"penalty must be >= 0, found {penalty!r}")
            first = float(level) if level.ndim == 0 else 1.0
            weights = weights if level.ndim == 0 else weights * level
        device = self.x.device
        optimizer = ProxSGD(
            [self.x],
            lr=schedule.lr(int(self.steps_done)),
            momentum=momentum,
            penalty=first,
            weights=weights.to(device),
            prox=prox,
            threshold=threshold,
        )
        self.schedule, self.keep, self._weights = schedule, keeper, weights.to(device)
        if int(self.steps_done) == 0:
            self.control[0] = first
        self._prox = weakref.ref(optimizer)
        return optimizer

    def _check_weights(self, costs: Sequence[float] | Tensor | None, must_keep: Sequence[str]) -> Tensor:
        """Return the factor on λ of every field: its relative cost, and 0 where it must be kept."""
        size = len(self.names)
        weights = torch.ones(size)
        if costs is not None:
            weights = torch.as_tensor(costs, dtype=torch.float32).detach().cpu().clone()
            if weights.shape != (size,):
                raise InputError(f"costs must be {size} numbers, one a field, found {tuple(weights.shape)}")
            if not bool(((weights >= 0) & torch.isfinite(weights)).all()) or not bool(weights.any()):
                raise InputError("costs must be finite numbers >= 0, not all of them 0")
            weights = weights / weights.mean()
        for name in must_keep:
            if name not in self.names:
                raise FieldError(f"must_keep names no gated field: {name!r}; there are {list(self.names)}")
            weights[self.names.index(name)] = 0.0
        return weights

    # -------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self) -> None:
        """Move on by one training step: ε, the gate learning rate, λ, the rescale, the noise.

        Call it once after the optimizers' own steps. Nothing of this moves in ``forward`` or in evaluation.
        """
        done = int(self.steps_done) + 1
        prox = self._optimizer()
        if prox is not None and self.keep is not None:
            self._steer(prox, self.keep, done)
        alive = self.x != 0
        if not bool(alive.any()):
            raise AllGatesZeroError(
                f"every gate is at zero after {done} steps: nothing is left to select. Lower the penalty "
                f"(λ = {float(self.control[0]):.3g}), lower the gates' learning rate, or say keep=K instead"
            )
        self.steps_done.fill_(done)
        self.epsilon.fill_(self.schedule.epsilon(done))
        if prox is not None:
            prox.param_groups[0]["lr"] = self.schedule.lr(done)
        self._rescale(done, alive)
        if self.function.noise:
            self._draw_noise(done)

    def _steer(self, prox: ProxSGD, keep: Keep, done: int) -> None:
        """Move λ after a step of the gates; take the step back if it killed too many (see control.py)."""
        group = prox.param_groups[0]
        penalty, caution, frozen = self.control.tolist()
        total, u = len(self.names), done / self.steps
        velocity = prox.state[self.x].get("momentum_buffer")
        alive = int((self.x != 0).sum())
        if alive < keep.keep:
            self.x.copy_(self.before[0])
            if velocity is not None:
                velocity.copy_(self.before[1])
            alive = int((self.x != 0).sum())
            penalty, caution = penalty * keep.cut, max(0.01, caution * 0.5)
        elif frozen:
            penalty *= math.exp(-keep.fade / self.steps)
            self._clear(keep, done)
        else:
            penalty *= math.exp(caution * keep.growth(u, total, alive) / self.steps)
            caution = min(1.0, caution * 1.1)
        if not frozen and alive == keep.keep and u >= keep.freeze:
            smallest = float(self.values[self.x != 0].abs().min())
            if smallest >= keep.clear or u >= keep.hurry:
                self.dead.copy_(self.x == 0)
                frozen = 1.0
        if done >= self.steps and alive != keep.keep:
            raise SearchError(
                f"the search ended with {alive} fields alive instead of {keep.keep}; give it more steps"
            )
        self.control.copy_(torch.tensor([penalty, caution, frozen], dtype=torch.float64))
        self.before[0].copy_(self.x)
        if velocity is not None:
            self.before[1].copy_(velocity)
        assert self._weights is not None
        group["penalty"] = torch.where(self.dead, math.inf, penalty) if frozen else penalty

    def _rescale(self, done: int, alive: Tensor) -> None:
        """Refresh the overall factor of the gates."""
        if self.rescale == "off" or done % self.schedule.refresh:
            return
        if self.rescale == "epsilon":
            top = self.function.value(torch.ones_like(self.x), self.epsilon) / self.norm
            self.scale.copy_(top[0])
        elif done <= RESCALE_UNTIL * self.steps:
            values = (self.function.value(self.x, self.epsilon) / self.norm)[alive]
            self.scale.copy_(values.square().mean().sqrt())

    def _clear(self, keep: Keep, done: int) -> None:
        """Lead survivors that sit near zero away from it, before the search ends."""
        near = (self.values.abs() < 1.5 * keep.clear) & (self.x != 0)
        if bool(near.any()):
            scale = self.epsilon.sqrt() if self.function.square else self.epsilon
            left = max(1, self.steps - done)
            self.x.add_(torch.where(near, torch.sign(self.x) * 2 * scale / min(left, 100), 0.0))

    def _draw_noise(self, done: int) -> None:
        """Draw the noise on x for the next forward: smaller and smaller, then none."""
        left = max(0.0, 1 - done / (NOISE_UNTIL * self.steps))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + done)
        draw = torch.randn(len(self.names), generator=generator)
        self.noise.copy_(draw * (self.function.noise * left))
        self.noise[self.dead] = 0.0

    # ---------------------------------------------------------------- plumbing

    def _alive(self) -> list[bool]:
        alive: list[bool] = (self.values != 0).tolist()
        return alive

    def _optimizer(self) -> ProxSGD | None:
        prox = self._prox() if self._prox is not None else None
        if prox is None or all(each is not self.x for each in prox.param_groups[0]["params"]):
            return None
        return prox

    @torch.no_grad()
    def _normalise(self) -> None:
        """Set the value at the start by the same kernel on the same device, so that g/norm is exactly 1.0."""
        start = torch.full_like(self.epsilon, self.schedule.epsilon(0))
        self.norm.copy_(self.function.value(torch.ones_like(self.x), start))

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        """Move to another device with the model, but stay in full precision."""
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        if self._weights is not None:
            self._weights = self._weights.to(self.x.device)
        self._normalise()
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        return {**state, "_prox": None, "live": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ALL_GATES.add(self)

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the gates."""
        return f"{len(self.names)} fields, {self.function.name}, {len(self.kept)} alive"


def device_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what ``model.to(…)`` does to a tensor, without its change of dtype: gates stay in float32."""
    return lambda each: each.to(fn(each.new_empty(0)).device)
