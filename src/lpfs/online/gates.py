r"""Gates in a steady state: ε at a floor, a constant learning rate, and tests that decide when a field changes.

1. LPFS++ gates :math:`g(x)` are trained by proximal SGD as in a search. An *open* field enters the network multiplied
   by g(x); a *closed* one is multiplied by 0, and its x still receives the gradient
   :math:`\partial L/\partial g \cdot g'(x)`, because :math:`g'(0) > 0`. λ is fixed, or held by the control law of
   ``keep=K`` (:mod:`lpfs.gates.controller`) with the target K in every step.
2. A gate only *nominates*: an open field whose x is 0 for closing, a closed field whose x is above 0 for reopening. The
   gain of showing the field decides: loss without it minus loss with it, on rows which the model has not learned from
   yet, in the network and by an additive probe (:mod:`lpfs.online.probe`). A field reopens when the confidence interval
   of one of the two is above ``threshold``, and is closed when one interval and the estimate of the other are below
   ``threshold`` · ``hysteresis``.

The interval is a normal-mixture confidence sequence (Robbins 1970): it holds at all numbers of rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lpfs._validation import check_name, check_options
from lpfs.errors import FieldError, InputError
from lpfs.gates.controller import Keep, PenaltyController, TableRow, restore_gates, update_penalty
from lpfs.gates.functions import gate_function
from lpfs.gates.optimizer import ProxSGD

Floats = npt.NDArray[np.float64]
MIXTURE_ROWS = 5000.0  # number of rows at which the confidence sequence is tightest
MIN_TEST_ROWS = 1000  # rows before a decision
MAX_TEST_ROWS = 50_000  # rows after which a test without a decision starts again: the stream may have changed
BURN_IN_ROWS = 10_000  # rows of a hidden field in which the additive probe learns, before its gains count
SMALLEST_X = 1e-3  # x of the gate value that is used while an open field with x = 0 is tested
TIE_SPREAD = 0.01  # weights of λ differ by up to this share
CLOSED_WEIGHT = 0.3  # factor on λ of a closed field: its gate only nominates it, and the test decides


@dataclass(frozen=True)
class GateSettings:
    """How fields are selected on a stream."""

    keep: int | None = None  # number of fields that the control of λ aims at; or None
    penalty: float = 0.01  # λ, if ``keep`` is None
    epsilon: float = 1e-3  # ε of LPFS++, constant
    lr: float = 1.0  # learning rate of x, constant
    horizon: int = 2000  # steps in which a gate without gradient moves from 1 to 0 at the smallest λ of ``keep``
    threshold: float = 1e-3  # gain in logloss per row from which a closed field is worth reopening
    hysteresis: float = 0.5  # an open field is closed if its gain is below this share of ``threshold``
    error: float = 1e-4  # probability of a wrong decision of one test
    must_keep: tuple[str, ...] = ()  # fields that are never closed

    def __post_init__(self) -> None:
        counts = ("horizon",) if self.keep is None else ("horizon", "keep")
        check_options(self, positive=("epsilon", "error"), non_negative=("penalty", "lr", "threshold"), count=counts)
        for name, high in {"epsilon": 1.0, "hysteresis": 1.0, "error": 0.5}.items():
            if not 0 <= getattr(self, name) <= high:
                raise InputError(f"{name} must be between 0 and {high}, found {getattr(self, name)!r}")


@dataclass(frozen=True)
class Evidence:
    """Gain of showing a field, in logloss per row, with its interval and the number of rows."""

    gain: float
    low: float
    high: float
    rows: int


@dataclass(frozen=True)
class Decision:
    """A field that is closed or reopened, and why."""

    field: str
    action: str  # "closed" or "reopened"
    evidence: Evidence


class GainTests:
    """One sequential test per field: rows, sum and sum of squares of the gains of showing it."""

    def __init__(self, fields: int, error: float) -> None:
        self.sums: Floats = np.zeros((3, fields))
        self.error = error

    def add(self, field: int, gains: Floats) -> None:
        """Add the gains of the rows of a batch."""
        if self.sums[0, field] > MAX_TEST_ROWS:
            self.sums[:, field] = 0.0
        self.sums[:, field] += np.array([len(gains), gains.sum(), gains @ gains])

    def evidence(self, field: int) -> Evidence:
        """Return the gain with its interval; infinite before ``MIN_TEST_ROWS``."""
        rows, total, squares = (float(value) for value in self.sums[:, field])
        if rows < MIN_TEST_ROWS:
            return Evidence(total / max(rows, 1.0), -math.inf, math.inf, int(rows))
        mean = total / rows
        deviation = math.sqrt(max(squares / rows - mean * mean, 1e-18))
        mixed = rows + MIXTURE_ROWS
        width = deviation * math.sqrt(mixed * (math.log(mixed / MIXTURE_ROWS) + 2 * math.log(1 / self.error))) / rows
        return Evidence(mean, mean - width, mean + width, int(rows))


class SteadyGates(nn.Module):
    """The gates of a trainer that never ends.

    Args:
        names: the fields.
        settings: see :class:`GateSettings`.
        opened: the fields that are open at the start; None: all.
        seed: for breaking ties.
    """

    x: nn.Parameter

    def __init__(
        self, names: Sequence[str], settings: GateSettings, opened: Sequence[str] | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        for name in (*settings.must_keep, *(opened or ())):
            check_name(name, names, "field", error=FieldError)
        if settings.keep is not None and settings.keep > len(names):
            raise InputError(f"keep must be at most the number of fields, {len(names)}; found {settings.keep}")
        self.names, self.settings, size = tuple(names), settings, len(names)
        self.function = gate_function("lpfs++", epsilon=settings.epsilon)
        chosen = set(names) if opened is None else {*opened, *settings.must_keep}
        self.open = np.array([name in chosen for name in names])
        self.tests, self.additive = GainTests(size, settings.error), GainTests(size, settings.error)
        self.hidden_rows: Floats = np.zeros(size)  # rows that the additive probe has seen since a field was hidden
        start = torch.from_numpy(self.open.astype(np.float32))
        self.x = nn.Parameter(start.clone())
        self.epsilon = torch.tensor(settings.epsilon)
        self.norm = self.function.value_and_slope(torch.ones(size), self.epsilon)[0]
        smallest = torch.full((size,), SMALLEST_X)
        self._floor = float(self.function.value_and_slope(smallest, self.epsilon, self.norm)[0][0])
        fixed = np.array([name in settings.must_keep for name in names])
        spread = 1 + TIE_SPREAD * (np.random.default_rng([seed, size]).random(size) - 0.5)
        self.fixed, self._spread = fixed, np.where(fixed, 0.0, spread)
        self.controller: PenaltyController | None = None
        first = settings.penalty
        if settings.keep is not None:
            first = 1 / (settings.lr * settings.horizon)
            self.controller = PenaltyController(Keep(settings.keep), settings.horizon, first)
            self._row = steady_row(self.controller.keep, size)
        self.control = torch.tensor([first, 0.0, 0.0], dtype=torch.float64)
        self.penalty = torch.full((size,), first, dtype=torch.float64)
        self.dead = torch.zeros(size, dtype=torch.bool)
        self.previous_x = start.clone()
        lr, weights = torch.tensor(settings.lr, dtype=torch.float64), torch.ones(size)
        self.prox = ProxSGD([self.x], lr, penalty=self.penalty, weights=weights, prox="positive")
        self._weigh()
        self.prox.state[self.x]["momentum_buffer"] = torch.zeros(size)

    @property
    def kept(self) -> tuple[str, ...]:
        """The selected fields."""
        return tuple(name for name, is_open in zip(self.names, self.open, strict=True) if is_open)

    def values(self) -> Tensor:
        """Return the factors (N,) of the fields, with the gradient of the gates: 0 for closed fields."""
        values = self.function.value(self.x, self.epsilon, self.norm)
        return values + (self.applied() - values.detach())

    @torch.no_grad()
    def applied(self) -> Tensor:
        """Return the same factors without gradient."""
        values = self.function.value_and_slope(self.x, self.epsilon, self.norm)[0].clamp(min=self._floor)
        return torch.where(torch.from_numpy(self.open), values, 0.0)

    def served_x(self) -> Tensor:
        """Return x (N,) of gates with these factors: exactly 0 for closed fields only."""
        return torch.where(torch.from_numpy(self.open), self.x.detach().clamp(min=SMALLEST_X), 0.0)

    @torch.no_grad()
    def step(self, *, penalized: bool = True) -> None:
        """Update x from its gradient, then λ; without ``penalized`` only the tables and the network learn."""
        if penalized:
            self.prox.step()
            self.x.clamp_(max=1.0)
            if self.controller is not None:
                law: Any = self.controller.constants
                momentum = self.prox.state[self.x]["momentum_buffer"]
                is_open = torch.from_numpy(self.open)
                x = torch.where(is_open, self.x, 0.0)  # the law counts the open fields
                alive, too_few = restore_gates(x, self.previous_x, momentum, self._row.hurry, float(law.keep))
                update_penalty(
                    *(x, self.previous_x, self.dead, self.control, self.penalty, x, alive, too_few),
                    *(self.epsilon, self.function.square, self._row, law),
                )
                self.x.copy_(torch.where(is_open, x, self.x))
        self.x.grad = None

    def nominated(self) -> list[int]:
        """Return the fields whose gate disagrees with the selection, those with the shortest tests first."""
        alive = (self.x.detach() != 0).numpy()
        fields = np.flatnonzero((alive != self.open) & ~self.fixed)
        self.tests.sums[:, alive == self.open] = 0.0
        return [int(field) for field in fields[np.argsort(self.tests.sums[0, fields], kind="stable")]]

    def hidden(self) -> npt.NDArray[np.bool_]:
        """Return which fields do not reach the network: closed ones, and open ones whose x is 0."""
        hidden = np.asarray(~self.open | (self.x.detach() == 0).numpy())
        self.hidden_rows[~hidden] = 0.0
        return hidden

    def add_additive(self, field: int, gains: Floats) -> Decision | None:
        """Add gains of the additive probe of a hidden field; return the decision to reopen it, once there is one."""
        self.hidden_rows[field] += len(gains)
        if self.hidden_rows[field] <= BURN_IN_ROWS:
            return None
        self.additive.add(field, gains)
        evidence = self.additive.evidence(field)
        if evidence.low > self.settings.threshold:
            return self._decide(field, True, evidence)
        if not self.open[field] and evidence.high < self.settings.threshold * self.settings.hysteresis:
            self.additive.sums[:, field] = 0.0  # still useless; old rows must not delay the next test
        return None

    def add_gains(self, field: int, gains: Floats) -> Decision | None:
        """Add gains of showing a nominated field to the network; return the decision, once there is one."""
        self.tests.add(field, gains)
        network, additive = self.tests.evidence(field), self.additive.evidence(field)
        if network.low > self.settings.threshold:
            return self._decide(field, True, network)
        limit = self.settings.threshold * self.settings.hysteresis
        for evidence, other in ((network, additive), (additive, network)):  # one interval, and the other's estimate
            if evidence.high < limit and other.gain < limit and network.rows >= MIN_TEST_ROWS:
                return self._decide(field, False, evidence)
        return None

    def _decide(self, field: int, worth: bool, evidence: Evidence) -> Decision | None:
        """Open or close a field; return the decision if that is a change."""
        self.tests.sums[:, field] = self.additive.sums[:, field] = 0.0
        changes = bool(self.open[field]) != worth
        self.set_open(field, worth)
        return Decision(self.names[field], "reopened" if worth else "closed", evidence) if changes else None

    @torch.no_grad()
    def set_open(self, field: int, is_open: bool) -> None:
        """Open a field, with a gate of 1, or close it; its momentum is reset."""
        self.open[field] = is_open
        for values in (self.x, self.previous_x):
            values[field] = float(is_open)
        self.prox.state[self.x]["momentum_buffer"][field] = 0.0
        self._weigh()

    def _weigh(self) -> None:
        weights = np.where(self.open, 1.0, CLOSED_WEIGHT) * self._spread
        self.prox.param_groups[0]["weights"].copy_(torch.from_numpy(weights))

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        return {
            **{"x": self.x.detach(), "previous_x": self.previous_x, "control": self.control, "penalty": self.penalty},
            **{"momentum": self.prox.state[self.x]["momentum_buffer"], "open": torch.from_numpy(self.open)},
            **{"tests": torch.from_numpy(self.tests.sums), "additive": torch.from_numpy(self.additive.sums)},
            "hidden_rows": torch.from_numpy(self.hidden_rows),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        for name, target in self.state().items():
            target.copy_(state[name])
        self._weigh()


def steady_row(keep: Keep, total: int) -> TableRow:
    """Return the row of the control table that is used in every step: the target is K, nothing is ever frozen."""
    time = keep.end
    return TableRow(
        **dict.fromkeys(("epsilon", "lr", "refresh", "freeze", "hurry"), torch.tensor(0.0, dtype=torch.float64)),
        scale=1.0,
        target=float(keep.keep),
        excess_scale=torch.tensor(float(keep.excess_scale(time, total)), dtype=torch.float64),
        max_growth=torch.tensor(float(keep.max_growth(time)), dtype=torch.float64),
        alive_weight=1.0,
    )
