"""Gates: the learnable vector x, one entry a field, and everything that moves with it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lpfs.errors import AllGatesZeroError, FieldError, InputError, NonFiniteError, SearchError, StateError
from lpfs.gates import device
from lpfs.gates.control import Keep
from lpfs.gates.functions import ByNumpy, GateFunction
from lpfs.gates.optimizer import Prox, ProxSGD, Threshold
from lpfs.gates.plan import make_plan
from lpfs.gates.schedule import Preset, Schedule, make_schedule
from lpfs.gates.status import Status
from lpfs.gates.steer import array_of, remember, set_penalty, steer
from lpfs.schema import Selection

Live = tuple[Tensor, tuple[Tensor, ...]]
Rescale = Literal["epsilon", "rms", "off"]

NAME = "lpfs_gates"
# The RMS rescale is refreshed up to this part of a search, then it stays.
RESCALE_UNTIL = 0.95
# Fading noise is gone after this part of a search.
NOISE_UNTIL = 0.7
# Where steps are taken without the host, it asks once in this many steps what went wrong: it has to wait for it.
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
        self.base_penalty = 0.0  # with keep=K: λ is never cut below it
        self._prox: ProxSGD | None = None
        self._loaded = False
        self._owner: list[nn.Module] = []  # in a list, so that it is not taken for a submodule
        self._disabled = False
        # whether steps are taken without the host: None for where they are captured in a CUDA graph; the table for
        # it; whether some were captured; steps since a check; whether the end is still to be judged
        self.branch_free: bool | None = None
        self._captured = False
        self._ending = True
        self._table: Tensor | None = None
        self._unchecked = 0
        self._views: dict[str, tuple[Tensor, int, NDArray[Any]]] = {}
        # the compiled loops with their arrays (see compiled.py); None: to be made; False: not for these gates
        self._fast: Any = None
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
        # λ, caution, whether the dead set is frozen, how open gates were of late; the dead set; x a step ago
        self.register_buffer("control", torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64))
        self.register_buffer("dead", torch.zeros_like(ones, dtype=torch.bool))
        self.register_buffer("before", ones.clone())
        self.register_buffer("flags", torch.zeros(2, dtype=torch.int64), persistent=False)
        about = json.dumps(self._about()).encode()
        self.register_buffer("about", torch.tensor(list(about), dtype=torch.uint8))
        self._normalise()
        ALL_GATES.add(self)

    # ------------------------------------------------------------------ values

    def forward(self) -> Tensor:
        """Return the gate values (N,): g(x) / (g at the start · scale)."""
        ready = self._ready()
        if ready is not None:
            compiled: Tensor = ready.values()
            return compiled
        x: Tensor = self.x
        if self.training and self.function.noise:
            x = x + self.noise
        kernels = self._kernels()
        if kernels is not None:
            fused: Tensor = kernels.Values.apply(x, self)
            return fused
        if not self._by_numpy(x):
            return self.function.value(x, self.epsilon) / (self.norm * self.scale)
        gates: Tensor = ByNumpy.apply(x, *self._arrays(x))  # type: ignore[no-untyped-call]
        return gates

    @property
    def values(self) -> Tensor:
        """The gate values (N,), without noise and without gradient."""
        return self.values_of(self.x)

    @torch.no_grad()
    def values_of(self, x: Tensor) -> Tensor:
        """Return what the gate values (N,) are at another x."""
        kernels = self._kernels()
        if kernels is not None:
            fused: Tensor = kernels.values(x, self)[0]
            return fused
        if self._by_numpy(x):
            ready = self._ready()
            if ready is not None and x.dtype == torch.float32:
                compiled: Tensor = ready.values_of(x)
                return compiled
            value, _, below = self._arrays(x)
            return torch.from_numpy(value / below)
        return self.function.value(x, self.epsilon) / (self.norm * self.scale)

    def _by_numpy(self, x: Tensor) -> bool:
        """Whether the values may be computed by numpy, which is faster for few numbers: eagerly, on the CPU."""
        return (
            self.function.arrays
            and x.is_cpu
            and type(x) in (Tensor, nn.Parameter)
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
        )

    def _arrays(self, x: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return g(x), g'(x) and what the gates are divided by, (N,) each."""
        array = self.view("x") if x is self._parameters["x"] else array_of(x)
        value, slope = self.function.on_arrays(array, self.view("epsilon").reshape(1))
        return value, slope, self.view("norm") * self.view("scale")

    def _ready(self) -> Any:
        """Return the compiled loops with the arrays of these gates, where there are such and they may run."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        ready = self._fast
        if ready is None or (ready and not ready.fits(self)):
            loops = compiled_loops()
            ready = self._fast = loops.Ready(self) if loops is not None and loops.takes(self) else False
        return ready or None

    def store(self, name: str, *values: Any) -> None:
        """Write into a buffer: a number, or one value for each row."""
        tensor = self._buffers[name]
        assert tensor is not None
        if not tensor.is_cpu:
            rows = [torch.as_tensor(each, dtype=tensor.dtype, device=tensor.device) for each in values]
            tensor.copy_(torch.stack(rows).view_as(tensor))
        elif tensor.ndim:
            array = self.view(name)
            for number, each in enumerate(values):
                array[number] = each
        else:
            self.view(name)[...] = values[0]

    def view(self, name: str) -> NDArray[Any]:
        """Return x or a buffer as a numpy array: over the same memory on the CPU, a copy of it elsewhere.

        A view is kept for as long as it is over the memory of the tensor: making one costs more than using it.
        """
        tensor = self._parameters["x"] if name == "x" else self._buffers[name]
        assert tensor is not None
        held = self._views.get(name)
        if held is not None and held[0] is tensor and held[1] == tensor.data_ptr():
            return held[2]
        array = array_of(tensor)
        if tensor.is_cpu:
            self._views[name] = (tensor, tensor.data_ptr(), array)
        return array

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
        """Return where the search stands (see :meth:`check`)."""
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
        prox: Prox | None = None,
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
            prox: ``l1``, the paper's; ``positive``, which lets no x cross zero, the default with ``keep`` where
                the gate function would turn its sign there; ``l0``, for the ablation.
            threshold: see :class:`ProxSGD`.
            control: settings of the control of λ, for those who want to change them.

        """
        if prox is None:
            turns = self.function.odd and keep is not None and bool((self.x >= 0).all())
            prox = "positive" if turns else "l1"
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
        if plan.keep is not None:
            self.base_penalty = plan.keep.first_penalty(max(schedule.total_lr(self.steps), schedule.lr(0)))
        self._ending = True
        self._choose_path()
        if self._loaded:  # a search that goes on: its control came with the state dict
            self._loaded = False
            self.mirror()
        else:
            self.control.copy_(torch.tensor([first, 1.0, 0.0, 0.0], dtype=torch.float64))
            self.dead.zero_()
            with torch.no_grad():
                remember(self)
        return optimizer

    # -------------------------------------------------------------------- step

    def step(self) -> None:
        """Move on by one training step: ε, the gate learning rate, λ, the rescale, the noise.

        Call it once after the optimizers' own steps. Nothing of this moves in ``forward`` or in evaluation.
        It can be captured in a CUDA graph together with the optimizer's step; what goes wrong there is raised
        later, by :meth:`check`.
        """
        prox = self._optimizer()
        if self._without_host():
            self._step_on_device(prox)
            return
        ready = None if prox is None else self._ready()
        if ready is not None and ready.advance(self, prox):
            return
        done = int(self.view("steps_done")) + 1
        if done == min(100, self.steps):
            self.refuse_idle()
        if self.keep is not None and prox is not None:
            steer(self, prox, self.keep, done)
        if not self.view("x").any():
            raise self._all_zero(done)
        self.store("steps_done", done)
        self.store("epsilon", self.schedule.epsilon(done))
        if prox is not None:
            prox.param_groups[0]["lr"] = self.schedule.lr(done)
        if self.refreshes(done):
            self.scale.copy_(self.fresh_scale(self.x != 0))
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
            found = f"{alive.numel()} fields are alive instead of {keep.keep}, the smallest"
            if alive.numel() == keep.keep:
                found = f"{keep.keep} fields are alive as asked, but not all are clear of zero: the smallest is"
            raise SearchError(
                f"after {self.steps} steps {found} at |g| = {float(alive.min()):.2g}. Was prox.step() called in "
                "every step, with a gradient? Go on for some steps, or attach with more steps"
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

    def refreshes(self, done: int) -> bool:
        """Whether the overall factor is refreshed after this step."""
        due = self.rescale != "off" and done % self.schedule.refresh == 0
        return due and (self.rescale == "epsilon" or done <= self.rescaled_until)

    @property
    def rescaled_until(self) -> float:
        """The step up to which the RMS rescale is refreshed."""
        return RESCALE_UNTIL * self.steps

    @torch.no_grad()
    def fresh_scale(self, alive: Tensor) -> Tensor:
        """Return the overall factor () for the ε and x of the moment."""
        if self.rescale == "epsilon":
            return (self.function.value(torch.ones_like(self.x), self.epsilon) / self.norm)[0]
        values = (self.function.value(self.x, self.epsilon) / self.norm)[alive]
        return values.square().mean().sqrt()

    # --------------------------------------------------------------- on a GPU

    def _without_host(self) -> bool:
        """Whether this step must be taken without asking the device anything.

        In a CUDA graph it must, and where three kernels do all of it, it is faster. Elsewhere the plain steps
        are, for one kernel a decision costs more than the host's waiting: there it is done on request only.
        """
        if self.branch_free is not None:
            return self.branch_free and not self.function.noise
        x = self._parameters["x"]
        assert x is not None
        if not x.is_cuda:
            return False
        if not torch.cuda.is_current_stream_capturing():
            return self._kernels() is not None
        if self.function.noise:
            raise StateError(f"{self.function.name!r} draws noise on the host: its steps cannot be captured")
        return True

    def _choose_path(self) -> None:
        """Let the optimizer ask these gates to step, where they may have to do without the host."""
        if self._prox is not None:
            free = self.x.is_cuda or bool(self.branch_free)
            self._prox.stepper = self if free and not self.function.noise else None
            if self._prox.stepper is not None:
                self.row()  # makes the table, which cannot be made while a graph is captured

    def move(self) -> bool:
        """Take the step of the optimizer, for it, if that must be without the host; return whether it was."""
        prox = self._optimizer()
        assert prox is not None
        if self._without_host():
            self._captured = True
            (self._kernels() or device).move(prox, self)
            return True
        if self._captured:
            self.mirror()
        return False

    def mirror(self) -> None:
        """Write the learning rate and λ of the moment where the optimizer has them elsewhere."""
        if self._prox is not None:
            penalty, _, frozen, _ = self.control.tolist()
            self._prox.param_groups[0]["lr"] = self.schedule.lr(int(self.steps_done))
            set_penalty(self, self._prox, penalty, bool(frozen))

    def row(self) -> Tensor:
        """Return what the schedule and the control of λ say for the step count on the device."""
        return self.table().index_select(0, self.steps_done.clamp(max=self.steps).view(1))[0]

    def table(self) -> Tensor:
        """Return what the schedule and the control of λ say for every step, on the device."""
        if self._table is None or self._table.device != self.x.device:
            with torch.no_grad():
                self._table = device.make_table(self)
        return self._table

    def _kernels(self) -> Any:
        """Return the kernels that do all of a step at once, where there are such."""
        if not self.x.is_cuda or self.function.noise:
            return None
        kernels = fused_kernels()
        return kernels if kernels is not None and kernels.takes(self) else None

    @torch.no_grad()
    def _step_on_device(self, prox: ProxSGD | None) -> None:
        self._captured = True
        (self._kernels() or device).advance(self, prox)
        if self.x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._unchecked += 1
        if self._unchecked >= CHECK_EVERY:
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Raise what went wrong since the last check in steps that were taken without the host.

        Those are steps on a GPU with Triton, or in a CUDA graph, and all of them where ``branch_free`` is True.
        ``status``, ``selection`` and ``absorb`` call it, a graph does not: call it now and then, for the host has
        to wait for the answer. Each thing is told once. In plain steps errors are raised at once.
        """
        if not self._captured:
            return
        self._unchecked = 0
        done, (refused, zero) = int(self.steps_done), self.flags.tolist()
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
        if self.keep is not None and done >= self.steps and self._ending:
            self._ending = False
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
        x = self._parameters["x"]
        if self._prox is not None and all(each is not x for each in self._prox.param_groups[0]["params"]):
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
        ones, kernels = torch.ones_like(self.x), self._kernels()
        loops = compiled_loops() if self.x.is_cpu else None
        if loops is not None and loops.takes(self):
            value = loops.at_start(self)
        elif kernels is not None:
            value = kernels.at_start(ones, self, start)
        else:
            value = self.function.value(ones, start)
        self.norm.copy_(value)

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        """Move to another device with the model, but stay in full precision."""
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        self._fast = None
        self._normalise()
        self._choose_path()
        if self._captured and not self.x.is_cuda:
            self.mirror()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None, "last": None, "_table": None, "_views": {}, "_fast": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ALL_GATES.add(self)

    def extra_repr(self) -> str:
        """Show what ``print(model)`` says of the gates."""
        return f"{len(self.names)} fields, {self.function.name}, {len(self.kept)} alive"


@cache
def fused_kernels() -> Any:
    """Return the Triton kernels, if Triton is there."""
    try:
        from lpfs.gates import fused
    except ImportError:
        return None
    return fused


@cache
def compiled_loops() -> Any:
    """Return the loops of numba for a CPU, if numba is there and works."""
    try:
        from lpfs.gates import compiled
    except Exception:  # a broken installation fails in many ways; numpy does the same, more slowly
        return None
    return compiled


def device_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what ``model.to(…)`` does to a tensor, without its change of dtype: gates stay in float32."""
    return lambda each: each.to(fn(each.new_empty(0)).device)
