"""Polarize: the callback that drives gates through a search and writes down how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD
from lpfs.train.callback import Callback, State
from lpfs.train.progress import sparkline

RECORDS = 200  # lines of history a search leaves


class Polarize(Callback):
    """Moves the gates after every step of the model: proximal step, then ε, η and λ.

    Args:
        gates: on the model that is trained.
        prox: their optimizer, as ``gates.optimizer(…)`` made it.

    """

    def __init__(self, gates: Gates, prox: ProxSGD) -> None:
        self.gates, self.prox = gates, prox
        self.every = max(1, gates.steps // RECORDS)
        self.history: list[dict[str, Any]] = []

    def within_step(self, state: State) -> None:
        """Move the gates."""
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

    def describe(self, state: State) -> str:
        """Return how many gates are alive, and how that came.

        It is what was written down last: to look again would wait for a GPU.
        """
        total = len(self.gates.names)
        seen = [each["alive"] for each in self.history]
        return f"{seen[-1]} of {total} gates alive {sparkline(seen, total)}" if seen else ""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill; x, ε and λ are buffers of the model."""
        return {"prox": self.prox.state_dict(), "history": list(self.history)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        held = self.prox.param_groups[0]  # λ and its weights were set from the gates' own buffers
        settings = {name: held[name] for name in ("penalty", "weights")}
        self.prox.load_state_dict(values["prox"])
        self.prox.param_groups[0].update(settings)
        self.history = list(values["history"])
