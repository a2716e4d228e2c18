"""terabyte: 27 fields, K = 10 … 26, against FSCD, UMEC, permutation and group LASSO; the paper's masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.masks import TERABYTE_MASKS, mask_fields
from lpfs.paper.trials import Trials
from lpfs.paper.versus import compared, curves_of, numbers, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(400_000, "dlrm", SHAPE, batch_size=256, pretrain=700, search=700, seeds=2)
FULL = Scale(model="dlrm", model_options={"dim": 16, "hidden": [256, 128]}, batch_size=512, seeds=3)
SIZES = (10, 14, 18, 22, 26)
METHODS = ("lpfs++", "lpfs", "fscd", "umec", "permutation", "group_lasso")
BASE = {"auc": 0.797948, "accuracy": 0.811079, "logloss": 0.423315}
CLAIMS = {
    "all fields": f"{BASE['auc']:.6f}",
    "lpfs++": "best, clearly so around half of the fields",
    "lpfs": "second",
    "umec": "poor",
}
MASKS = "the paper's masks"


def run(job: Job) -> Found:
    """Compare, then train the paper's masks as selections, by the same protocol."""
    sizes = tuple(TERABYTE_MASKS) if job.full else SIZES
    found = compared(job, METHODS, sizes)
    trials = Trials(job)
    masks = {
        size: sum(trials.auc(mask_fields(size), seed) for seed in job.seeds) / len(job.seeds)
        for size in sorted(sizes)
        if set(mask_fields(size)) <= set(trials.names)
    }
    curves = curves_of(found)
    rows = rows_of(found, CLAIMS)
    if masks:
        curves[MASKS] = masks
        claim = "what LPFS++ chose on the real log" + ("" if job.real else "; nothing on a simulated one")
        rows.append((MASKS, claim, ", ".join(f"{size}: {auc:.4f}" for size, auc in masks.items())))
    ours = {**numbers(found), "masks": {str(size): auc for size, auc in masks.items()}}
    level = found.values["all_fields"]["auc"]

    def figure(figure: Figure) -> None:
        draw.curves(figure.add_subplot(), curves, None if level is None else level["value"])

    paper = {"all_fields": BASE, "masks": dict(TERABYTE_MASKS), "curves": "only drawn in the paper"}
    return Found(ours, paper, rows, figure, (7.5, 4.2))
