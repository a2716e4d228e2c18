"""gate-functions: every gate function there is, at one number of fields: AUC, recall and overlap over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.errors import InputError
from lpfs.gates.functions import FUNCTIONS
from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.tied import find_tied
from lpfs.paper.trials import Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=128, pretrain=1000, search=1000, seeds=3)
FULL = Scale(model="dlrm", seeds=3)
SHARE = 1 / 3
TIED = "x = norm of W (lpfs++)"


def run(job: Job) -> Found:
    """Search with every function and train what it keeps."""
    trials = Trials(job)
    keep = trials.size(SHARE)
    found = {name: trials.evaluate_k(keep, options={"gate": name}) for name in FUNCTIONS}
    try:
        found[TIED] = trials.evaluate_k(keep, method="group_lasso", find=find_tied, tied=True)
    except InputError as error:  # no first layer of that kind in this model
        job.console.message(f"  {TIED}: {error}")
    rows = []
    for name, each in found.items():
        auc = "-" if each["auc"] is None else f"AUC {each['auc']:.4f}"
        recall = "" if each["recall"] is None else f", recall {each['recall']:.2f}"
        overlap = "" if each["overlap"] is None else f", overlap {each['overlap']:.2f}"
        rows.append((name, SAID.get(name, "not tried"), f"{auc}{recall}{overlap}"))
    ours = {"keep": keep, "of": len(trials.names), "by_function": found}

    def figure(figure: Figure) -> None:
        aucs = {name: each["by_seed"] for name, each in found.items()}
        draw.points(figure.add_subplot(), aucs, f"test AUC of {keep} fields (diamonds: mean)")

    return Found(ours, {"said": SAID}, rows, figure, (7.0, 4.2))


SAID = {"lpfs": "its first method", "lpfs++": "its best method", "lpfs-noise": "named as another solution"}
