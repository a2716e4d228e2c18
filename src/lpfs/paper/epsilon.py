"""epsilon: how fast ε falls, and where it ends, between 1e-4 and 1e-8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.gates.functions import gate_function
from lpfs.gates.schedule import Decay, Schedule, scaled
from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=128, pretrain=1000, search=1000, seeds=3)
FULL = Scale(model="dlrm", seeds=3)
SHARE = 1 / 3
FLOORS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
REACHED = (0.25, 0.5, 0.75, 1.0)  # part of the search after which ε is at its floor of 1e-5


def falling(steps: int, floor: float, by: float = 1.0) -> Schedule:
    """Return the default schedule with an ε that falls to ``floor`` within a part of the search."""
    gate = gate_function("lpfs++")
    rate = (floor / gate.epsilon) ** (1 / max(1, round(by * steps)))
    return Schedule(Decay(gate.epsilon, rate, floor=floor), scaled(gate, steps).lr, scaled(gate, steps).refresh)


def run(job: Job) -> Found:
    """Search with every schedule and train what it keeps."""
    trials = Trials(job)
    keep, steps = trials.size(SHARE), trials.base.steps.search
    asked = {f"ends at {floor:g}": falling(steps, floor) for floor in FLOORS}
    asked |= {f"there at {part:.0%}": falling(steps, 1e-5, part) for part in REACHED if part < 1}
    found = {name: trials.evaluate_k(keep, options={"schedule": each}) for name, each in asked.items()}
    aucs = {name: each["by_seed"] for name, each in found.items()}
    means = {name: each["auc"] for name, each in found.items() if each["auc"] is not None}

    def apart(names: list[str]) -> str:
        told = [means[name] for name in names if name in means]
        return f"{max(told) - min(told):.5f} between the best and the worst mean" if told else "-"

    within = [max(each) - min(each) for each in aucs.values() if None not in each and len(each) > 1]
    ends, rates = (
        [name for name in aucs if name.startswith("ends")],
        [name for name in aucs if not name.startswith("ends")],
    )
    rows = [
        ("final ε from 1e-4 to 1e-8: AUC", "no significant effect", apart(ends)),
        ("decay rate: AUC", "not much important", apart([*rates, f"ends at {1e-5:g}"])),
        ("the same setting over seeds: AUC", "-", f"{max(within, default=0.0):.5f} at most"),
    ]
    ours = {"keep": keep, "of": len(trials.names), "by_schedule": found}

    def figure(figure: Figure) -> None:
        draw.points(figure.add_subplot(), aucs, "test AUC (diamonds: mean)")

    return Found(ours, {"final_epsilon": list(FLOORS)}, rows, figure, (7.0, 3.6))
