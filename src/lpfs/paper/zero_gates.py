"""zero-gates: how many gates are at zero over the steps, for several α, under λ that leave as many fields."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lpfs.paper import draw
from lpfs.paper.alpha import ALPHAS, EQUAL, SHAPE, START
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = Scale(60_000, "mlp", SHAPE, batch_size=256, pretrain=600, search=1000, seeds=1)
FULL = Scale(model="user_item", batch_size=1024, seeds=1)
LAST = 0.9  # from there on a search is near its end


def run(job: Job) -> Found:
    """Search for the λ of every α, and look at how the number went."""
    trials = Trials(job)
    target, total = trials.size(EQUAL), len(trials.names)
    lines: dict[str, list[tuple[int, int]]] = {}
    ours: dict[str, Any] = {"of": total, "target": target, "by_alpha": {}}
    for alpha in ALPHAS:
        equal = trials.search_penalty_for(target, job.seed, START, options={"alpha": alpha})
        zeros = [(each["step"], total - each["alive"]) for each in equal["history"]]
        lines[f"α = {alpha:g}, λ = {equal['penalty']:.3g}"] = zeros
        told = moves(zeros)
        ours["by_alpha"][f"{alpha:g}"] = {"penalty": equal["penalty"], "left": len(equal["kept"]), **told}
    by = ours["by_alpha"].values()

    def listed(key: str) -> str:
        return ", ".join(str(each[key]) for each in by)

    names = "α = " + ", ".join(f"{each:g}" for each in ALPHAS)
    rows = [
        (f"first zero gate at step; {names}", "earlier for larger α", listed("first")),
        ("gates revived between records", "more for larger α", listed("revived")),
        ("of them in the last tenth", "the curves stop oscillating", listed("revived_late")),
        ("fields left", "about the same", listed("left")),
    ]

    def figure(figure: Figure) -> None:
        draw.series(figure.add_subplot(), lines, "step", "zero gates")

    return Found(ours, {"alpha": list(ALPHAS)}, rows, figure, (7.0, 4.0))


def moves(zeros: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return when the first gate is at zero, and how often their number falls: in all, and near the end.

    >>> moves([(1, 0), (2, 3), (3, 1), (4, 4)])
    {'first': 2, 'revived': 2, 'revived_late': 0}
    """
    falls = [(now[0], before[1] - now[1]) for before, now in pairwise(zeros) if now[1] < before[1]]
    end = zeros[-1][0] if zeros else 0
    return {
        "first": next((step for step, count in zeros if count), None),
        "revived": sum(each for _, each in falls),
        "revived_late": sum(each for step, each in falls if step > LAST * end),
    }
