"""Baselines of comparisons: all fields, random fields, and the true fields of a simulated log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lpfs._fileio import read_json
from lpfs._validation import check_json
from lpfs.errors import InputError
from lpfs.methods.base import Method, RankingMethod, SearchCost, SearchTask, rank_fields, require_model
from lpfs.methods.target import TARGET_KINDS, SelectionTarget
from lpfs.models.base import Model
from lpfs.schema import Selection

TRUTH_SCHEMA = {  # of truth.json, see read_json
    "fields": [
        {"name": str, "role": str, "true": bool, "effect": float, "strength_by_day?": list[float], "pair_with?": str}
    ]
}
FADED_EFFECT = 1e-3  # factor on the effect of a true field without an effect on the last day


class AllFields(Method):
    """Every field is kept, for any target: the quality of the full model."""

    targets = TARGET_KINDS
    search_per_k = True

    def search(self, task: SearchTask) -> Selection:
        model = require_model(task.model, self.name)
        task = replace(task, target=SelectionTarget(keep=len(model.names), must_keep=task.target.must_keep))
        return rank_fields(task, self.name, dict.fromkeys(model.names, 1.0), steps=0, **SearchCost().to_dict())


class RandomFields(RankingMethod):
    """K random fields: the lower baseline of every comparison."""

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        scores = np.random.default_rng(task.seed).random(len(model.names)).tolist()
        return dict(zip(model.names, scores, strict=True)), {}


@dataclass(frozen=True)
class OracleOptions:
    """Path of truth.json, if the rows are not a simulated Dataset that contains it."""

    truth: str | None = None

    def __post_init__(self) -> None:
        if self.truth is not None and not isinstance(self.truth, str):
            raise InputError(f"truth must be the path of a truth.json, found {self.truth!r}")


class Oracle(RankingMethod):
    """The fields that a simulated log was generated from, read from its truth.json.

    The score of a field is the standard deviation of what it adds to the logit on the last day of the log; of a
    pair, of what both add together. A field whose effect has ended by then ranks below those with an effect, and
    above those that never had one. A cross of a model scores if the truth has that pair.

    These are not necessarily the fields that can be learned from the rows: if a field of many values has a strong
    effect, a method that drops it can be better.
    """

    Options = OracleOptions
    options: OracleOptions

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        parts = {name: fields for name, fields in model.fields_of_parts().items() if name in model.names}
        effects, partner = true_effects(load_truth(task, self.options.truth))
        unknown = [name for name in model.reads.names if name not in effects]
        if unknown:
            raise InputError(f"the truth has no field {unknown[0]!r}; give the truth.json of this log")
        scores: dict[str, float] = {}
        for name, fields in parts.items():
            if any(set(other) < set(fields) for other in parts.values()):  # a cross
                scores[name] = effects[fields[0]] if partner[fields[0]] == fields[-1] else 0.0
            else:
                scores[name] = sum(effects[field] ** 2 for field in fields) ** 0.5
        return scores, {}


def load_truth(task: SearchTask, path: str | None) -> Any:
    """Return the truth of the log that is searched: from a file, or from the Dataset of the stream."""
    if path is not None:
        try:
            return read_json(Path(path), TRUTH_SCHEMA)
        except (OSError, ValueError) as error:
            raise InputError(f"oracle cannot read the truth {path}: {error}") from None
    dataset = getattr(task.stream, "dataset", None)
    if dataset is None:
        raise InputError("oracle needs the truth of a simulated Dataset; give a stream of a Dataset, or truth=")
    try:
        truth = dataset.attached("truth.json")
    except InputError as error:
        raise InputError(f"oracle needs a simulated log; {dataset.path} has no truth.json") from error
    check_json(truth, TRUTH_SCHEMA, "truth.json")
    return truth


def true_effects(truth: Any) -> tuple[dict[str, float], dict[str, str | None]]:
    """Return the effect of every field, and the partner of every field that matters only in a pair."""
    effects: dict[str, float] = {}
    for field in truth["fields"]:
        strength = (field.get("strength_by_day") or [1.0])[-1]
        effects[field["name"]] = field["effect"] * max(strength, FADED_EFFECT) if field["true"] else 0.0
    return effects, {field["name"]: field.get("pair_with") for field in truth["fields"]}
