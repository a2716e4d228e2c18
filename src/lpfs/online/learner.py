"""Progressive validation: every batch is predicted first and learned from after; gates follow the stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lpfs._validation import check_int
from lpfs.data.batch import Batch
from lpfs.errors import ExactnessError, InputError, NonFiniteError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.optimizer_state import rescale_state
from lpfs.gates.prune import Pruned, prune
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs
from lpfs.online.gates import Decision, GateSettings, SteadyGates
from lpfs.online.probe import AdditiveProbe
from lpfs.schema import Schema
from lpfs.train.evaluate import predict_batch
from lpfs.train.metrics import Floats, row_losses
from lpfs.train.step import OPTIMIZERS, bce_loss

MAX_TESTS = 32  # nominated fields that are tested in a probe batch


@dataclass(frozen=True)
class LearnerSettings:
    """Model, optimizer and probes."""

    model: str = "mlp"  # name of a model of ``lpfs.models`` that embeds every field (mlp, deepfm, wide_deep, fm, dcnv2)
    options: dict[str, Any] = field(default_factory=lambda: {"dim": 8, "hidden": (64, 32)})  # of the model
    optimizer: str = "adagrad"  # ``adagrad``, ``rowwise-adagrad``, ``adam`` or ``sgd``
    lr: float = 0.02  # its learning rate
    gate_every: int = 4  # one of this many batches trains the gates, with a prediction of its own …
    gate_rows: int = 256  # … for its first rows
    probe_every: int = 8  # one of this many batches shows closed fields and tests nominated ones
    warmup: int = 100  # batches before gates are trained
    gates: GateSettings | None = field(default_factory=GateSettings)  # None: all fields, without gates and probes
    seed: int = 0  # of the first weights and of the probes

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {self.optimizer!r}")
        check_int("gate_every", self.gate_every, 1)
        check_int("gate_rows", self.gate_rows, 1)
        check_int("probe_every", self.probe_every, 2)


@dataclass(frozen=True)
class Progress:
    """What one batch gave: predictions made before learning from it, decisions, and the worth of the fields."""

    logits: Floats
    labels: Floats
    decisions: tuple[Decision, ...] = ()
    worth: Floats | None = None  # (N,) first-order gain of the fields of the schema, loss per row, if gates are trained


class OnlineLearner:
    """The model, its optimizer and its gates.

    Args:
        schema: the fields.
        settings: see :class:`LearnerSettings`.
        opened: the fields that are open at the start; None: all.
    """

    def __init__(self, schema: Schema, settings: LearnerSettings, opened: list[str] | None = None) -> None:
        self.schema, self.settings = schema, settings
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.seed)
            self.model: Model = make_model(settings.model, schema, **settings.options)
        inputs = getattr(self.model, "inputs", None)
        if not isinstance(inputs, Inputs) or set(inputs.names) != set(schema.names):
            raise InputError(f"model {settings.model!r} does not embed every field alone; use mlp, deepfm or dcnv2")
        self.inputs = inputs
        self.optimizer = OPTIMIZERS[settings.optimizer](self.model.parameters(), lr=settings.lr)
        self.gates: SteadyGates | None = None
        self.probe = AdditiveProbe(schema)
        self._order = [inputs.names.index(name) for name in schema.names]
        self._probed = np.array([inputs.names.index(name) for name in self.probe.names], int)
        self._factors: torch.Tensor | None = None
        if settings.gates is not None:
            self.gates = SteadyGates(inputs.names, settings.gates, opened, settings.seed)
            inputs.gate = lambda: self._factors
            if inputs.table is not None:
                inputs.table.skips_zero_gates = True
        self.batches = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """The selected fields, in the order of the schema."""
        kept = set(self.schema.names if self.gates is None else self.gates.kept)
        return tuple(name for name in self.schema.names if name in kept)

    def learn(self, batch: Batch) -> Progress:
        """Predict a batch, then learn from it."""
        gates, settings, number = self.gates, self.settings, self.batches + 1
        if gates is None:
            progress = Progress(self._update(batch), _as_floats(batch.labels[:, 0]))
        else:
            trains_gates = number > settings.warmup and number % settings.gate_every == 0
            worth = self._differentiate_gates(gates, batch) if trains_gates else None
            train = self._probe if number % settings.probe_every == 0 else self._train
            progress = replace(train(gates, batch), worth=worth)
            if trains_gates:
                gates.step()
        for decision in progress.decisions:
            if decision.action == "reopened":
                self._reset_optimizer(decision.field)
        self.batches += 1
        return progress

    @torch.no_grad()
    def _reset_optimizer(self, name: str) -> None:
        """Zero the state of the optimizer in the weights of a field: a reopened field learns as fast as a new one."""
        for path, axes in self.model.layout().items():
            weight = self.model.get_parameter(path)
            for axis, parts in axes.items():
                start = 0
                for part, size in parts:
                    if part == name:
                        rescale_state(self.optimizer, weight, 0.0, (axis, start, start + size))
                    start += size

    def _differentiate_gates(self, gates: SteadyGates, batch: Batch) -> Floats:
        """Set the gradient of x, with weights that have not learned from the batch; return the worth of the fields."""
        values = gates.values()
        self._factors = values.detach().requires_grad_()
        loss = bce_loss(*predict_batch(self.model, batch.head(self.settings.gate_rows)))
        (gradient,) = torch.autograd.grad(loss, self._factors)
        values.backward(gradient)
        return -_as_floats(gradient)[self._order]

    def _train(self, gates: SteadyGates, batch: Batch) -> Progress:
        self._factors = gates.applied()
        logits, labels = self._update(batch), _as_floats(batch.labels[:, 0])
        return Progress(logits, labels, self._probe_additive(gates, batch, logits, labels))

    def _probe_additive(self, gates: SteadyGates, batch: Batch, logits: Floats, labels: Floats) -> tuple[Decision, ...]:
        """Test what hidden fields would add, in every second batch."""
        if self.batches < self.settings.warmup // 2 or self.batches % 2:
            return ()
        columns = np.flatnonzero(gates.hidden()[self._probed])
        if not len(columns):
            return ()
        values = self.probe.values(batch, columns)
        gains = self.probe.gains(values, logits, labels).T
        decisions = gates.add_additive(self._probed[columns], gains)
        self.probe.add(values, logits, labels)
        return tuple(decisions)

    def _probe(self, gates: SteadyGates, batch: Batch) -> Progress:
        """Predict with the selected fields, test nominated ones, then learn with a random half of the closed ones."""
        applied, labels = gates.applied(), _as_floats(batch.labels[:, 0])
        logits = self._predict(batch, applied)
        losses, decisions = row_losses(logits, labels), []
        nominated = gates.nominated() if self.batches >= self.settings.warmup else []
        hidden = gates.hidden()
        for field_number in nominated[:MAX_TESTS]:
            changed = applied.clone()
            changed[field_number] = float(hidden[field_number])
            gains = row_losses(self._predict(batch, changed), labels) - losses
            decisions.append(gates.add_gains(field_number, -gains if hidden[field_number] else gains))
        drawn = np.random.default_rng([self.settings.seed, self.batches]).random(len(applied)) < 0.5
        self._factors = torch.where(torch.from_numpy(drawn & hidden), 1.0, applied)
        self._update(batch)
        return Progress(logits, labels, tuple(filter(None, decisions)))

    @torch.no_grad()
    def _predict(self, batch: Batch, factors: torch.Tensor) -> Floats:
        self._factors = factors
        return _as_floats(predict_batch(self.model, batch)[0][:, 0])

    def _update(self, batch: Batch) -> Floats:
        """Take a step of the model; return the logits before it."""
        self.optimizer.zero_grad()
        logits, labels = predict_batch(self.model, batch)
        loss = bce_loss(logits, labels)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(f"the loss of batch {self.batches} is not finite; lower the learning rate")
        loss.backward()
        self.optimizer.step()
        return _as_floats(logits.detach()[:, 0])

    def pruned(self, batch: Batch) -> Pruned:
        """Return the model of the selected fields alone, certified on a batch; the trainer is not changed."""
        model = make_model(self.settings.model, self.schema, **self.settings.options)
        model.load_state_dict(self.model.state_dict())
        gates = attach(model, steps=1, gate="lpfs++" if self.gates is None else self.gates.function)
        if self.gates is not None:
            x = dict(zip(self.gates.names, self.gates.absorbed_x().tolist(), strict=True))
            with torch.no_grad():
                gates.x.copy_(torch.tensor([x[name] for name in gates.names]))
        pruned = prune(model, absorb(model, batch=batch, partial=True), batch=batch)
        if (names := pruned.model.reads.names) != self.kept:  # type: ignore[union-attr]
            raise ExactnessError(f"the pruned model reads {names}, but {self.kept} are selected; nothing was published")
        return pruned

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "batches": self.batches}
        return state if self.gates is None else {**state, "gates": self.gates.state(), "probe": self.probe.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches = state["batches"]
        if self.gates is not None:
            self.gates.load(state["gates"])
            self.probe.state().copy_(state["probe"])


def _as_floats(values: torch.Tensor) -> Floats:
    array: Floats = values.double().numpy()
    return array
