"""distribution: the norms of group LASSO against the gates of LPFS and LPFS++, at the same number of fields."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from lpfs.compare.run_dir import Record
from lpfs.methods.first_layer import first_layer
from lpfs.models.base import Model
from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials
from lpfs.pipeline.plan import RunPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=128, pretrain=1000, search=1500, seeds=1)
FULL = Scale(model="dlrm", seeds=1)
SHARE = 0.5  # of the fields is kept
NEAR = 0.2  # of the median of those that are not zero: what is below is near zero


def norms(work: RunPlan, model: Model) -> Record:
    """Return the lengths of the first layer's columns, field by field."""
    layer = first_layer(model, "group_lasso")
    return dict(zip(layer.names, layer.energies().sqrt().tolist(), strict=True))


def run(job: Job) -> Found:
    """Search with both, and look at what is left."""
    trials = Trials(job)
    keep = trials.size(SHARE)
    values: dict[str, list[float]] = {}
    found = trials.search(job.seed, "group_lasso", keep=keep, probe=norms)
    values["group LASSO: ‖W‖"] = list(found["probe"].values())
    for method in ("lpfs", "lpfs++"):
        gates = trials.search(job.seed, method, keep=keep)["gates"].values()
        values[f"{method}: gate"] = [abs(each) for each in gates]
    ours: dict[str, Any] = {"keep": keep, "of": len(trials.names)}
    rows = []
    for (name, each), claim in zip(values.items(), CLAIMS, strict=True):
        told = polar(each)
        ours[name] = {**told, "values": [round(one, 6) for one in each]}
        here = f"{told['zero']} at 0, {told['near']} near it; smallest / median of the rest {told['smallest']:.3f}"
        rows.append((name, claim, here))

    def figure(figure: Figure) -> None:
        for number, (name, each) in enumerate(values.items()):
            draw.histogram(figure.add_subplot(1, 3, number + 1), each, name)

    return Found(ours, {"said": list(CLAIMS)}, rows, figure, (10.0, 3.2))


CLAIMS = ("continuous; some 0, many very close to 0", "exactly 0, or around 1", "exactly 0, or around 1")


def polar(values: list[float]) -> dict[str, Any]:
    """Return how many are exactly zero, how many of the others are near it, and how near the smallest of them is.

    >>> polar([0.0, 0.1, 1.0, 1.2])
    {'zero': 1, 'near': 1, 'smallest': 0.1, 'median': 1.0}
    """
    alive = sorted(each for each in values if each != 0)
    if not alive:
        return {"zero": len(values), "near": 0, "smallest": 0.0, "median": 0.0}
    middle = median(alive)
    near = sum(each < NEAR * middle for each in alive)
    return {"zero": len(values) - len(alive), "near": near, "smallest": alive[0] / middle, "median": middle}
