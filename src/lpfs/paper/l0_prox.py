"""l0-prox: how many fields are left for a λ, under the hard threshold √(2λη) of ℓ0 and the soft one of ℓ1.

x starts at 1, so what matters to the hard threshold is whether √(2λη) is above or below 1 in the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpfs.gates.functions import gate_function
from lpfs.gates.schedule import scaled
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials
from lpfs.plots import KEPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=128, pretrain=1000, search=1000, seeds=1)
FULL = Scale(model="dlrm", seeds=1)
SOFT = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0)
HARD = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.3)  # times the λ at which √(2λη) is 1 in the first step


def run(job: Job) -> Found:
    """Search for every λ with both."""
    trials = Trials(job)
    total, rate = len(trials.names), scaled(gate_function("lpfs++"), trials.base.steps.search).lr.start
    edge = 1 / (2 * rate)
    left: dict[str, list[dict[str, Any]]] = {"l1": [], "l0": []}
    for prox, penalties in (("l1", SOFT), ("l0", tuple(each * edge for each in HARD))):
        for penalty in penalties:
            found = trials.search(job.seed, penalty=penalty, options={"prox": prox})
            gone = next((each["step"] for each in found["history"] if each["alive"] < total), None)
            left[prox].append({"lambda": penalty, "left": len(found["kept"]), "first_zero": gone})
    counts = {prox: [each["left"] for each in several] for prox, several in left.items()}
    reached = {prox: len(set(several)) for prox, several in counts.items()}
    rows = [
        (
            "ℓ1: fields left, λ rising",
            "shrinks by a small step λη, whatever x is",
            ", ".join(map(str, counts["l1"])),
        ),
        ("ℓ0: fields left, λ rising", "hardly penalised, or zero very quickly", ", ".join(map(str, counts["l0"]))),
        ("ℓ0: λ times its edge 1/(2η)", "-", ", ".join(map(str, HARD))),
        (
            "different numbers of fields left",
            "-",
            f"ℓ1 {reached['l1']}, ℓ0 {reached['l0']}, of {len(HARD)} λ each",
        ),
    ]
    ours = {"of": total, "edge": edge, "by_prox": left}

    def figure(figure: Figure) -> None:
        for number, (prox, several) in enumerate(left.items()):
            axes = figure.add_subplot(1, 2, number + 1)
            axes.plot([each["lambda"] for each in several], [each["left"] for each in several], "o-", color=KEPT)
            axes.set_xscale("log")
            axes.set_xlabel(f"λ, {prox}")
            axes.set_ylabel("fields left")
            axes.set_ylim(-1, total + 1)

    return Found(ours, {}, rows, figure, (8.0, 3.2))
