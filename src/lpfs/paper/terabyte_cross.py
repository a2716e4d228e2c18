"""terabyte-cross: the 27 fields and all their crosses, 378 features that are chosen from alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.versus import compared, curves_of, numbers, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 4, "hidden": [32, 16]}
SMALL = Scale(400_000, "dlrm_cross", SHAPE, batch_size=256, pretrain=500, search=500, seeds=1)
FULL = Scale(model="dlrm_cross", model_options={"dim": 16, "hidden": [256, 128]}, batch_size=512, seeds=3)
SIZES = {False: (20, 60, 150), True: (20, 40, 60, 80, 100, 150, 200, 300)}
METHODS = ("lpfs++", "lpfs", "fscd", "permutation", "group_lasso", "autofis")
CLAIMS = {"lpfs++": "ahead, above all where few are left", "lpfs": "ahead of the others"}


def run(job: Job) -> Found:
    """Compare."""
    found = compared(job, METHODS, SIZES[job.full])
    level = found.values["all_fields"]["auc"]

    def figure(figure: Figure) -> None:
        draw.curves(figure.add_subplot(), curves_of(found), None if level is None else level["value"])

    return Found(
        numbers(found), {"features": 378, "curves": "only drawn in the paper"}, rows_of(found, CLAIMS), figure
    )
