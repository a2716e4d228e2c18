"""All: every field is kept, whatever is asked for; what a model gives that nothing is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lpfs.methods.effort import Effort
from lpfs.methods.ranking import ranked
from lpfs.methods.sample import model_of
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys


@dataclass(frozen=True)
class Options:
    """No settings: there is nothing to choose."""


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse nothing: any wish has the same answer."""


def search(task: Task) -> Selection:
    """Return all fields, with a score of 1 each; the model is not trained."""
    Options(**known_keys(Options, task.options))
    model = model_of(task, "all")
    with Effort() as effort:
        every = replace(task, wish=Wish(keep=len(model.names), must_keep=task.wish.must_keep))
    return ranked(every, "all", dict.fromkeys(model.names, 1.0), steps=0, **effort.told())
