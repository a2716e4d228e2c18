"""robustness: how far the sets of several runs overlap when 177 of 332 fields are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpfs import plots
from lpfs.compare import statistics
from lpfs.paper import draw
from lpfs.paper.alpha import SHAPE
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = Scale(60_000, "mlp", SHAPE, batch_size=256, pretrain=600, search=800, seeds=4)
FULL = Scale(model="user_item", batch_size=1024, seeds=5)
KEPT, FIELDS = 177, 332
METHODS = ("lpfs++", "lpfs", "permutation")


def run(job: Job) -> Found:
    """Search with every seed, pretraining included."""
    every = job.log.schema.names
    trials = Trials(job, must_drop=every[FIELDS:])  # as many as the paper had, where there are more
    total = len(trials.names)
    keep = trials.size(KEPT / FIELDS)
    ours: dict[str, Any] = {"keep": keep, "of": total, "by_chance": chance(keep, total), "by_method": {}}
    rows = [("two sets drawn at random", "-", f"{chance(keep, total):.3f}")]
    for method in METHODS:
        sets = [trials.search(seed, method, keep=keep)["kept"] for seed in job.seeds]
        shared = statistics.mean_jaccard(sets)
        always = len(set.intersection(*map(set, sets)))
        told = {"overlap": shared, "in_all_runs": always, "recall": trials.recall(sets), "kept": sets}
        ours["by_method"][method] = told
        here = "-" if shared is None else f"{shared:.3f}; {always} of {keep} in all {len(sets)} runs"
        rows.append((f"{method}: overlap (Jaccard)", SAID if method.startswith("lpfs") else "-", here))

    def figure(figure: Figure) -> None:
        pairs = {
            method: [
                statistics.jaccard(one, other)
                for number, one in enumerate(each["kept"])
                for other in each["kept"][number + 1 :]
            ]
            for method, each in ours["by_method"].items()
        }
        axes = figure.add_subplot()
        draw.points(axes, pairs, "overlap of two runs (diamonds: mean; line: by chance)")
        axes.axvline(ours["by_chance"], color=plots.INK, linestyle="--", linewidth=1)

    return Found(ours, {"kept": KEPT, "of": FIELDS, "said": SAID}, rows, figure, (7.0, 2.6))


SAID = "highly overlapping"


def chance(keep: int, total: int) -> float:
    """Return about the overlap of two sets drawn at random: K² / N common ones of 2K - K² / N.

    >>> round(chance(177, 332), 3)
    0.363
    """
    common = keep * keep / total
    return common / (2 * keep - common)
