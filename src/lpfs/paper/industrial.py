"""industrial: user, item and combine fields in the paper's multi-task network; numbers always stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs.errors import InputError
from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.versus import compared, curves_of, numbers, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 4, "other_dim": 4, "hidden": [64, 32]}
SMALL = Scale(60_000, "user_item", SHAPE, batch_size=256, pretrain=400, search=400, seeds=1)
FULL = Scale(model="user_item", batch_size=1024, seeds=3)
SHARES = (0.1, 0.3, 0.6)  # of the categorical fields
METHODS = ("lpfs++", "lpfs", "fscd", "permutation", "group_lasso")
CLAIMS = {"lpfs++": "best, more obviously than on Terabyte", "lpfs": "second"}


def run(job: Job) -> Found:
    """Compare on the fields with ids; those with numbers are not selected, as in the paper."""
    dense = tuple(each.name for each in job.log.schema if each.kind == "numeric")
    chosen = len(job.log.schema) - len(dense)
    if job.scale.model != "user_item":
        raise InputError("industrial needs user and item fields; this log has no such groups. Leave out --data")
    sizes = sorted({max(1, round(share * chosen)) + len(dense) for share in SHARES})
    found = compared(job, METHODS, sizes, must_keep=dense)
    level = found.values["all_fields"]["auc"]

    def figure(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw.curves(axes, curves_of(found), None if level is None else level["value"])
        axes.set_xlabel(f"fields kept, {len(dense)} with numbers among them")

    paper = {
        "fields": {"user": 250, "item": 46, "combine": 96, "numbers": 25},
        "curves": "only drawn in the paper",
    }
    return Found({**numbers(found), "numbers": len(dense)}, paper, rows_of(found, CLAIMS), figure)
