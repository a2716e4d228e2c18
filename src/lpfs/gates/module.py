"""Gates: the learnable vector x, one entry per field, with its schedules and the state of the control of λ."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpfs._validation import check_int
from lpfs.errors import FieldError, InputError, StateError
from lpfs.gates import host, stepping
from lpfs.gates.controller import Keep, PenaltyController, PenaltySpec
from lpfs.gates.functions import GateFunction, HostValue
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.schedule import Preset, Schedule, make_schedule
from lpfs.schema import Selection

ForwardValues = tuple[Tensor, tuple[Tensor, ...]]
Rescale = Literal["epsilon", "rms", "off"]

ATTRIBUTE = "lpfs_gates"  # name of the gates on a model

# All Gates of the process, copies included: an optimizer of the model must not hold their x.
_ALL_GATES: weakref.WeakSet[Gates] = weakref.WeakSet()

_Self = TypeVar("_Self", bound="Gates")


class Gates(nn.Module):
    """One learnable gate per field: g(x), divided by its value at the start, so that it is exactly 1.0 there.

    ``lpfs.attach`` creates it and registers it on the model as ``lpfs_gates``. Calling it returns the gate values
    (N,) with their gradient. x, ε, the rescale, the control of λ and the step count are in its state dict.

    Args:
        names: the fields, in order.
        function: the gate function.
        steps: length of the search, to which schedules are scaled; ``optimizer`` needs it.
        schedule: ``scaled``, ``terabyte``, ``industrial`` or a :class:`Schedule`.
        rescale: an overall factor without gradient: ``epsilon`` divides by the gate of x = 1 at the current ε, so
            that alive gates end near 1; ``rms``, the paper's, by the root mean square of the alive gates; ``off``
            does not divide.
        seed: for the noise of noisy gates, and for breaking ties.

    Attributes:
        fused: whether Triton kernels take the steps on a GPU; None: where Triton supports these gates.
    """

    x: nn.Parameter
    norm: Tensor
    epsilon: Tensor
    scale: Tensor
    noise: Tensor
    steps_done: Tensor
    control: Tensor
    dead: Tensor
    previous_x: Tensor
    lr_now: Tensor
    penalty_now: Tensor
    all_zero_step: Tensor
    metadata: Tensor

    def __init__(
        self,
        names: Sequence[str],
        function: GateFunction,
        steps: int | None = None,
        schedule: Preset | Schedule = "scaled",
        rescale: Rescale = "epsilon",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not names:
            raise FieldError("gates need at least one field")
        self._has_steps, steps = steps is not None, 1 if steps is None else check_int("steps", steps, 1)
        if rescale not in ("epsilon", "rms", "off"):
            raise InputError(f"rescale must be 'epsilon', 'rms' or 'off', found {rescale!r}")
        self.names, self.function, self.steps, self.rescale, self.seed = tuple(names), function, steps, rescale, seed
        self.schedule, self._preset = make_schedule(schedule, function, steps), schedule
        self.places: dict[str, tuple[Any, ...]] = {}
        self.controller: PenaltyController | None = None
        self.fused: bool | None = None
        self._prox: ProxSGD | None = None
        self._loaded = False  # whether a state dict was loaded before the optimizer was made
        self._owner: list[nn.Module] = []  # the model; in a list, so that it is not registered as a submodule
        self._disabled = False
        self._table: Tensor | None = None
        self._value_arrays, self._step_arrays = host.Arrays(), host.Arrays()
        self._unchecked = 0  # steps since the last check for errors
        self._end_checked = False
        self._updates, self._x_version = 0, 0  # updates of x since the last step(), as seen by the forward passes
        self._float16, self._scale_checks = False, stepping.SCALE_CHECKS
        self._device_ops = False  # whether steps on a CPU are computed as on a GPU, for tests
        # values of this forward pass and of the last one; whether the model has run; hooks and taps
        self.live: ForwardValues | None = None
        self.last: ForwardValues | None = None
        self.entered = False
        self.unverified = False  # whether gates on columns have not been compared with gates on outputs yet
        self.hooks: list[Any] = []
        ones = torch.ones(len(self.names), dtype=torch.float32)
        self.x = nn.Parameter(ones.clone())
        self.register_buffer("norm", ones.clone(), persistent=False)
        self.register_buffer("epsilon", torch.tensor(self.schedule.epsilon(0), dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.register_buffer("noise", torch.zeros_like(ones))
        self.register_buffer("steps_done", torch.tensor(0))
        self.register_buffer("control", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("dead", torch.zeros_like(ones, dtype=torch.bool))
        self.register_buffer("previous_x", ones.clone())
        # the optimizer reads η and λ here; λ is infinite where a dead gate is frozen
        self.register_buffer("lr_now", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("penalty_now", ones.double(), persistent=False)
        # the first step after which all gates were zero, until it has been reported
        self.register_buffer("all_zero_step", torch.tensor(0), persistent=False)
        metadata = json.dumps(self._metadata()).encode()
        self.register_buffer("metadata", torch.tensor(list(metadata), dtype=torch.uint8))
        self._normalise()
        _ALL_GATES.add(self)

    def forward(self) -> Tensor:
        """Return the gate values (N,): g(x) / (g at the start · scale)."""
        x: Tensor = self.x
        if self.training and self.function.noise:
            x = x + self.noise
        elif self.function.compiles and host.is_plain(x):
            return HostValue.apply(x, *stepping.host_values(self))  # type: ignore[no-untyped-call,no-any-return]
        kernels = self._kernels()
        if kernels is not None:
            fused: Tensor = kernels.GateValues.apply(x, self.function, self.epsilon, self.norm, self.scale)
            return fused
        return self.function.value(x, self.epsilon, self.norm * self.scale)

    @property
    def values(self) -> Tensor:
        """The gate values (N,), without noise and without gradient."""
        return self.values_of(self.x)

    @torch.no_grad()
    def values_of(self, x: Tensor) -> Tensor:
        """Return the gate values (N,) at another x, without gradient."""
        kernels = self._kernels()
        if kernels is not None:
            fused: Tensor = kernels.values(x, self.function, self.epsilon, self.norm, self.scale)[0]
            return fused
        return self.function.value_and_slope(x, self.epsilon, self.norm * self.scale)[0]

    @property
    def keep(self) -> Keep | None:
        """The constants of the control of λ; None with a fixed λ."""
        return None if self.controller is None else self.controller.keep

    @property
    def kept(self) -> list[str]:
        """Names of the fields whose gate is alive."""
        return [name for name, x in zip(self.names, self.x.tolist(), strict=True) if x != 0]

    @property
    def dropped(self) -> list[str]:
        """Names of the fields whose gate is exactly zero."""
        return [name for name, x in zip(self.names, self.x.tolist(), strict=True) if x == 0]

    def selection(self, *, partial: bool = False, **made: Any) -> Selection:
        """Return the result; an unfinished search raises SearchError, with ``partial`` it gives its current state."""
        self.check()
        if not partial:
            stepping.check_finished(self)
        values = dict(zip(self.names, self.values.tolist(), strict=True))
        settings = {
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
        sites = {name: [site.to_json() for site in several] for name, several in self.places.items()}
        return Selection(tuple(self.kept), tuple(self.dropped), values, sites, (), {**settings, **made})

    def status(self) -> stepping.GateStatus:
        """Return the progress of the search; errors of steps on a GPU are raised here (see :meth:`check`)."""
        self.check()
        alive = self.values[self.x != 0].abs()
        step = int(self.steps_done)
        return stepping.GateStatus(
            step=step,
            steps=self.steps,
            alive=alive.numel(),
            total=len(self.names),
            smallest=float(alive.min()) if alive.numel() else 0.0,
            epsilon=float(self.epsilon),
            lr=self.schedule.lr(step),
            penalty=float(self.control[0]),
            frozen=bool(self.control[1]),
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the model without gates while the block runs."""
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before

    def model_parameters(self) -> list[nn.Parameter]:
        """Return every parameter of the model except x, for the model's own optimizer."""
        if not self._owner:
            raise StateError("these gates are not attached to a model; call lpfs.attach")
        return [parameter for parameter in self._owner[0].parameters() if parameter is not self.x]

    def optimizer(
        self,
        keep: int | None = None,
        *,
        penalty: float | Sequence[float] | Tensor | None = None,
        lr: float | None = None,
        momentum: float = 0.9,
        costs: Sequence[float] | Tensor | None = None,
        must_keep: Sequence[str] = (),
        prox: Prox | None = None,
        threshold: Threshold = "paper",
        control: Keep | None = None,
    ) -> ProxSGD:
        """Return the optimizer of the gates; ``gates.step()`` then sets its learning rate and λ.

        Args:
            keep: number of fields to keep, reached by control of λ.
            penalty: instead of ``keep``, the paper's fixed λ, one number or one per field.
            lr: the learning rate at the start, instead of the schedule's.
            momentum: β.
            costs: λ is weighted by cost / mean cost, so that an expensive field needs a larger gradient to stay.
            must_keep: fields that are not penalized; they count within ``keep``.
            prox: ``l1``, the paper's; ``positive``, which lets no x cross zero, the default with ``keep`` if the
                gate function would change its sign there; ``l0``, for the ablation.
            threshold: see :class:`ProxSGD`.
            control: constants of the control of λ, instead of the defaults.
        """
        if not self._has_steps:
            raise InputError("give the number of training steps of the search: lpfs.attach(model, …, steps=20_000)")
        if prox is None:
            changes_sign = self.function.odd and keep is not None and bool((self.x >= 0).all())
            prox = "positive" if changes_sign else "l1"
        spec = PenaltySpec.build(self.names, self.steps, self.seed, keep, penalty, costs, must_keep, prox, control)
        alive = int((self.x != 0).sum())
        if spec.keep is not None and spec.keep.keep > alive and not self.function.revives:
            raise InputError(
                f"keep={keep}, but only {alive} gates are alive, and dead gates of {self.function.name!r} cannot revive"
            )
        if lr is not None and isinstance(self._preset, Schedule):
            raise InputError("give the learning rate either as lr= or as Schedule(…, lr=Decay(…)), not both")
        schedule = make_schedule(self._preset, self.function, self.steps, lr)
        done = int(self.steps_done)
        first, controller = spec.penalty, None
        if spec.keep is not None:
            base = spec.keep.first_penalty(max(schedule.total_lr(self.steps), schedule.lr(0)))
            controller = PenaltyController(spec.keep, self.steps, base)
            if spec.keep.keep < len(self.names):
                remaining = schedule.total_lr(self.steps) - schedule.total_lr(done)
                first = spec.keep.first_penalty(max(remaining, schedule.lr(done)))
        weights = spec.weights.to(self.x.device)
        settings: dict[str, Any] = {"momentum": momentum, "weights": weights, "prox": prox, "threshold": threshold}
        prox_sgd = ProxSGD([self.x], schedule.lr(done), penalty=first, **settings)  # raises before any change
        self.schedule, self.controller, self._prox, self._table = schedule, controller, prox_sgd, None
        self._end_checked = False
        if self._loaded:  # the control of a resumed search came with the state dict
            self._loaded = False
        else:
            self.control.copy_(torch.tensor([first, 0.0, 0.0], dtype=torch.float64))
            self.dead.zero_()
            self.previous_x.copy_(self.x.detach())
        self._write_optimizer_settings()
        self._bind_optimizer()
        return prox_sgd

    def search(
        self, optimizer: Optimizer | Sequence[Optimizer], keep: int | None = None, **settings: Any
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        """Return a context that gives a function to take one training step from a loss, and checks the end.

        Example::

            with gates.search(optimizer, keep=20) as step:  # arguments as for ``optimizer``
                for batch in stream:
                    step(loss_of(model, batch))
        """
        return stepping.search_steps(self, optimizer, keep, settings)

    @torch.no_grad()
    def freeze(self, x: Tensor | None = None) -> None:
        """Return to ``x``, then freeze the dead gates of a search with ``keep=``; the alive gates become its K."""
        prox = self._optimizer()
        if self.controller is None or prox is None:
            raise StateError("freeze needs a search with keep=; call gates.optimizer(keep=…) first")
        if x is not None:
            self.x.copy_(x)
            momentum = prox.state[self.x].get("momentum_buffer")
            if momentum is not None:
                momentum.zero_()
        keep = replace(self.controller.keep, keep=int(torch.count_nonzero(self.x)))
        self.controller = replace(self.controller, keep=keep)
        self.dead.copy_(self.x == 0)
        self.control[1] = 1.0
        self.previous_x.copy_(self.x)
        self._write_optimizer_settings()
        self._bind_optimizer()

    def step(self) -> None:
        """Advance by one training step: ε, the gate learning rate, λ, the rescale, the noise.

        Call it once after the optimizers' steps. It can be captured in a CUDA graph together with the optimizer's
        step. On a GPU errors are raised later, by :meth:`check`.
        """
        x, prox = self.x, self._optimizer()
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._float16 and not capturing:
            stepping.check_scale(self)
        if capturing and self.function.noise:
            raise StateError(f"{self.function.name!r} draws noise on the host: its steps cannot be captured")
        kernels, momentum = self._kernels(), None
        if self.controller is not None and prox is not None:
            momentum = prox.state[x].get("momentum_buffer")
            momentum = torch.zeros_like(x) if momentum is None else momentum
        if kernels is not None:
            kernels.control_step(self, momentum, self._control_table())
        else:
            stepping.advance(self, momentum)
        if self.function.noise:
            stepping.draw_noise(self)
        object.__setattr__(self, "_updates", 0)  # see ComputeValues
        object.__setattr__(self, "_x_version", x._version)
        object.__setattr__(self, "_unchecked", self._unchecked + (not capturing))
        if self._unchecked >= stepping.CHECK_EVERY:
            self.check()

    def check(self) -> None:
        """Raise the errors of the steps since the last check, each of them once.

        On a GPU only every 100th step, ``status``, ``selection`` and ``absorb`` call it: it waits for the device.
        """
        stepping.check(self)

    def _control_table(self) -> Tensor:
        """Return the table of the schedules and of the control law for every step, on the device of x."""
        if self._table is None or self._table.device != self.x.device:
            self._table = stepping.make_table(self)
        return self._table

    @torch.no_grad()
    def _write_optimizer_settings(self) -> None:
        """Write η and λ of the current step where the optimizer reads them."""
        self.lr_now.fill_(self.schedule.lr(min(int(self.steps_done), self.steps)))
        self.penalty_now.copy_(self.control[0]).masked_fill_(self.dead, math.inf)

    def _bind_optimizer(self) -> None:
        """Give the optimizer the buffers and the mode of the device of x; its own state moves with x."""
        if self._prox is None:
            return
        group, device = self._prox.param_groups[0], self.x.device
        capturable = self.x.is_cuda and not self.function.noise
        group.update(lr=self.lr_now, penalty=self.penalty_now, weights=group["weights"].to(device))
        group.update(capturable=capturable, fused=self._kernels() is not None and group["prox"] != "l0")
        state = self._prox.state[self.x]
        state.update({name: tensor.to(device) for name, tensor in state.items()})
        self._control_table()  # made here, because it cannot be made while a graph is captured
        kernels = self._kernels()
        if kernels is not None and self.controller is not None:
            kernels.constant_tensor(self.controller, device)

    def _kernels(self) -> Any:
        """Return the module of Triton kernels if it can take the steps of these gates, otherwise None."""
        if not self.x.is_cuda or self.function.noise or self.fused is False:
            return None
        kernels = stepping.triton_kernels()
        return kernels if kernels is not None and kernels.supports(self.function, len(self.names)) else None

    def _optimizer(self) -> ProxSGD | None:
        """Return the optimizer that ``optimizer()`` made, after checking that it still holds x."""
        x = self._parameters["x"]
        parameters = [x] if self._prox is None else self._prox.param_groups[0]["params"]
        if parameters[0] is not x and all(parameter is not x for parameter in parameters):
            raise StateError("the optimizer of these gates holds another x: call gates.optimizer(…) again")
        return self._prox

    def _metadata(self) -> dict[str, Any]:
        """Return the settings that must agree for a state dict to fit."""
        gate = self.function
        schedule = asdict(self._preset) if isinstance(self._preset, Schedule) else self._preset
        settings = {"fields": list(self.names), "gate": gate.name, "alpha": gate.alpha, "tau": gate.tau}
        start = {"epsilon": gate.epsilon, "noise": gate.noise, "schedule": schedule}
        return {**settings, **start, "steps": self.steps, "rescale": self.rescale}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state dict after checking that it is of gates with the same settings."""
        metadata = state_dict.pop(f"{prefix}metadata", None)
        if metadata is not None:
            saved = json.loads(bytes(metadata.tolist()).decode())
            for key, value in self._metadata().items():
                if saved.get(key, value) != value:  # state dicts of earlier versions do not have every key
                    raise StateError(
                        f"this state dict is of gates with {key} = {saved[key]!r}, but these gates have "
                        f"{value!r}: attach with the same settings"
                    )
            state_dict[f"{prefix}metadata"] = self.metadata
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._loaded = self._prox is None
        self.all_zero_step.zero_()
        self._write_optimizer_settings()

    @torch.no_grad()
    def _normalise(self) -> None:
        """Compute the value at the start as ``forward`` does, so that g / norm is exactly 1.0."""
        start = torch.full_like(self.epsilon, self.schedule.epsilon(0))
        ones, kernels = torch.ones_like(self.x), self._kernels()
        if kernels is not None:
            self.norm.copy_(kernels.values(ones, self.function, start, ones, ones[:1])[0])
        else:
            self.norm.copy_(self.function.value_and_slope(ones, start)[0])

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        """Move to another device with the model, but stay in float32."""
        super()._apply(keep_dtype(fn), recurse)  # type: ignore[no-untyped-call]
        self._normalise()
        self._bind_optimizer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None, "last": None, "_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _ALL_GATES.add(self)

    def extra_repr(self) -> str:
        """Return the part of ``print(model)`` that describes the gates."""
        return f"{len(self.names)} fields, {self.function.name}, {len(self.kept)} alive"


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what ``model.to(…)`` does to a tensor without its change of dtype: gates stay in float32."""
    return lambda tensor: tensor.to(fn(tensor.new_empty(0)).device)
