"""alpha: AUC over K for several α, and the λ that keeps about the same number of fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials
from lpfs.plots import KEPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 4, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=256, pretrain=600, search=600, seeds=2)
FULL = Scale(model="user_item", batch_size=1024, seeds=3)
ALPHAS = (10.0, 50.0, 100.0, 200.0)
SHARES = (0.15, 0.4)  # of the fields, for the curves …
MORE = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # … of the real thing
PAPER: dict[str, list[float]] = {
    "alpha": [10, 50, 100, 200],
    "lambda": [0.004, 0.0066, 0.013, 0.02],
    "fields": [109, 119, 106, 101],
}
EQUAL = 109 / 392  # of the fields, for the table
START = 1 / 32  # λ of the first try: 1/Ση of the scaled schedule, below which nothing gets to zero by itself


def run(job: Job) -> Found:
    """Search for every α and K, then for the λ of every α."""
    trials = Trials(job)
    found: dict[str, list[Any]] = {}
    shares = MORE if job.full else SHARES
    for alpha in ALPHAS:
        options = {"alpha": alpha}
        found[f"α = {alpha:g}"] = [trials.evaluate_k(trials.size(each), options=options) for each in shares]
    target = trials.size(EQUAL)
    table = []
    for alpha in ALPHAS:
        equal = trials.search_penalty_for(target, job.seed, START, options={"alpha": alpha})
        table.append({"alpha": alpha, "lambda": equal["penalty"], "fields": len(equal["kept"])})
    curves = {
        name: {each["keep"]: each["auc"] for each in several if each["auc"] is not None}
        for name, several in found.items()
    }
    smallest = trials.size(shares[0])
    told = ", ".join(f"{name}: {points[smallest]:.4f}" for name, points in curves.items() if smallest in points)
    rows = [
        (f"AUC of {smallest} of {len(trials.names)} fields", "the larger α, the better, in general", told),
        (
            "λ for α = 10, 50, 100, 200",
            ", ".join(map(str, PAPER["lambda"])),
            ", ".join(f"{each['lambda']:.3g}" for each in table),
        ),
        (
            "fields left",
            ", ".join(map(str, PAPER["fields"])) + " of 392",
            ", ".join(str(each["fields"]) for each in table) + f" of {len(trials.names)}",
        ),
    ]
    ours = {"of": len(trials.names), "by_alpha": found, "equal_size": table, "target": target}

    def figure(figure: Figure) -> None:
        draw.curves(figure.add_subplot(1, 2, 1), curves)
        axes = figure.add_subplot(1, 2, 2)
        axes.plot([each["alpha"] for each in table], [each["lambda"] for each in table], "o-", color=KEPT)
        axes.set_xlabel("α")
        axes.set_ylabel("λ at equal size")

    return Found(ours, {"equal_size": PAPER}, rows, figure)
