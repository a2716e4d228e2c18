"""The paper, experiment by experiment: ``lpfs reproduce NAME``.

::

    registry.py       the experiments by name, with what the paper claims; a file each beside it
    verb.py           reproduce: data, experiment, JSON and figure
    job.py            what an experiment gets and gives
    source.py         real files or a simulated preset
    trials.py         searches and trainings, by compare's own protocol; versus.py: whole comparisons
    tied.py           gates whose x is the norm of a field's first-layer weights
    draw.py           figures
    masks.py          TERABYTE_MASKS: the fields that the paper chose

"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpfs.paper.masks import TERABYTE_MASKS, mask_fields
    from lpfs.paper.registry import EXPERIMENTS
    from lpfs.paper.verb import Reproduced, reproduce

__all__ = ["EXPERIMENTS", "TERABYTE_MASKS", "Reproduced", "mask_fields", "reproduce"]

# imported when they are asked for: the command line lists the experiments without torch
_PLACES = {
    "EXPERIMENTS": "registry",
    "TERABYTE_MASKS": "masks",
    "mask_fields": "masks",
    "Reproduced": "verb",
    "reproduce": "verb",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
