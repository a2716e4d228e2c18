"""Polarize: the callback that drives gates through a search and writes down how it went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lpfs.data.batch import Batch
from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD
from lpfs.methods.effort import Effort
from lpfs.methods.held import Held, held_grad
from lpfs.train.callbacks import Callback, State
from lpfs.train.cuda_graph import clone_batch, copy_into, same_shape
from lpfs.train.evaluate import on_device
from lpfs.train.loggers import sparkline

RECORDS = 200  # lines of history a search leaves


class Polarize(Callback):
    """Moves the gates after every step of the model: proximal step, then ε, η and λ.

    Args:
        gates: on the model that is trained.
        prox: their optimizer, as ``gates.optimizer(…)`` made it.
        held: batches that the gates learn from, where the weights of the model must not; None: both learn from
            the batch of the step.
        effort: counts the rows beside the steps.

    """

    def __init__(
        self, gates: Gates, prox: ProxSGD, held: Iterable[Batch] | None = None, effort: Effort | None = None
    ) -> None:
        self.gates, self.prox, self.effort = gates, prox, effort or Effort()
        self.held = None if held is None else Held(held)
        self.batch: Batch | None = None  # of the held-out rows, for this step
        self.kept: Batch | None = None  # where a captured step reads them
        self.every = max(1, gates.steps // RECORDS)
        self.history: list[dict[str, Any]] = []

    def fetch(self, state: State) -> bool:
        """Get the held-out rows of this step; those of a captured step lie where it reads them."""
        if self.held is None:
            return True
        batch = on_device(self.held.next(), self.gates.x.device)
        self.effort.add(forwards=len(batch), backwards=len(batch))
        if state.config.graph and not batch.bags and (self.kept is None or len(batch) > len(self.kept)):
            self.kept = clone_batch(batch, self.gates.x.device)
            state.recapture = True
        if self.kept is None or not same_shape(self.kept, batch):
            self.batch = batch
            return False
        copy_into(self.kept, batch)
        self.batch = self.kept
        return True

    def within_step(self, state: State) -> None:
        """Move the gates, by their gradient on held-out rows if there are some."""
        if self.batch is not None:
            self.gates.x.grad = held_grad(state, self.batch, self.gates.x, self.gates.model_parameters())
        self.prox.step()
        self.gates.step()

    def after_step(self, state: State) -> None:
        """Write down where they are, now and then."""
        if state.step % self.every == 0 or state.step == self.gates.steps:
            self.record(state)

    def record(self, state: State) -> None:
        """Write down where the search stands."""
        status = self.gates.status()
        values = [round(each, 6) for each in self.gates.values.tolist()]
        told = {"alive": status.alive, "penalty": status.penalty, "epsilon": status.epsilon, "gate_lr": status.lr}
        state.note("search", {**told, "values": {"gates": values}})
        self.history.append(
            {
                "step": state.step,
                "loss": float("nan") if state.loss is None else float(state.loss.detach()),
                "alive": status.alive,
                "penalty": status.penalty,
                "epsilon": status.epsilon,
                "lr": status.lr,
                "gates": values,
            }
        )

    def on_end(self, state: State) -> None:
        """Let go of the held-out rows."""
        self.batch = self.kept = None
        if self.held is not None:
            self.held.close()

    def describe(self, state: State) -> str:
        """Return how many gates are alive, and how that came.

        It is what was written down last: to look again would wait for a GPU.
        """
        total = len(self.gates.names)
        seen = [each["alive"] for each in self.history]
        return f"{seen[-1]} of {total} gates alive {sparkline(seen, total)}" if seen else ""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill; x, ε and λ are buffers of the model."""
        held = {} if self.held is None else {"held": self.held.state_dict()}
        return {"prox": self.prox.state_dict(), "history": list(self.history), **held}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        held = self.prox.param_groups[0]  # λ and its weights were set from the gates' own buffers
        settings = {name: held[name] for name in ("penalty", "weights")}
        self.prox.load_state_dict(values["prox"])
        self.prox.param_groups[0].update(settings)
        self.history = list(values["history"])
        if self.held is not None:
            self.held.load_state_dict(values["held"])
