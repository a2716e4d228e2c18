"""Progressive validation: every batch is predicted first and learned from after; gates follow the stream."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batch import Batch
from lpfs.errors import InputError, NonFiniteError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import Pruned, prune
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs
from lpfs.online.gates import Decision, GateSettings, SteadyGates
from lpfs.online.probe import AdditiveProbe
from lpfs.schema import Schema
from lpfs.train.evaluate import predict_batch
from lpfs.train.metrics import row_losses
from lpfs.train.step import OPTIMIZERS, bce_loss

Floats = npt.NDArray[np.float64]
MAX_TESTS = 32  # nominated fields that are tested in a probe batch


@dataclass(frozen=True)
class LearnerSettings:
    """Model, optimizer and probes.

    Args:
        model: name of a model of ``lpfs.models`` that embeds every field (mlp, deepfm, widedeep, fm, dcnv2).
        options: its options, such as ``dim`` and ``hidden``.
        optimizer: ``adagrad``, ``rowwise-adagrad``, ``adam`` or ``sgd``.
        lr: its learning rate.
        probe_every: one of this many batches is a probe batch: closed fields are shown, and nominated ones tested.
        warmup: batches before gates are penalized.
        gates: how fields are selected; None: all fields, without gates and probes.
        seed: of the first weights and of the probes.
    """

    model: str = "mlp"
    options: dict[str, Any] = field(default_factory=lambda: {"dim": 8, "hidden": (64, 32)})
    optimizer: str = "adagrad"
    lr: float = 0.02
    probe_every: int = 8
    warmup: int = 100
    gates: GateSettings | None = field(default_factory=GateSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {self.optimizer!r}")
        if self.probe_every < 2:
            raise InputError(f"probe_every must be at least 2, found {self.probe_every}")


@dataclass(frozen=True)
class Progress:
    """What one batch gave: predictions made before learning from it, decisions, and the worth of the fields."""

    logits: Floats
    labels: Floats
    decisions: tuple[Decision, ...]
    worth: Floats | None  # (N,) first-order gain of every field, loss per row; None in a probe batch


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
        self.gates = (
            None if settings.gates is None else SteadyGates(inputs.names, settings.gates, opened, settings.seed)
        )
        self.probe = AdditiveProbe(schema)
        self._probed = [] if self.gates is None else [self.gates.names.index(name) for name in self.probe.names]
        self._factors: torch.Tensor | None = None
        if self.gates is not None:
            inputs.gate = lambda: self._factors
        self.batches = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """The selected fields, in the order of the schema."""
        kept = set(self.schema.names if self.gates is None else self.gates.kept)
        return tuple(name for name in self.schema.names if name in kept)

    def learn(self, batch: Batch) -> Progress:
        """Predict a batch, then learn from it."""
        probes = self.gates is not None and self.batches % self.settings.probe_every == self.settings.probe_every - 1
        progress = self._probe(batch) if probes else self._train(batch)
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
                        for value in self.optimizer.state[weight].values():
                            if torch.is_tensor(value) and value.ndim > axis and len(value) == len(weight):
                                value.narrow(axis, start, size).zero_()
                    start += size

    def _train(self, batch: Batch) -> Progress:
        gates = self.gates
        if gates is not None:
            self._factors = gates.values()
            self._factors.retain_grad()
        logits, labels = self._update(batch), _labels(batch)
        worth, decisions = None, []
        if gates is not None and self._factors is not None:
            gradient = self._factors.grad
            assert gradient is not None
            worth = -gradient.double().numpy()
            gates.step(penalized=self.batches >= self.settings.warmup)
            decisions = self._probe_additive(batch, logits, labels)
        return Progress(logits, labels, tuple(decisions), worth)

    def _probe_additive(self, batch: Batch, logits: Floats, labels: Floats) -> list[Decision]:
        """Test what hidden fields would add, in every second batch."""
        gates, decisions = self.gates, []
        assert gates is not None
        if self.batches < self.settings.warmup // 2 or self.batches % 2:
            return []
        columns = np.flatnonzero(gates.hidden()[self._probed])
        if not len(columns):
            return []
        values = self.probe.values(batch, columns)
        for column, gain in zip(columns, self.probe.gains(values, logits, labels).T, strict=True):
            decision = gates.add_additive(self._probed[column], gain)
            if decision is not None:
                decisions.append(decision)
        self.probe.add(values, logits, labels)
        return decisions

    def _probe(self, batch: Batch) -> Progress:
        """Predict with the selected fields, test nominated ones, then learn with a random half of the closed ones."""
        gates = self.gates
        assert gates is not None
        applied, labels = gates.applied(), _labels(batch)
        logits = self._predict(batch, applied)
        losses, decisions = row_losses(logits, labels), []
        nominated = gates.nominated() if self.batches >= self.settings.warmup else []
        for name in nominated[:MAX_TESTS]:
            shown = applied.clone()
            shown[name] = 1.0
            decision = gates.add_gains(name, losses - row_losses(self._predict(batch, shown), labels))
            if decision is not None:
                decisions.append(decision)
        drawn = np.random.default_rng([self.settings.seed, self.batches]).random(len(applied)) < 0.5
        hidden = (gates.x.detach() == 0) | (applied == 0)
        self._factors = torch.where(torch.from_numpy(drawn) & hidden, 1.0, applied)
        self._update(batch)
        return Progress(logits, labels, tuple(decisions), None)

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
        model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        gates = attach(model, steps=1, gate="lpfs++" if self.gates is None else self.gates.function)
        if self.gates is not None:
            x = dict(zip(self.gates.names, self.gates.served_x().tolist(), strict=True))
            with torch.no_grad():
                gates.x.copy_(torch.tensor([x[name] for name in gates.names]))
        return prune(model, absorb(model, batch=batch, partial=True), batch=batch)

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


def _labels(batch: Batch) -> Floats:
    return _as_floats(batch.labels[:, 0])


def _as_floats(values: torch.Tensor) -> Floats:
    array: Floats = values.double().numpy()
    return array
