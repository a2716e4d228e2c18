r"""Gates in a steady state: ε at a floor, a constant learning rate, and tests that decide when a field changes.

1. An *open* field enters the network unchanged, a *closed* one is multiplied by 0. In some batches the loss is computed
   once more with open fields multiplied by LPFS++ gates :math:`g(x)`, and its gradient trains x by proximal SGD as in
   a search; the x of a closed field receives :math:`\partial L/\partial g \cdot g'(x)`, because :math:`g'(0) > 0`. The
   weights see no gate, whose steps would be noise for them. λ is fixed, or held by the control law of ``keep=K``
   (:mod:`lpfs.gates.controller`) with the target K in every step.
2. A gate only *nominates*: an open field whose x is 0 for closing, a closed field whose x is above 0 for reopening. The
   gain of showing the field decides: loss without it minus loss with it, on rows which the model has not learned from
   yet, in the network and by an additive probe (:mod:`lpfs.online.probe`). An open field is hidden during its test as
   soon as it seems to gain too little. A field reopens when the confidence interval
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
from lpfs.train.intervals import Floats, Ints

MIXTURE_ROWS = 5000.0  # number of rows at which the confidence sequence is tightest
MIN_TEST_ROWS = 1000  # rows before a decision
MAX_TEST_ROWS = 50_000  # rows after which a test without a decision starts again: the stream may have changed
BURN_IN_ROWS = 10_000  # rows of a hidden field in which the additive probe learns, before its gains count
SMALLEST_X = 1e-3  # x of the gate value by which an open field is multiplied while it is hidden
TIE_SPREAD = 0.01  # weights of λ differ by up to this share
CLOSED_WEIGHT = 0.3  # factor on λ of a closed field: its gate only nominates it, and the test decides


@dataclass(frozen=True)
class GateSettings:
    """How fields are selected on a stream."""

    keep: int | None = None  # number of fields that the control of λ aims at; or None
    penalty: float = 0.02  # λ, if ``keep`` is None
    epsilon: float = 1e-3  # ε of LPFS++, constant
    lr: float = 8.0  # learning rate of x, constant
    horizon: int = 500  # steps of x in which a gate without gradient moves from 1 to 0 at the smallest λ of ``keep``
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

    @property
    def closing_threshold(self) -> float:
        """The gain below which an open field is closed."""
        return self.threshold * self.hysteresis


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

    def add(self, fields: Ints, gains: Floats) -> None:
        """Add the gains (F, rows) of a batch."""
        self.sums[:, fields[self.sums[0, fields] > MAX_TEST_ROWS]] = 0.0
        self.sums[0, fields] += gains.shape[1]
        self.sums[1:, fields] += gains.sum(1), np.einsum("fn,fn->f", gains, gains)

    def intervals(self, fields: Ints) -> Floats:
        """Return gain, low, high and rows (4, F); the interval is infinite before ``MIN_TEST_ROWS``."""
        count, total, squares = self.sums[:, fields]
        rows = np.maximum(count, 1.0)
        mean, mixed = total / rows, rows + MIXTURE_ROWS
        deviation = np.sqrt(np.maximum(squares / rows - mean * mean, 1e-18))
        width = deviation * np.sqrt(mixed * (np.log(mixed / MIXTURE_ROWS) + 2 * math.log(1 / self.error))) / rows
        width[count < MIN_TEST_ROWS] = math.inf
        return np.stack([mean, mean - width, mean + width, count])

    def evidence(self, field: int) -> Evidence:
        """Return the gain of one field with its interval."""
        gain, low, high, rows = self.intervals(np.array([field]))[:, 0].tolist()
        return Evidence(gain, low, high, int(rows))


class SteadyGates:
    """The gates of a trainer that never ends.

    Args:
        names: the fields.
        settings: see :class:`GateSettings`.
        opened: the fields that are open at the start; None: all.
        seed: for breaking ties.
    """

    def __init__(
        self, names: Sequence[str], settings: GateSettings, opened: Sequence[str] | None = None, seed: int = 0
    ) -> None:
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
        self.fixed = np.array([name in settings.must_keep for name in names])
        spread = 1 + TIE_SPREAD * (np.random.default_rng([seed, size]).random(size) - 0.5)
        self._spread = np.where(self.fixed, 0.0, spread)
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
        """Return the gate values (N,) with their gradient: 0 for closed fields."""
        values = self.function.value(self.x, self.epsilon, self.norm)
        factors = torch.where(torch.from_numpy(self.open), values.clamp(min=self._floor), 0.0)
        return factors.detach() + (values - values.detach())

    def applied(self) -> Tensor:
        """Return the factors (N,) of the fields: 1 if shown, 0 if closed, almost 0 if open and hidden."""
        return self._factors(self._floor)

    def absorbed_x(self) -> Tensor:
        """Return x (N,) of gates whose values are these factors: exactly 0 for closed fields only."""
        return self._factors(SMALLEST_X)

    def _factors(self, hidden: float) -> Tensor:
        values = np.where(self.open, np.where(self.hidden(), hidden, 1.0), 0.0)
        return torch.from_numpy(values.astype(np.float32))

    @torch.no_grad()
    def step(self) -> None:
        """Update x from its gradient, then λ."""
        self.prox.step()
        momentum = self.prox.state[self.x]["momentum_buffer"]
        momentum[self.x > 1] = 0.0  # else a gate that has been useful for long would not move for long
        self.x.clamp_(max=1.0)
        if self.controller is not None:
            law: Any = self.controller.constants
            is_open = torch.from_numpy(self.open)
            x = torch.where(is_open, self.x, 0.0)  # the law counts the open fields
            alive, too_few = restore_gates(x, self.previous_x, momentum, self._row.hurry, float(law.keep))
            update_penalty(
                *(x, self.previous_x, self.dead, self.control, self.penalty, x, alive, too_few),
                *(self.epsilon, self.function.square, self._row, law),
            )
            self.x.copy_(torch.where(is_open, x, self.x))
        self.x.grad = None
        self.hidden_rows[~self.hidden()] = 0.0

    def nominated(self) -> list[int]:
        """Return the fields whose gate disagrees with the selection, those with the shortest tests first."""
        alive = (self.x.detach() != 0).numpy()
        fields = np.flatnonzero((alive != self.open) & ~self.fixed)
        self.tests.sums[:, alive == self.open] = 0.0
        return [int(field) for field in fields[np.argsort(self.tests.sums[0, fields], kind="stable")]]

    def hidden(self) -> npt.NDArray[np.bool_]:
        """Return which fields do not reach the network: closed ones, and open ones that seem to gain too little."""
        rows, totals, _ = self.tests.sums
        seems_useless = (rows >= MIN_TEST_ROWS) & (totals < rows * self.settings.closing_threshold)
        return np.asarray(~self.open | (seems_useless & (self.x.detach() == 0).numpy() & ~self.fixed))

    def add_additive(self, fields: Ints, gains: Floats) -> list[Decision]:
        """Add gains (F, rows) of the additive probe of hidden fields; return decisions to reopen some."""
        self.hidden_rows[fields] += gains.shape[1]
        has_learned = self.hidden_rows[fields] > BURN_IN_ROWS
        fields, gains = fields[has_learned], gains[has_learned]
        self.additive.add(fields, gains)
        _, low, high, _ = self.additive.intervals(fields)
        is_worth = low > self.settings.threshold
        decisions = [self._decide(field, True, self.additive.evidence(field)) for field in fields[is_worth].tolist()]
        is_useless = ~is_worth & ~self.open[fields] & (high < self.settings.closing_threshold)
        self.additive.sums[:, fields[is_useless]] = 0.0  # old rows must not delay the next test
        return [decision for decision in decisions if decision is not None]

    def add_gains(self, field: int, gains: Floats) -> Decision | None:
        """Add gains of showing a nominated field to the network; return the decision, once there is one."""
        self.tests.add(np.array([field]), gains[None])
        network, additive = self.tests.evidence(field), self.additive.evidence(field)
        if network.low > self.settings.threshold:
            return self._decide(field, True, network)
        threshold = self.settings.closing_threshold
        for evidence, other in ((network, additive), (additive, network)):  # one interval, and the other's estimate
            if evidence.high < threshold and other.gain < threshold and network.rows >= MIN_TEST_ROWS:
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
        if is_open:
            self.hidden_rows[field] = 0.0
        for values in (self.x, self.previous_x):
            values[field] = float(is_open)
        self.prox.state[self.x]["momentum_buffer"][field] = 0.0
        if self.x.grad is not None:
            self.x.grad[field] = 0.0
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
