"""Gates: the learnable vector x, one entry a field, and everything that moves with it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lpfs.errors import AllGatesZeroError, FieldError, InputError, NonFiniteError, SearchError, StateError
from lpfs.gates import device
from lpfs.gates.control import Keep
from lpfs.gates.functions import GateFunction
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.plan import make_plan
from lpfs.gates.schedule import Preset, Schedule, make_schedule
from lpfs.gates.status import Status
from lpfs.gates.steer import remember, set_penalty, steer
from lpfs.schema import Selection

Live = tuple[Tensor, tuple[Tensor, ...]]
Rescale = Literal["epsilon", "rms", "off"]

NAME = "lpfs_gates"
# The RMS rescale is refreshed up to this part of a search, then it stays.
RESCALE_UNTIL = 0.95
# Fading noise is gone after this part of a search.
NOISE_UNTIL = 0.7
# On a GPU, what went wrong is looked up once in this many steps: the host has to wait for the answer.
CHECK_EVERY = 100

# Every Gates there is, copies included: an optimizer of the model must not hold their x.
ALL_GATES: weakref.WeakSet[Gates] = weakref.WeakSet()

_Self = TypeVar("_Self", bound="Gates")


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
    flags: Tensor
    about: Tensor

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
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"steps must be a whole number of at least 1, found {steps!r}")
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
        self._prox: ProxSGD | None = None
        self._loaded = False
        self._owner: list[nn.Module] = []  # in a list, so that it is not taken for a submodule
        self._disabled = False
        # whether steps are taken without the host: None for wherever x is on a GPU; its table; steps since a check
        self.branch_free: bool | None = None
        self._table: Tensor | None = None
        self._unchecked = 0
        # values of the forward that is under way, and of the last one; whether there was one; the hooks
        self.live: Live | None = None
        self.last: Live | None = None
        self.entered = False
        self.hooks: list[Any] = []
        ones = torch.ones(len(self.names), dtype=torch.float32)
        self.x = nn.Parameter(ones.clone())
        self.register_buffer("norm", ones.clone(), persistent=False)
        self.register_buffer("epsilon", torch.tensor(self.schedule.epsilon(0), dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.register_buffer("noise", torch.zeros_like(ones))
        self.register_buffer("steps_done", torch.tensor(0))
        # λ, caution, whether the dead set is frozen; then the dead set; then x and its momentum a step ago
        self.register_buffer("control", torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
        self.register_buffer("dead", torch.zeros_like(ones, dtype=torch.bool))
        self.register_buffer("before", torch.stack([ones, torch.zeros_like(ones)]))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.int64), persistent=False)
        about = json.dumps(self._about()).encode()
        self.register_buffer("about", torch.tensor(list(about), dtype=torch.uint8))
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
        return self.values_of(self.x)

    @torch.no_grad()
    def values_of(self, x: Tensor) -> Tensor:
        """Return what the gate values (N,) are at another x."""
        return self.function.value(x, self.epsilon) / (self.norm * self.scale)

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
        self.check()
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
            "rescale": self.rescale,
            "epsilon": float(self.epsilon),
        }
        sites = {name: [each.to_json() for each in places] for name, places in self.places.items()}
        return Selection(tuple(self.kept), tuple(self.dropped), values, sites, (), {**how, **made})

    def status(self) -> Status:
        """Return where the search stands; on a GPU the host waits here, and hears of what went wrong."""
        self.check()
        alive = self.values[self.x != 0].abs()
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
        plan = make_plan(self.names, self.steps, self.seed, keep, penalty, costs, must_keep, prox, control)
        alive = int((self.x != 0).sum())
        if plan.keep is not None and plan.keep.keep > alive and not self.function.revives:
            raise InputError(
                f"keep={keep}, but only {alive} gates are alive, and {self.function.name!r} revives none"
            )
        if lr is not None and isinstance(self._preset, Schedule):
            raise InputError("lr= and a Schedule of your own: say it in one place, Schedule(…, lr=Decay(…))")
        schedule = make_schedule(self._preset, self.function, self.steps, lr)
        done = int(self.steps_done)
        first = plan.penalty
        if plan.keep is not None and plan.keep.keep < len(self.names):
            left = schedule.total_lr(self.steps) - schedule.total_lr(done)
            first = plan.keep.first_penalty(max(left, schedule.lr(done)))
        optimizer = ProxSGD(
            [self.x],
            lr=schedule.lr(done),
            momentum=momentum,
            penalty=first,
            weights=plan.weights.to(self.x.device),
            prox=prox,
            threshold=threshold,
        )
        self.schedule, self.keep, self._prox, self._table = schedule, plan.keep, optimizer, None
        self._choose_path()
        if self._loaded:  # a search that goes on: its control came with the state dict
            self._loaded = False
            set_penalty(self, optimizer)
        else:
            self.control.copy_(torch.tensor([first, 1.0, 0.0], dtype=torch.float64))
            self.dead.zero_()
            with torch.no_grad():
                remember(self, optimizer)
        return optimizer

    # -------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self) -> None:
        """Move on by one training step: ε, the gate learning rate, λ, the rescale, the noise.

        Call it once after the optimizers' own steps. Nothing of this moves in ``forward`` or in evaluation.
        On a GPU it never waits for the device and can be captured in a CUDA graph; what goes wrong is then raised
        later, by :meth:`check`.
        """
        prox = self._optimizer()
        if self._without_host():
            self._step_on_device(prox)
            return
        done = int(self.steps_done) + 1
        if done == min(100, self.steps):
            self.refuse_idle()
        if self.keep is not None and prox is not None:
            steer(self, prox, self.keep, done)
        alive = self.x != 0
        if not bool(alive.any()):
            raise self._all_zero(done)
        self.steps_done.fill_(done)
        self.epsilon.fill_(self.schedule.epsilon(done))
        if prox is not None:
            prox.param_groups[0]["lr"] = self.schedule.lr(done)
        self._rescale(done, alive)
        if self.function.noise:
            self._draw_noise(done)
        if self.keep is not None and done == self.steps:
            self._check_end(self.keep)

    def _all_zero(self, done: int) -> AllGatesZeroError:
        return AllGatesZeroError(
            f"every gate is at zero after {done} steps: nothing is left to select. Lower the penalty "
            f"(λ = {float(self.control[0]):.3g}), lower the gates' learning rate, or say keep=K instead"
        )

    def _check_end(self, keep: Keep) -> None:
        """Say so if a search ended with another number of fields than was asked for."""
        alive = self.values[self.x != 0].abs()
        if alive.numel() != keep.keep or float(alive.min()) < keep.clear:
            raise SearchError(
                f"after {self.steps} steps {alive.numel()} fields are alive instead of {keep.keep}, the smallest "
                f"at |g| = {float(alive.min()):.2g}. Was prox.step() called in every step, with a gradient? Go on "
                "for some steps, or attach with more steps"
            )

    def refuse_idle(self) -> None:
        """Refuse fields whose module has never run although the model has: their gates would die unheard."""
        idle = {self.names[number] for hook in self.hooks if not hook.ran for number, _ in hook.at}
        if self.entered and idle:
            raise FieldError(
                f"the modules given for {sorted(idle)} never ran, though the model did: a container, a table that "
                "is used by its weight alone, or a part that is switched off? Give the module whose output is the "
                "embedding"
            )

    def _rescale(self, done: int, alive: Tensor) -> None:
        """Refresh the overall factor of the gates."""
        if self.refreshes(done):
            self.scale.copy_(self.fresh_scale(alive))

    def refreshes(self, done: int) -> bool:
        """Whether the overall factor is refreshed after this step."""
        due = self.rescale != "off" and done % self.schedule.refresh == 0
        return due and (self.rescale == "epsilon" or done <= RESCALE_UNTIL * self.steps)

    def fresh_scale(self, alive: Tensor) -> Tensor:
        """Return the overall factor () for the ε and x of the moment."""
        if self.rescale == "epsilon":
            return (self.function.value(torch.ones_like(self.x), self.epsilon) / self.norm)[0]
        values = self.function.value(self.x, self.epsilon) / self.norm
        if not self._without_host():
            return values[alive].square().mean().sqrt()
        squares = torch.where(alive, values.square(), 0.0).sum()
        return (squares / alive.sum().clamp(min=1)).sqrt()

    # --------------------------------------------------------------- on a GPU

    def _without_host(self) -> bool:
        """Whether steps are taken without asking the device anything. Noise is drawn on the host, so not there."""
        wanted = self.x.is_cuda if self.branch_free is None else self.branch_free
        return wanted and not self.function.noise

    def _choose_path(self) -> None:
        """Let the optimizer step as these gates do."""
        if self._prox is not None:
            self._prox.stepper = self if self._without_host() else None

    def move(self) -> None:
        """Take the step of the optimizer, for it, without the host."""
        prox = self._optimizer()
        assert prox is not None
        device.move(prox, self)

    def mirror(self) -> None:
        """Write the learning rate and λ of the moment where the optimizer has them elsewhere."""
        if self._prox is not None:
            self._prox.param_groups[0]["lr"] = self.schedule.lr(int(self.steps_done))
            set_penalty(self, self._prox)

    def row(self) -> Tensor:
        """Return what the schedule and the control of λ say for the step count on the device."""
        if self._table is None or self._table.device != self.x.device:
            self._table = device.make_table(self).to(self.x.device)
        return self._table.index_select(0, self.steps_done.clamp(max=self.steps).view(1))[0]

    def _step_on_device(self, prox: ProxSGD | None) -> None:
        device.advance(self, prox)
        if self.x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._unchecked += 1
        if self._unchecked >= CHECK_EVERY:
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Raise what went wrong since the last check where steps are taken without the host, as on a GPU.

        ``step`` calls it once in 100 steps, ``status``, ``selection`` and ``absorb`` always. A step replayed by a
        CUDA graph calls nothing: call it yourself now and then. Elsewhere errors are raised at once.
        """
        if self._without_host():
            self._raise_flags()

    def _raise_flags(self) -> None:
        self._unchecked = 0
        done, (refused, zero, wrong) = int(self.steps_done), self.flags.tolist()
        self.flags.zero_()
        if done >= min(100, self.steps):
            self.refuse_idle()
        if zero:
            raise self._all_zero(zero)
        if refused:
            raise NonFiniteError(
                f"the gradient of the gates was not finite in {refused} steps up to step {done}: the gates stood "
                "still in these. Look for a loss of inf or nan, or lower the learning rate of the model"
            )
        if wrong and self.keep is not None:
            self._check_end(self.keep)

    def _draw_noise(self, done: int) -> None:
        """Draw the noise on x for the next forward: smaller and smaller, then none."""
        left = max(0.0, 1 - done / (NOISE_UNTIL * self.steps))
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + done)
        draw = torch.randn(len(self.names), generator=generator, device="cpu")
        self.noise.copy_(draw * (self.function.noise * left))
        self.noise[self.dead] = 0.0

    # ---------------------------------------------------------------- plumbing

    def _alive(self) -> list[bool]:
        alive: list[bool] = (self.x != 0).tolist()
        return alive

    def _optimizer(self) -> ProxSGD | None:
        """Return the optimizer that ``optimizer()`` made, if it still holds x."""
        if self._prox is not None and all(each is not self.x for each in self._prox.param_groups[0]["params"]):
            raise StateError("the optimizer of these gates holds another x: call gates.optimizer(…) again")
        return self._prox

    def _about(self) -> dict[str, Any]:
        """Return what must agree for a state dict to fit."""
        gate = self.function
        about = {"fields": list(self.names), "gate": gate.name, "alpha": gate.alpha, "tau": gate.tau}
        return {**about, "steps": self.steps, "rescale": self.rescale}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load, after a check that the state is one of gates like these."""
        theirs = state_dict.pop(f"{prefix}about", None)
        if theirs is not None:
            there = json.loads(bytes(theirs.tolist()).decode())
            for key, value in self._about().items():
                if there.get(key) != value:
                    raise StateError(
                        f"this state dict is of gates with {key} = {there.get(key)!r}, but these gates have "
                        f"{value!r}: attach as it was done there"
                    )
            state_dict[f"{prefix}about"] = theirs
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self._prox is None:
            self._loaded = True
        else:
            self.mirror()
        self.flags.zero_()

    @torch.no_grad()
    def _normalise(self) -> None:
        """Set the value at the start by the same kernel on the same device, so that g/norm is exactly 1.0."""
        start = torch.full_like(self.epsilon, self.schedule.epsilon(0))
        self.norm.copy_(self.function.value(torch.ones_like(self.x), start))

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        """Move to another device with the model, but stay in full precision."""
        without = self._without_host()
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        self._normalise()
        self._choose_path()
        if without and not self._without_host():
            self.mirror()
            self._raise_flags()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None, "last": None, "_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ALL_GATES.add(self)

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the gates."""
        return f"{len(self.names)} fields, {self.function.name}, {len(self.kept)} alive"


def device_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what ``model.to(…)`` does to a tensor, without its change of dtype: gates stay in float32."""
    return lambda each: each.to(fn(each.new_empty(0)).device)
