"""Random: fields drawn without looking at anything, the floor of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import ranked_model
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """No settings: the seed of the search decides."""


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("random", wish)


def search(task: Task) -> Selection:
    """Return K fields drawn at random; each score is a draw from [0, 1)."""
    Options(**known_keys(Options, task.options))
    model = ranked_model(task, "random")
    with Effort() as effort:
        drawn = np.random.default_rng(task.seed).random(len(model.names)).tolist()
    return ranked(task, "random", dict(zip(model.names, drawn, strict=True)), steps=0, **effort.told())
