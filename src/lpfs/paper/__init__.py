"""Experiments of the LPFS paper: ``lpfs reproduce NAME``.

::

    reproduce.py          reproduce(): data, experiment, JSON and figure
    registry.py           EXPERIMENTS: function, scales and claim of each experiment; does not import torch
    context.py            what an experiment is given and returns; its data
    trials.py             searches and trainings of an experiment; figures
    comparisons.py        terabyte, terabyte-cross, industrial
    ablations.py          alpha, zero-gates, epsilon, l0-prox, robustness
    gate_experiments.py   gates, gate-functions, distribution
    cost_experiments.py   hot-start, complexity
    masks.py              TERABYTE_MASKS: the fields that the paper kept

"""

from typing import TYPE_CHECKING

from lpfs._imports import lazy_exports

if TYPE_CHECKING:
    from lpfs.paper.masks import TERABYTE_MASKS, mask_fields
    from lpfs.paper.registry import EXPERIMENTS
    from lpfs.paper.reproduce import Reproduced, reproduce

__all__ = ["EXPERIMENTS", "TERABYTE_MASKS", "Reproduced", "mask_fields", "reproduce"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "EXPERIMENTS": "registry",
        "TERABYTE_MASKS": "masks",
        "mask_fields": "masks",
        "Reproduced": "reproduce",
        "reproduce": "reproduce",
    },
)
