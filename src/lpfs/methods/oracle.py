"""Oracle: the fields that a simulated log was drawn from, read in its truth.

A field's score is the standard deviation of what it adds to the logit on the last day of the log; of a pair, of
what both add together. A field whose effect has faded away by then comes after those that still have one, and
before those that never had. A cross of a model scores where the truth has that pair.

That is not what the rows at hand can teach: where a field of many values has a strong effect, a method that leaves
it alone can be ahead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpfs.errors import InputError
from lpfs.methods.effort import Effort
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import ranked_model
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Selection, known_keys

FADED = 1e-3  # what is left of the score of a field without an effect on the last day


@dataclass(frozen=True)
class Options:
    """Where the truth is, if the log is not a simulated Dataset that has it."""

    truth: str | None = None

    def __post_init__(self) -> None:
        if self.truth is not None and not isinstance(self.truth, str):
            raise InputError(f"truth must be the path of a truth.json, found {self.truth!r}")


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("oracle", wish)


def search(task: Task) -> Selection:
    """Return the K fields with the largest true effects; the model is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = ranked_model(task, "oracle")
    with Effort() as effort:
        parts = {name: read for name, read in model.fields_of_parts().items() if name in model.names}
        alone, partner = effects(truth_of(task, options.truth))
        scores: dict[str, float] = {}
        for name, read in parts.items():
            if any(set(other) < set(read) for other in parts.values()):  # a cross
                scores[name] = alone[read[0]] if partner[read[0]] == read[-1] else 0.0
            else:
                scores[name] = sum(alone[field] ** 2 for field in read) ** 0.5
    return ranked(task, "oracle", scores, steps=0, **effort.told())


def truth_of(task: Task, given: str | None) -> Any:
    """Return the truth of the log that is searched on."""
    if given is not None:
        try:
            return json.loads(Path(given).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"oracle cannot read the truth {given}: {error}") from None
    dataset = getattr(task.stream, "dataset", None)
    if dataset is None:
        raise InputError("oracle reads the truth of a simulated Dataset; the stream given is not one of a Dataset")
    try:
        return dataset.attached("truth.json")
    except InputError as error:
        raise InputError(
            f"oracle knows the true fields of simulated logs only; {dataset.path} has no truth.json"
        ) from error


def effects(truth: Any) -> tuple[dict[str, float], dict[str, str | None]]:
    """Return the effect of every field, and of those that matter only in a pair their partner."""
    found: dict[str, float] = {}
    for each in truth["fields"]:
        strength = each["strength_by_day"][-1] if each["true"] else 0.0
        found[each["name"]] = each["effect"] * max(strength, FADED) if each["true"] else 0.0
    return found, {each["name"]: each["pair_with"] for each in truth["fields"]}
